"""Plain words on the pages, in docstrings and in messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.blocks import PAGES, ROOT

ALSO = [ROOT / name for name in ("CONTRIBUTING.md", "SECURITY.md", "RELEASE.md", "CODE_OF_CONDUCT.md")]
SOURCES = sorted((ROOT / "src" / "paceline").rglob("*.py")) + sorted((ROOT / "examples").rglob("*.py"))
# What a reader whose first language is another one stumbles over.
RIDDLES = r"\b(anew|as ever(?!y)|who had|nothing that can be told|whatever they are of)\b"
GLUED = r"(?<![%\w])\d+(\.\d+)?%(?![\w(])"  # a per cent is written 97 %


def texts(path: Path) -> Iterator[str]:
    """The prose of a page, or the strings of a module, its docstrings among them."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("pattern", [RIDDLES, GLUED], ids=["riddles", "per cent"])
def test_no_page_docstring_or_message_has_them(pattern: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {each[0]}"
        for path in [*PAGES, *ALSO, *SOURCES]
        for text in texts(path)
        for each in re.finditer(pattern, text, re.IGNORECASE)
        if '="' not in text[max(0, each.start() - 2) : each.start()]  # of SVG
    ]
    assert not found, found


@pytest.mark.parametrize(
    ("pattern", "wrong", "right"),
    [
        (RIDDLES, "it begins anew, as ever", "as everywhere else, it begins again"),
        (GLUED, "97% of the bound", "97 % of the bound, and %d of them, and %.1f%%"),
    ],
)
def test_the_patterns_find_what_they_look_for(pattern: str, wrong: str, right: str) -> None:
    assert re.search(pattern, wrong)
    assert not re.search(pattern, right)
