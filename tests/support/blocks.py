"""The fenced blocks of a page, in order, and what running each means.

- ``python`` runs, in one namespace a page.
- ``bash`` runs command by command: see ``shell``.
- A block with a title (```` ```toml title="cluster.toml" ````) becomes that file, for the commands after it.
- ``toml``, ``json``, ``csv`` and what a ``diff`` leaves must parse; ``text`` is what a program printed, or a figure.

Anything else is refused, so that no block is left unread.
"""

from __future__ import annotations

import csv
import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from sybil import Document, Example, Region
from sybil.evaluators.python import PythonEvaluator
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from support.shell import Shell

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])

LANGUAGES = ("python", "bash", "toml", "json", "csv", "diff", "text")
INFO = re.compile(r"(?P<language>[\w-]*)(?P<rest>[^\n]*)$\n", re.MULTILINE)
SHELL = "_shell"  # a page's shell among its names
TITLE = re.compile(r'title="([\w./-]+)"')

_run_python = PythonEvaluator()


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def evaluate(example: Example) -> None:
    """Run or check one block; the working directory is the page's own."""
    language, source = example.region.lexemes["language"], str(example.parsed)
    title = TITLE.search(example.region.lexemes["rest"])
    match language:
        case "python" if title is not None:
            compile(source, f"{example.path}:{example.line}", "exec")
        case "python":
            _run_python(example)
        case "bash":
            example.namespace.setdefault(SHELL, Shell()).run(source)
        case "toml":
            tomllib.loads(source)
        case "json":
            json.loads(source)
        case "diff":  # of a Python program: what comes of it must be one
            changed = [line[1:] for line in source.splitlines() if not line.startswith("-")]
            compile("\n".join(changed), f"{example.path}:{example.line}", "exec")
        case "csv":
            header, *rows = csv.reader(source.splitlines())
            assert rows, f"{example.path}:{example.line}: a CSV file without rows"
            assert {len(row) for row in rows} == {len(header)}, f"{example.path}:{example.line}: uneven rows"
    if title is not None:
        Path(title[1]).write_text(source, encoding="utf-8")


def parser(document: Document) -> Iterator[Region]:
    """Every fenced block, whatever its language."""
    for region in RawFencedCodeBlockLexer(INFO)(document):
        region.parsed, region.evaluator = region.lexemes["source"], evaluate
        yield region


def document(page: Path) -> Document:
    return Document.parse(str(page), parser)


def complaints(page: Path) -> list[str]:
    """Blocks that no test would run: indented ones, those of no known language, and scripts that no command names."""
    found = []
    text = page.read_text(encoding="utf-8")
    for title in re.findall(r'^```python title="([\w./-]+)"', text, re.MULTILINE):
        if not re.search(rf"^(?!```).*(torchrun|python).*(\\\n.*)*\b{re.escape(title)}", text, re.MULTILINE):
            found.append(f"{name(page)}: {title} is written, and no command runs it")
    for token in MarkdownIt().parse(text):
        line = f"{name(page)}:{token.map[0] + 1 if token.map else '?'}"
        if token.type == "code_block":
            found.append(f"{line}: an indented block; fence it and name its language")
        if token.type == "fence" and token.info.split(" ")[0] not in LANGUAGES:
            found.append(f"{line}: language {token.info!r}; expected one of {', '.join(LANGUAGES)}")
    return found
