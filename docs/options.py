"""Writes the table of options in docs/training.md from the docstring and the signature of Pace.

python docs/options.py

A row has the option, its default and the first sentence of its entry in the docstring. The script fails if an option
has no entry, and if an entry's first sentence is longer than 120 characters.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "training.md"
SOURCE = ROOT / "src" / "paceline" / "torch" / "pace.py"
BEGIN, END = "<!-- begin: python docs/options.py -->\n", "<!-- end -->"
LONGEST = 120  # characters of a cell


def options(source: str) -> list[tuple[str, str]]:
    """The options of Pace in the order of its signature, each with its default, or an empty text for none."""
    parameters = _method(_pace(source), "__init__").args
    named = [each.arg for each in parameters.args[1:]]
    defaults = [
        *([None] * (len(named) - len(parameters.defaults))),
        *parameters.defaults,
        *parameters.kw_defaults,
    ]
    named += [each.arg for each in parameters.kwonlyargs]
    return [(name, "" if d is None else ast.unparse(d)) for name, d in zip(named, defaults, strict=True)]


def _pace(source: str) -> ast.ClassDef:
    return next(e for e in ast.parse(source).body if isinstance(e, ast.ClassDef) and e.name == "Pace")


def _method(owner: ast.ClassDef, name: str) -> ast.FunctionDef:
    return next(e for e in owner.body if isinstance(e, ast.FunctionDef) and e.name == name)


def table(source: str) -> str:
    """The table; raises ValueError where the docstring has no entry, or too long a first sentence."""
    text = ast.get_docstring(_pace(source)) or ""
    rows = ["| option | default | meaning |", "|---|---|---|"]
    for name, default in options(source):
        entry = re.search(rf"^ *{name}: (.*(?:\n +.*)*)", text, re.MULTILINE)
        if entry is None:
            raise ValueError(f"the docstring of Pace has no entry {name!r}; expected 'name: what it is'")
        first = re.split(r"(?<=\.)\s", " ".join(entry[1].split()).replace("``", "`"))[0]
        if len(first) > LONGEST:
            raise ValueError(
                f"{name}: {len(first)} characters; expected a first sentence of at most {LONGEST}"
            )
        shown = default.replace("'", '"')
        rows.append(f"| `{name}` | {shown and f'`{shown}`'} | {first} |")
    return "\n".join(rows) + "\n"


def made(page: str, source: str) -> str:
    """The page with its table made from the source."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + table(source) + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    PAGE.write_text(
        made(PAGE.read_text(encoding="utf-8"), SOURCE.read_text(encoding="utf-8")), encoding="utf-8"
    )
