"""The page around the charts: one HTML file that asks for nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

import paceline
from paceline.runs.draw import escape


def page(title: str, head: str, body: str) -> str:
    """A whole document: style and script are in it, light or dark as the reader's system has it."""
    here = resources.files("paceline.runs")
    style, script = (here.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n"
        f"<header>{head}</header>\n{body}\n"
        f"<footer>Paceline {escape(paceline.__version__)}</footer>\n</main>\n<script>\n{script}</script>\n"
        "</body>\n</html>\n"
    )


def header(title: str, under: str) -> str:
    """The page's opening: what it is, in a line, and what of."""
    return f'<p class="brand">paceline</p><h1>{escape(title)}</h1><p>{escape(under)}</p>'


def cards(entries: Sequence[tuple[str, str, str, float | None]]) -> str:
    """Figures at a glance: (value, unit, what it is, and a share from 0 to 1 to show as a bar or None)."""
    items = []
    for value, unit, name, share in entries:
        bar = (
            ""
            if share is None
            else f'<div class="share"><i style="width:{100 * min(max(share, 0), 1):.1f}%"></i></div>'
        )
        items.append(
            f"<div><b>{escape(value)} <small>{escape(unit)}</small></b>{bar}<span>{escape(name)}</span></div>"
        )
    return f'<div class="cards">{"".join(items)}</div>'


def points(sentences: Sequence[str]) -> str:
    """Findings, one a line."""
    return f'<ul class="findings">{"".join(f"<li>{escape(text)}</li>" for text in sentences)}</ul>'
