"""Charts as HTML: the curves are an SVG that stretches, the words are text that does not.

So a chart is as wide as its place, from a phone to a wall, and its labels stay readable. Colours are classes
(c0 to c7, good, bad, idle), set for light and dark in page.css; page.js adds tooltips where a chart carries a
``script`` of data.
"""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.runs import svg
from paceline.runs.axes import ticks
from paceline.runs.run import Array

Text = Callable[[float], str]


class Line(NamedTuple):
    """One curve: x and y of shape (points,), NaN where it breaks; low and high for a band around it."""

    name: str
    colour: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    dashed: bool = False


def escape(text: object) -> str:
    """Text that HTML shows as it is."""
    return html.escape(str(text), quote=True)


def figure(title: str, says: str, content: str, legend: str = "", wide: bool = False, table: str = "") -> str:
    """A chart with its title, one line on how to read it, its legend, and its figures as a table."""
    rows = f"<details><summary>As a table</summary>{table}</details>" if table else ""
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3>'
        f"<p>{escape(says)}</p>{legend}</figcaption>{content}{rows}</figure>"
    )


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Names with their colours: (class, name)."""
    items = (f'<span><i class="{colour}"></i>{escape(name)}</span>' for colour, name in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def lines(
    series: Sequence[Line],
    x_end: tuple[float, float],
    y_end: float,
    x_ticks: Sequence[float],
    x_text: Text,
    y_text: Text,
    tip: Text,
    rounds: bool = True,
) -> str:
    """Curves over one axis. ``tip`` words the x of a tooltip; values above ``y_end`` leave the field.

    rounds: the axis is round numbers.
    """
    x0, x1 = x_end
    marks = []
    for line in series:
        x = (line.x - x0) / (x1 - x0) * 1000
        if line.low is not None and line.high is not None:
            low, high = svg.down(line.low, y_end), svg.down(line.high, y_end)
            marks.append(f'<path class="band {line.colour}" d="{svg.band(x, low, high)}"/>')
        dashed = " dashed" if line.dashed else ""
        marks.append(f'<path class="line {line.colour}{dashed}" d="{svg.path(x, svg.down(line.y, y_end))}"/>')
    data = {
        "kind": "line",
        "series": [
            {
                "name": line.name,
                "colour": line.colour,
                "x": svg.whole((line.x - x0) / (x1 - x0) * 1000),
                "y": svg.whole(svg.down(line.y, y_end)),
                "at": [tip(float(value)) for value in line.x],
                "text": [y_text(float(value)) for value in line.y],
            }
            for line in series
        ],
    }
    return _plot("".join(marks), x_end, y_end, x_ticks, x_text, y_text, data, rounds=rounds)


def strip(
    line: Line, x_end: tuple[float, float], y_end: float, x_ticks: Sequence[float], x_text: Text
) -> str:
    """One curve over the whole width, low and without a scale."""
    x0, x1 = x_end
    x = np.concatenate(([x0], line.x, [x1]))
    x, y = (x - x0) / (x1 - x0) * 1000, svg.down(np.pad(line.y, 1, mode="edge"), y_end)
    marks = f'<path class="area {line.colour} pale" d="{svg.band(x, np.full(len(x), 1000.0), y)}"/>'
    if line.high is not None:
        high = svg.down(np.pad(line.high, 1, mode="edge"), y_end)
        marks += f'<path class="band {line.colour}" d="{svg.band(x, y, high)}"/>'
    marks += f'<path class="line {line.colour}" d="{svg.path(x, y)}"/>'
    return _plot(marks, x_end, y_end, x_ticks, x_text, None, None, 64)


def areas(
    names: Sequence[str],
    edges: Array,
    parts: Array,
    x_ticks: Sequence[float],
    x_text: Text,
    y_text: Text,
    tips: Sequence[str],
) -> str:
    """Bands on top of one another, constant between edges: parts of shape (steps, n), edges (steps + 1,)."""
    x_end = (float(edges[0]), float(edges[-1]))
    x = np.repeat((edges - x_end[0]) / (x_end[1] - x_end[0]) * 1000, 2)[1:-1]
    levels = np.concatenate((np.zeros((len(parts), 1)), np.cumsum(np.nan_to_num(parts), axis=1)), axis=1)
    y_end = float(levels[:, -1].max()) or 1.0
    marks = [
        f'<path class="area c{i}" d="'
        f'{svg.band(x, *(svg.down(np.repeat(levels[:, j], 2), y_end) for j in (i, i + 1)))}"/>'
        for i in range(len(names))
    ]
    data = {
        "kind": "column",
        "edges": svg.whole((edges - x_end[0]) / (x_end[1] - x_end[0]) * 1000),
        "at": list(tips),
        "names": list(names),
        "text": [[y_text(float(value)) for value in row] for row in parts],
    }
    return _plot("".join(marks), x_end, y_end, x_ticks, x_text, y_text, data, rounds=True)


def heat(
    rows: Sequence[str],
    edges: Array,
    values: Array,
    x_ticks: Sequence[float],
    x_text: Text,
    text: Text,
    tips: Sequence[str],
) -> str:
    """One row a worker, one column a step, shape (steps, n): colours from little (dark) to much (light)."""
    known = values[np.isfinite(values)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    scale = (values - low) / (high - low) if high > low else np.full(values.shape, 0.5)
    image = base64.b64encode(svg.png(svg.colours(scale.T))).decode()
    x_end = (float(edges[0]), float(edges[-1]))
    data = {
        "kind": "grid",
        "edges": svg.whole((edges - x_end[0]) / (x_end[1] - x_end[0]) * 1000),
        "at": list(tips),
        "names": list(rows),
        "text": [[text(float(value)) for value in row] for row in values],
    }
    marks = (
        f'<image href="data:image/png;base64,{image}" width="1000" height="1000" '
        'preserveAspectRatio="none" class="heat"/>'
    )
    stops = ",".join(f"rgb({r},{g},{b})" for r, g, b in svg.colours(np.linspace(0, 1, 6)[None])[0])
    scale_bar = (
        f'<div class="scale"><span>{escape(text(low))}</span>'
        f'<i style="background:linear-gradient(90deg,{stops})"></i><span>{escape(text(high))}</span></div>'
    )
    height = int(min(max(8 * len(rows), 230), 300))
    step = max(1, len(rows) // 8)
    places = [((i + 0.5) / len(rows), str(rows[i])) for i in range(0, len(rows), step)]
    plot = _plot(marks, x_end, 1.0, x_ticks, x_text, None, data, height, places, rounds=True)
    return scale_bar + plot


def gantt(
    rows: Sequence[str], bars: Sequence[Bars], span: float, x_ticks: Sequence[float], x_text: Text
) -> str:
    """Rounds one after another: each worker's row shows when it computed and when it waited.

    bars: one for each round, in order; span: seconds from the left edge to the right one.
    """
    count = len(rows)
    paths: dict[str, list[str]] = {"idle": [], "c0": [], "bad": [], "over": []}
    edges, texts = [0.0], []
    for bar in bars:
        for i in range(count):
            y, height = (i + 0.14) / count * 1000, 0.72 / count * 1000
            if not np.isfinite(bar.compute[i]):
                continue
            busy, extra = float(bar.compute[i]), float(min(bar.overhead[i], bar.compute[i]))
            paths["bad" if i == bar.last else "c0"].append(svg.box(bar.start, busy, y, height, span))
            if extra > 0:
                paths["over"].append(svg.box(bar.start, extra, y, height, span))
            if bar.wait[i] > 0:
                paths["idle"].append(svg.box(bar.start + busy, float(bar.wait[i]), y, height, span))
        edges.append(bar.start + bar.seconds)
        texts.append(bar.texts)
    marks = [f'<path class="box {name}" d="{"".join(boxes)}"/>' for name, boxes in paths.items() if boxes]
    marks += [f'<path class="edge" d="M{edge / span * 1000:.1f} 0V1000"/>' for edge in edges[1:]]
    data = {
        "kind": "grid",
        "edges": svg.whole(np.array(edges) / span * 1000),
        "at": [bar.title for bar in bars],
        "names": list(rows),
        "text": texts,
    }
    step = max(1, -(-count // 16))
    places = [((i + 0.5) / count, str(rows[i])) for i in range(0, count, step)]
    height = int(min(max(26 * count, 90), 560))
    return _plot("".join(marks), (0.0, span), 1.0, x_ticks, x_text, None, data, height, places)


class Bars(NamedTuple):
    """One round of ``gantt``; arrays of shape (n,), seconds; ``last`` is the straggler, -1 for none."""

    title: str
    start: float
    seconds: float
    compute: Array
    overhead: Array
    wait: Array
    last: int
    texts: list[str]


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]]) -> str:
    """Horizontal bars: (name, parts as (colour, length from 0 to 1), words behind it)."""
    body = []
    for name, parts, words in rows:
        inner = "".join(
            f'<i class="{colour}" style="width:{100 * length:.2f}%"></i>' for colour, length in parts
        )
        body.append(f"<dt>{escape(name)}</dt><dd><div>{inner}</div><span>{escape(words)}</span></dd>")
    return f'<dl class="bars">{"".join(body)}</dl>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table; it scrolls sideways where it must."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head_html = f"<thead><tr>{top}</tr></thead>" if head else ""
    return f'<div class="scroll"><table>{head_html}<tbody>{body}</tbody></table></div>'


def _plot(
    marks: str,
    x_end: tuple[float, float],
    y_end: float,
    x_ticks: Sequence[float],
    x_text: Text,
    y_text: Text | None,
    data: dict[str, Any] | None,
    height: int = 230,
    places: Sequence[tuple[float, str]] = (),
    rounds: bool = False,
) -> str:
    """Axes around marks. Either numbers up the left side (``y_text``), names down it (``places``), or nothing.

    data: for the tooltips. rounds: the axis is round numbers.
    """
    x0, x1 = x_end
    grid = ""
    if y_text is not None:
        levels = ticks(y_end)
        places = [(1 - level / y_end, y_text(level)) for level in levels]
        grid = "".join(f'<path class="grid" d="M0 {1000 * place:.0f}H1000"/>' for place, _ in places)
    left = "".join(f'<span style="top:{100 * place:.2f}%">{escape(text)}</span>' for place, text in places)
    under = "".join(
        f'<span style="left:{100 * (x - x0) / (x1 - x0):.2f}%">{escape(x_text(x))}</span>'
        for x in x_ticks
        if x0 <= x <= x1
    )
    widest = max((len(text) for _, text in places), default=0)
    # No "<" may stand in a script element's text, or a name could end it.
    payload = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    script = f'<script type="application/json">{payload}</script>' if data else ""
    margin = f"{min(widest, 12) * 0.52 + 0.7:.1f}em" if places else "0px"
    axis = ' data-axis="rounds"' if rounds else ""
    return (
        f'<div class="plot"{axis} style="--left:{margin};--height:{height}px">'
        f'<div class="left">{left}</div><div class="field"><svg viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none" aria-hidden="true">{grid}{marks}</svg><b class="rule"></b></div>'
        f'<div class="under">{under}</div>{script}</div>'
    )
