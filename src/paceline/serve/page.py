"""The API's description for people: one page made from the OpenAPI document, without scripts."""

from __future__ import annotations

from html import escape
from typing import Any

STYLE = """
:root { color-scheme: light dark; font: 16px/1.5 system-ui, sans-serif; }
body { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font-size: .9em; } summary { cursor: pointer; padding: .4rem 0; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
td, th { text-align: left; vertical-align: top; padding: .15rem .8rem .15rem 0; border-bottom: 1px solid #8884; }
"""


def page(description: dict[str, Any]) -> str:
    """HTML for an OpenAPI document."""
    info, parts = description["info"], []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(_operation(description, method.upper(), path, operation))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>{escape(info['title'])} API</title><style>{STYLE}</style>"
        f"<h1>{escape(info['title'])} API {escape(info['version'])}</h1><p>{escape(info['description'])}</p>"
        "<p>Every request carries <code>Authorization: Bearer TOKEN</code>; those of a worker also "
        '<code>X-Worker-Secret</code>. Errors are <code>{"error": "a sentence"}</code>. '
        "<a href=openapi.json>openapi.json</a></p>" + "".join(parts) + "</html>"
    )


def asks_token() -> str:
    """HTML with a field for the token, for a browser that came without; it puts the token into the address."""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<meta name=referrer content=no-referrer><title>Paceline</title><style>{STYLE}</style><main>"
        "<h1>This service asks for its token</h1><form method=get><p><label>Token "
        "<input type=password name=token required autofocus autocomplete=current-password></label> "
        "<button>Open</button></p></form><p>It was printed when the service began, or is kept in its directory. "
        "Programs send it as <code>Authorization: Bearer TOKEN</code>.</p></main></html>"
    )


def _operation(description: dict[str, Any], method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (each["name"], each["in"], _kind(each.get("schema", {})), each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    rows += [(name, "body", kind, text) for name, kind, text in _fields(description, body)]
    answers = []
    for status, answer in sorted(operation["responses"].items()):
        schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
        fields = ", ".join(f"{name}: {kind}" for name, kind, _ in _fields(description, schema))
        answers.append((status, answer["description"], fields, ""))
    return (
        f"<details><summary><code>{method} {escape(path)}</code> {escape(operation.get('description', ''))}"
        f"</summary>{_table(rows)}{_table(answers)}</details>"
    )


def _table(rows: list[tuple[str, str, str, str]]) -> str:
    cells = ("".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>" if rows else ""


def _fields(description: dict[str, Any], schema: dict[str, Any]) -> list[tuple[str, str, str]]:
    if "$ref" in schema:
        schema = description["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return [
        (name, _kind(field), field.get("description", ""))
        for name, field in schema.get("properties", {}).items()
    ]


def _kind(schema: dict[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"].rsplit("/", 1)[1])
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    kind = str(schema.get("type", ""))
    low, high = schema.get("minimum"), schema.get("maximum")
    return kind + (f" {low} to {high}" if low is not None and high is not None else "")
