"""The page around the charts: one HTML file that asks for nothing else."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources

import paceline
from paceline.runs.draw import escape


def page(title: str, head: str, body: str, script: str = "") -> str:
    """A whole document: style and scripts are in it, light or dark as the reader's system or choice has it.

    script: another one, after the page's own.
    """
    here = resources.files("paceline.runs")
    style = here.joinpath("page.css").read_text(encoding="utf-8")
    scripts = "\n".join(f"<script>{text}</script>" for text in _scripts(script))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<link rel="icon" href="{_ICON}">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{_WAITING}\n<main>\n"
        f"<header>{head}</header>\n{body}\n"
        f"<footer>Paceline {escape(paceline.__version__)}</footer>\n</main>\n{scripts}\n"
        "</body>\n</html>\n"
    )


def policy(script: str = "") -> str:
    """The content security policy of such a page: its own scripts alone run, and nothing is loaded.

    script: the second one, which may ask its own server.
    """
    digests = (hashlib.sha256(text.encode()).digest() for text in _scripts(script))
    allowed = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
    server = "'self'" if script else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        f"connect-src {server}; base-uri 'none'; form-action 'none'"
    )


def _scripts(script: str) -> list[str]:
    here = resources.files("paceline.runs")
    own = "".join(here.joinpath(name).read_text(encoding="utf-8") for name in ("page.js", "copy.js"))
    return [f"\n{text}" for text in (own, script) if text]


# Waiting is hatched alike in all pictures; the bars of a list have it in page.css.
_WAITING = (
    '<svg class="patterns" width="0" height="0" aria-hidden="true"><defs><pattern id="waiting" width="5.5" '
    'height="5.5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<path class="ground" d="M0 0h5.5v5.5H0z"/><path class="hatch" d="M4 0h1.5v5.5H4z"/></pattern></defs></svg>'
)


# Four bars that end together.
_BARS = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><path fill="#0072b2" d="M0 0h32v32H0z"/>'
    b'<path fill="#fff" d="M4 4h24v3H4zM12 11h16v3H12zM8 18h20v3H8zM18 25h10v3H18z"/></svg>'
)
_ICON = "data:image/svg+xml;base64," + base64.b64encode(_BARS).decode()


def header(title: str, under: str, state: str = "") -> str:
    """The page's opening: what it is, in a line, and what of. state: HTML, how the run is doing."""
    theme = '<button type="button" class="theme" aria-label="Light or dark" title="Light or dark">◐</button>'
    return (
        f'<div class="top"><p class="brand">paceline</p>{state}{theme}</div>'
        f'<h1>{escape(title)}</h1><p class="about">{escape(under)}</p>'
    )


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
