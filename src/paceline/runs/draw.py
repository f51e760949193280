"""Charts as HTML: the curves are an SVG that stretches, the words are text that does not.

So a chart fills the width of its container on a screen of any size, and its labels stay readable. An SVG goes from
0 to 1000 on both axes, y downwards. Colours are classes (see page.css), set for light and dark in
page.css; page.js adds tooltips to charts that hold a ``script`` of data.
"""

from __future__ import annotations

import html
import json
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from paceline.runs.run import Array
from paceline.runs.words import number


def down(places: Array) -> Array:
    """Places on an axis as SVG coordinates: its start at the bottom, its end at the top, others just outside."""
    return 1000 - np.clip(places, -0.02, 1.02) * 1000


def path(x: Array, y: Array) -> str:
    """The SVG path of straight lines through the points, broken at NaN."""
    parts, pen = [], "M"
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b or a != a:
            pen = "M"
            continue
        parts.append(f"{pen}{a:.1f} {b:.1f}")
        pen = "L"
    return "".join(parts)


def band(x: Array, low: Array, high: Array) -> str:
    """The SVG path of the area between two curves; each range without NaN is closed separately."""
    known = ~(np.isnan(low) | np.isnan(high))
    breaks = np.flatnonzero(np.diff(np.concatenate(([0], known.astype(int), [0]))))
    parts = []
    for start, end in breaks.reshape(-1, 2):
        part = slice(start, end)
        there, back = path(x[part], high[part]), path(x[part][::-1], low[part][::-1])
        parts.append(f"{there}L{back[1:]}Z")
    return "".join(parts)


def box(start: float, width: float, y: float, height: float, span: float) -> str:
    """The SVG path of a box from ``start``, ``width`` long, both in seconds on a scale that ends at ``span``."""
    left, width = start / span * 1000, width / span * 1000
    return f"M{left:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"


def whole(values: Array) -> list[int | None]:
    """Coordinates as whole numbers for the tooltips' data; None if unknown."""
    return [None if value != value else round(value) for value in values.tolist()]


TIME_STEPS = (60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400)
# For seconds below the first number: the name of the unit, and its seconds.
UNITS = (
    (1e-3, "µs", 1e-6),
    (1.0, "ms", 1e-3),
    (120.0, "s", 1.0),
    (7200.0, "min", 60.0),
)


class Axis(NamedTuple):
    """An axis: its title with the unit, its range, and its ticks (value, text). rounds: whether it is of rounds."""

    title: str
    start: float
    end: float
    ticks: list[tuple[float, str]]
    rounds: bool = False

    def at(self, values: Array) -> Array:
        """Values as places on the axis: 0 at its start, 1 at its end."""
        return (values - self.start) / (self.end - self.start)


def round_axis(span: tuple[float, float]) -> Axis:
    """An axis of round numbers, from the first to the one before the last."""
    marks = [(x, f"{x:,.0f}") for x in ticks(span[1], 5, whole=True, low=span[0])]
    return Axis("round", *span, marks, rounds=True)


def time_axis(title: str, end: float, start: float = 0.0, count: int = 4) -> Axis:
    """An axis of time, in the unit that suits its end."""
    unit, length = next(((unit, length) for below, unit, length in UNITS if end < below), ("h", 3600.0))
    marks = [(x, number(x / length)) for x in time_ticks(end, count, low=start)]
    return Axis(f"{title} ({unit})", start, end, marks)


def amount_axis(title: str, end: float, start: float = 0.0) -> Axis:
    """An axis of plain numbers."""
    return Axis(title, start, end, [(y, number(y)) for y in ticks(end, low=start)])


def percent_axis(title: str, end: float = 1.0) -> Axis:
    """An axis of portions in percent, from 0."""
    return Axis(f"{title} (%)", 0.0, end, [(y, number(100 * y)) for y in ticks(end)])


def ticks(high: float, count: int = 4, whole: bool = False, low: float = 0.0) -> list[float]:
    """About ``count`` round numbers from ``low`` to ``high``."""
    if not high > low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    if whole:
        step = max(1.0, float(math.ceil(step)))
    return _multiples(low, high, step)


def time_ticks(high: float, count: int = 5, low: float = 0.0) -> list[float]:
    """About ``count`` round times from ``low`` to ``high`` seconds; whole minutes, hours or days from 120 s on."""
    length = high - low
    if length < 120:
        return ticks(high, count, low=low)
    days = 86400 * math.ceil(length / count / 86400)
    return _multiples(low, high, float(next((step for step in TIME_STEPS if step >= length / count), days)))


def _multiples(low: float, high: float, step: float) -> list[float]:
    return [i * step for i in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]


def top(*series: Array) -> float:
    """The end of a scale that a few spikes do not stretch: the largest value, or a little above the usual ones."""
    ends = []
    for values in series:
        known = values[np.isfinite(values)]
        if known.size:
            usual = float(np.quantile(known, 0.98)) * 1.4
            largest = float(known.max()) * 1.05
            ends.append(largest if largest < 1.3 * usual or known.size < 8 else usual)
    return max(ends, default=1.0) or 1.0


Text = Callable[[float], str]
TABLE = 12  # most rows of a curve's table
LABEL = 18  # most characters of a row's name beside a chart


class Curve(NamedTuple):
    """One curve. x, y: shape (points,), NaN for a gap. low, high: the same for a band around it."""

    name: str
    colour: str
    x: Array
    y: Array
    low: Array | None = None
    high: Array | None = None
    dashed: bool = False


def escape(text: object) -> str:
    """A text escaped for HTML."""
    return html.escape(str(text), quote=True)


def figure(title: str, says: str, content: str, legend: str = "", wide: bool = False, table: str = "") -> str:
    """A chart with its title, one line on how to read it, its legend, and its figures as a table.

    A chart that has a table can also be copied as a picture (copy.js).
    """
    rows = f"<details><summary>As a table</summary>{table}</details>{_COPY}" if table else ""
    return (
        f'<figure class="card{" wide" if wide else ""}"><figcaption><h3>{escape(title)}</h3>'
        f"<p>{escape(says)}</p>{legend}</figcaption>{content}{rows}</figure>"
    )


_COPY = (
    '<div class="copy">Copy as <button type="button" data-copy="png" aria-label="Copy as PNG">PNG</button> '
    '<button type="button" data-copy="svg" aria-label="Copy as SVG">SVG</button> <span role="status"></span></div>'
)


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """A legend of (class of the colour, name)."""
    items = (f'<span><i class="{colour}"></i>{escape(name)}</span>' for colour, name in entries)
    return f'<div class="legend">{"".join(items)}</div>'


def curves(
    title: str,
    says: str,
    series: Sequence[Curve],
    x_axis: Axis,
    y_axis: Axis,
    text: Text,
    tip: Text,
    upright: Sequence[float] = (),
) -> str:
    """A figure of curves over one axis; values beyond the end of ``y_axis`` are cut off.

    text, tip: format a value and its x for the tooltips and the table. upright: x of vertical lines, the rounds in
    which workers were lost.
    """
    marks, data = [], []
    if upright:
        places = (1000 * x_axis.at(np.unique(np.array(upright, float)))).round(1).tolist()
        marks.append(f'<path class="lost" d="{"".join(f"M{x:g} 0V1000" for x in places)}"/>')
    for line in series:
        x, y = 1000 * x_axis.at(line.x), down(y_axis.at(line.y))
        if line.low is not None and line.high is not None:
            low, high = down(y_axis.at(line.low)), down(y_axis.at(line.high))
            marks.append(f'<path class="band {line.colour}" d="{band(x, low, high)}"/>')
        dashed = " dashed" if line.dashed else ""
        marks.append(f'<path class="line {line.colour}{dashed}" d="{path(x, y)}"/>')
        words = {"at": [tip(float(each)) for each in line.x], "text": [text(float(each)) for each in line.y]}
        data.append({"name": line.name, "colour": line.colour, "x": whole(x), "y": whole(y)} | words)
    entries = [(line.colour + " dashes" * line.dashed, line.name) for line in series]
    entries += [("bad upright", "a worker was lost or left")] if upright else []
    shown = legend(entries) if len(entries) > 1 else ""
    plot = _plot("".join(marks), x_axis, y_axis, {"kind": "line", "series": data})
    return figure(title, says, plot, shown, table=_reached(series, x_axis, text, tip))


def _reached(series: Sequence[Curve], x_axis: Axis, text: Text, tip: Text) -> str:
    """A table of each curve's value at up to ``TABLE`` places; "–" before its beginning and after its end."""
    columns = [
        (f"{line.name}{what}", line.x, values)
        for line in series
        for what, values in (("", line.y), (", least", line.low), (", most", line.high))
        if values is not None
    ]
    places = np.unique(np.concatenate([np.zeros(0), *(line.x for line in series)]))
    rows = []
    shown = np.unique(np.linspace(0, len(places) - 1, min(len(places), TABLE)).astype(int))
    for place in places[shown].tolist():
        at = [int(np.searchsorted(x, place, side="right")) - 1 for _, x, _ in columns]
        known = zip(at, columns, strict=True)
        cells = (text(float(y[i])) if i >= 0 and place <= x[-1] else "–" for i, (_, x, y) in known)
        rows.append((tip(place), *cells))
    return table((x_axis.title, *(name for name, _, _ in columns)), rows)


def strip(line: Curve, x_axis: Axis, y_end: float) -> str:
    """One curve over the whole width, of little height and without a scale."""
    x = 1000 * x_axis.at(np.concatenate(([x_axis.start], line.x, [x_axis.end])))
    y = down(np.pad(line.y, 1, mode="edge") / y_end)
    marks = f'<path class="area {line.colour} pale" d="{band(x, np.full(len(x), 1000.0), y)}"/>'
    if line.high is not None:
        high = down(np.pad(line.high, 1, mode="edge") / y_end)
        marks += f'<path class="band {line.colour}" d="{band(x, y, high)}"/>'
    marks += f'<path class="line {line.colour}" d="{path(x, y)}"/>'
    return _plot(marks, x_axis, None, None, 64)


def gantt(rows: Sequence[str], bars: Sequence[Bars], x_axis: Axis) -> str:
    """Rounds one after another: each worker's row shows when it computed and when it waited.

    bars: one entry per round, in order; x_axis: seconds, from 0.
    """
    count, span = len(rows), x_axis.end
    paths: dict[str, list[str]] = {"idle": [], "busy": [], "bad": [], "over": []}
    edges = np.array([0.0, *(bar.start + bar.seconds for bar in bars)])
    for bar in bars:
        for i in np.flatnonzero(np.isfinite(bar.compute)):
            y, height = (i + 0.14) / count * 1000, 0.72 / count * 1000
            busy, extra = float(bar.compute[i]), float(min(bar.overhead[i], bar.compute[i]))
            paths["bad" if i == bar.last else "busy"].append(box(bar.start, busy, y, height, span))
            if extra > 0:
                paths["over"].append(box(bar.start, extra, y, height, span))
            if bar.wait[i] > 0:
                paths["idle"].append(box(bar.start + busy, float(bar.wait[i]), y, height, span))
    waiting = "".join(paths.pop("idle"))
    marks = [f'<path class="box {name}" d="{"".join(boxes)}"/>' for name, boxes in paths.items() if boxes]
    marks += [f'<path class="edge" d="M{edge / span * 1000:.1f} 0V1000"/>' for edge in edges[1:]]
    data: dict[str, Any] = {"kind": "grid", "names": rows, "edges": whole(1000 * x_axis.at(edges))}
    data |= {"at": [bar.title for bar in bars], "text": [bar.texts for bar in bars]}
    step = max(1, -(-count // 16))
    places = [((i + 0.5) / count, _cut(str(rows[i]))) for i in range(0, count, step)]
    height = int(min(max(26 * count, 90), 560))
    return _plot("".join(marks), x_axis, None, data, height, places, _hatched(waiting))


def _cut(label: str) -> str:
    """A label beside a chart, of at most ``LABEL`` characters."""
    return label if len(label) <= LABEL else f"{label[: LABEL - 1]}…"


def _hatched(boxes: str) -> str:
    """Boxes in the page's pattern for waiting, which is not stretched with them."""
    if not boxes:
        return ""
    name = f"boxes-{zlib.crc32(boxes.encode()):08x}"  # equal only for equal boxes
    return (
        f'<svg class="hatched" aria-hidden="true"><clipPath id="{name}" clipPathUnits="objectBoundingBox">'
        f'<path class="box idle" d="{boxes}" transform="scale(0.001)"/></clipPath>'
        f'<rect width="100%" height="100%" clip-path="url(#{name})"/></svg>'
    )


class Bars(NamedTuple):
    """One round of ``gantt``; arrays of seconds, shape (n,); ``last`` is the straggler, -1 for none."""

    title: str
    start: float
    seconds: float
    compute: Array
    overhead: Array
    wait: Array
    last: int
    texts: list[str]


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]], str]]) -> str:
    """Horizontal bars: (name, parts as (colour, length from 0 to 1), words after the bar)."""
    body = []
    for name, parts, words in rows:
        inner = "".join(f'<i class="{name}" style="width:{100 * length:.2f}%"></i>' for name, length in parts)
        body.append(f"<dt>{escape(name)}</dt><dd><div>{inner}</div><span>{escape(words)}</span></dd>")
    return f'<dl class="bars">{"".join(body)}</dl>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A plain table; a wide one scrolls sideways, also by the arrow keys."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    head_html = f"<thead><tr>{top}</tr></thead>" if head else ""
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Figures in a table">'
        f"<table>{head_html}<tbody>{body}</tbody></table></div>"
    )


def _plot(
    marks: str,
    x_axis: Axis,
    y_axis: Axis | None,
    data: dict[str, Any] | None,
    height: int = 230,
    places: Sequence[tuple[float, str]] = (),
    under: str = "",
) -> str:
    """Axes around marks. The left side shows the ticks of ``y_axis``, or names at their ``places``, or nothing.

    data: for the tooltips. under: another picture, drawn beneath the marks.
    """
    grid = ""
    if y_axis is not None and not places:
        places = [
            (1 - (level - y_axis.start) / (y_axis.end - y_axis.start), text) for level, text in y_axis.ticks
        ]
        grid = "".join(f'<path class="grid" d="M0 {1000 * place:.0f}H1000"/>' for place, _ in places)
    left = "".join(f'<span style="top:{100 * place:.2f}%">{escape(text)}</span>' for place, text in places)
    below = "".join(
        f'<span style="left:{100 * (x - x_axis.start) / (x_axis.end - x_axis.start):.2f}%">{escape(text)}</span>'
        for x, text in x_axis.ticks
        if x_axis.start <= x <= x_axis.end
    )
    widest = max((len(text) for _, text in places), default=0)
    # No "<" may stand in a script element's text, or a name could end it.
    payload = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    script = f'<script type="application/json">{payload}</script>' if data else ""
    margin = f"{min(widest, LABEL) * 0.52 + 0.7:.1f}em" if places else "0px"
    axis = ' data-axis="rounds"' if x_axis.rounds else ""
    title = f'<div class="title">{escape(y_axis.title)}</div>' if y_axis is not None else ""
    return (
        f'<div class="plot"{axis} style="--left:{margin};--height:{height}px">{title}'
        f'<div class="left">{left}</div><div class="field">{under}<svg viewBox="0 0 1000 1000" '
        f'preserveAspectRatio="none" aria-hidden="true">{grid}{marks}</svg><b class="rule"></b></div>'
        f'<div class="under">{below}</div><div class="title across">{escape(x_axis.title)}</div>{script}</div>'
    )
