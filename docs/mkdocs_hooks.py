"""What the site has beyond the pages that people write: the reference and the examples.

MkDocs calls the functions (``hooks`` in mkdocs.yml). A public module (see ``public_modules``) gets a page of
the reference; each program in examples/ gets a page with its source, so that links to it hold.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "paceline"

# Public by mention in a page's text.
MORE = (
    "paceline.policies",
    "paceline.rounds",
    "paceline.balance",
    "paceline.balance.members",
    "paceline.costs",
    "paceline.forecast.overheads",
    "paceline.forecast.kalman",
    "paceline.forecast.saved",
    "paceline.paramserver.config",
    "paceline.paramserver.coordinator",
    "paceline.paramserver.rates",
    "paceline.data.datasets",
    "paceline.data.traces",
)
# Packages whose registry names classes, one file each, whose fields are the options people set.
REGISTRIES = {
    "paceline.balance": "POLICIES",
    "paceline.backup": "BACKUPS",
    "paceline.sync": "GATES",
    "paceline.forecast": "FORECASTS",
}


def _file(module: str) -> Path:
    path = PACKAGE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _assigned(tree: ast.Module, name: str) -> ast.expr | None:
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                return node.value
    return None


def _listed(module: str) -> list[str] | None:
    value = _assigned(ast.parse(_file(module).read_text(encoding="utf-8")), "__all__")
    return None if value is None else list(ast.literal_eval(value))


def _imported() -> set[str]:
    """Modules that a page's or an example's code imports from."""
    found = set()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *_examples()):
        text = path.read_text(encoding="utf-8")
        found |= set(re.findall(r"^\s*(?:from|import) (paceline[\w.]*)", text, re.MULTILINE))
        for home, names in re.findall(r"^\s*from (paceline[\w.]*) import ([\w, ]+)", text, re.MULTILINE):
            parts = {name.split()[0] for name in names.split(",") if name.strip()} - set(_listed(home) or ())
            found |= {f"{home}.{part}" for part in parts if _file(f"{home}.{part}").is_file()}
    return found


def public_modules() -> list[str]:
    """Modules with ``__all__``, those that pages and examples import from, and those of MORE, by name."""
    found = set(MORE) | _imported()
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if _listed(module) is not None:
            found.add(module)
    return sorted(found)


def _registered(module: str) -> list[str]:
    """Full names of the classes in a package's registry."""
    tree = ast.parse(_file(module).read_text(encoding="utf-8"))
    registry = _assigned(tree, REGISTRIES[module])
    assert isinstance(registry, ast.Dict), f"{module}.{REGISTRIES[module]} is no plain dictionary"
    homes = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    return [homes[value.id] for value in registry.values if isinstance(value, ast.Name)]


def _hidden(module: str) -> list[str]:
    """Public functions named like the file that defines them, which the module's own listing takes for the file."""
    return [name for name in _listed(module) or () if _file(f"{module}.{name}").is_file()]


def _page(module: str) -> str:
    page = f"# {module}\n\n::: {module}\n    options: {{show_root_heading: false}}\n"
    for name in _hidden(module):
        page += f"\n::: {module}.{name}.{name}\n"
    if module in REGISTRIES:
        page += "\n## By name\n\nWhat a name creates, with its options after a colon.\n"
        page += "".join(f"\n::: {name}\n    options: {{heading_level: 3}}\n" for name in _registered(module))
    return page


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return re.split(r"(?<=[.?])\s", text.replace("\n", " "), maxsplit=1)[0].rstrip(":")


def _index() -> str:
    rows = "\n".join(f"| [{m}]({m}.md) | {_first_sentence(_file(m))} |" for m in public_modules())
    return (
        "# Reference\n\nWhat is public, from the docstrings. Whatever is not here may change without notice.\n\n"
        f"| module | what it has |\n|---|---|\n{rows}\n"
    )


def on_config(config: Any) -> Any:
    """Put the pages that are made here into the navigation."""
    pages = [{module: f"reference/{module}.md"} for module in public_modules()]
    examples = [{path.name: f"examples/{path.stem}.md"} for path in _examples()]
    for entry in config.nav:
        if "Reference" in entry:
            entry["Reference"] = [
                {"Overview": "reference/index.md"},
                {"Modules": pages},
                {"Examples": examples},
            ]
    return config


def _examples() -> list[Path]:
    return sorted((ROOT / "examples").rglob("*.py"))


def on_files(files: Files, config: Any) -> Files:
    """Add the reference's pages and the examples' sources."""
    made = {f"reference/{module}.md": _page(module) for module in public_modules()}
    made["reference/index.md"] = _index()
    for path in _examples():
        name = path.relative_to(ROOT).as_posix()
        source = path.read_text(encoding="utf-8")
        made[f"examples/{path.stem}.md"] = f"# {path.stem}\n\n````python title={name!r}\n{source}````\n"
    for name, content in made.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links into examples/ lead to the pages made of it; beside the sources they lead to the files."""
    return re.sub(r"\]\(\.\./examples/(?:\w+/)*(\w+)\.py\)", r"](examples/\1.md)", markdown)
