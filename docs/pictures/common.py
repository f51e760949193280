"""What the pictures share: colours that stay apart for the colour-blind, sizes, where they go, their dark twins."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.colors import to_hex, to_rgba
from PIL import Image

matplotlib.rcParams["svg.hashsalt"] = "paceline"  # equal figures give equal files
matplotlib.rcParams["svg.fonttype"] = "none"  # words, not outlines of letters: a quarter of the size

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, PURPLE, BROWN, GREY = "#0072b2", "#d55e00", "#009e73", "#8a3ffc", "#8a6d00", "#7d828a"
WAIT, HATCH = "#d5d8de", "#7b8694"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, BROWN, GREY)
STYLES = {  # of the lines of docs/figures.md: a colour and a shape for each way to divide
    "plain DDP": (ORANGE, "s"),
    "equal": (ORANGE, "s"),
    "fixed split": (BROWN, "v"),
    "split by hand": (BROWN, "v"),
    "level": (BLUE, "D"),
    "auto": (GREEN, "o"),
}
# Of each colour on white: the one that stands for it in a dark picture, on the background of the site's dark pages.
DARK = {
    "#ffffff": "#1e2129",
    "#000000": "#dfe2e8",
    "#b0b0b0": "#4a4f5a",  # grids
    "#cccccc": "#4a4f5a",  # frames of legends
    BLUE: "#4aa8e0",
    ORANGE: "#ff8a4c",
    GREEN: "#2bc79a",
    PURPLE: "#c39bff",
    BROWN: "#e8d060",
    GREY: "#9aa0ab",
    WAIT: "#454a55",
    HATCH: "#8592a5",
}
SHADES = 128  # colours of a written picture: enough for smooth letters, a third of the size


def figure(
    columns: int = 1, height: float = 3.4, width: float = 9.0, rows: int = 1, **options: Any
) -> tuple[Any, Any]:
    """A figure and its axes, without boxes around them."""
    made, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **options)
    for each in made.axes:
        each.spines[["top", "right"]].set_visible(False)
    return made, axes


def waiting(axes: Any, places: Any, widths: Any, left: Any, height: float = 0.7) -> None:
    """Bars for the time that workers wait, hatched as on the pages of a run."""
    axes.barh(
        places, widths, left=left, height=height, color=WAIT, hatch="/////", edgecolor=HATCH, linewidth=0
    )


def plain(axes: Any, *values: float) -> None:
    """Ticks of a logarithmic axis as plain numbers."""
    axes.set_yticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()


def save(made: Any, script: str, kind: str = ".svg") -> None:
    """Write the picture beside its script, under its name.

    kind: ".svg", which has both schemes in one file, or ".png" where a figure has too many lines for a small SVG; the
    dark one then has -dark after its name.
    """
    name = Path(script).stem
    if kind == ".svg":
        drawn = io.StringIO()
        made.savefig(drawn, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        _put(FOLDER / f"{name}.svg", in_both_schemes(drawn.getvalue()).encode())
    else:
        _put(FOLDER / f"{name}{kind}", _png(made))
        darken(made)
        _put(FOLDER / f"{name}-dark{kind}", _png(made))


def _png(made: Any) -> bytes:
    drawn, kept = io.BytesIO(), io.BytesIO()
    made.savefig(drawn, dpi=110)
    image = Image.open(drawn).convert("RGB").quantize(SHADES, dither=Image.Dither.NONE)
    image.save(kept, format="png", optimize=True)
    return kept.getvalue()


def in_both_schemes(svg: str) -> str:
    """A picture of matplotlib's that is light, or dark on a dark screen and at its address with #only-dark; with
    #only-light it is light on every screen. Its numbers are cut to hundredths of a point.

    Raises KeyError for a colour that has no dark one.
    """
    rules, dark = [], [f"fill:{DARK['#000000']}"]  # black is not written: it is the default
    for number, colour in enumerate(sorted(set(re.findall(r"#[0-9a-f]{6}\b", svg)))):
        name = f"--c{number}"
        dark.append(f"{name}:{DARK[colour]}")
        for part in ("fill", "stroke"):
            if f"{part}: {colour}" in svg or f'{part}="{colour}"' in svg:
                chosen = f'[style*="{part}: {colour}"],[{part}="{colour}"]'
                rules.append(f"{chosen}{{{part}:var({name},{colour})!important}}")
    font = re.search(r"font-family: [^;\"]*", svg)
    if font:
        rules.append(f"text{{{font[0]}}}")
        svg = re.sub(r" ?font-family: [^;\"]*;?", "", svg)
    schemes = ";".join(dark)
    rules.append(f":root:target{{{schemes}}}")
    rules.append(f"@media(prefers-color-scheme:dark){{:root:not(:has(:target)){{{schemes}}}}}")
    svg = svg.replace("<svg ", '<svg id="only-dark" ', 1).replace(
        '<g id="figure_1">', '<g id="only-light">', 1
    )
    svg = svg.replace("</style>", "\n" + "\n".join(rules) + "</style>", 1)
    return re.sub(r'(?<=\s)(d|x|y|x1|x2|y1|y2|width|height|transform|points)="[^"]*"', _cut, svg)


def _cut(attribute: re.Match[str]) -> str:
    """An attribute on one line with its numbers to two places, but for factors such as that of a letter's outline."""

    def number(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith("scale") else f"{round(float(found[0]), 2):g}"

    return " ".join(re.sub(r"scale\([^)]*\)|-?\d+\.\d+", number, attribute[0]).split())


def darken(made: Any) -> None:
    """Give every part of a figure the colour that stands for its own in a dark picture.

    Raises KeyError for a colour that has no dark one.
    """
    made.canvas.draw()  # ticks have all their parts only then
    for artist in made.findobj(Artist):
        for part in ("color", "facecolor", "edgecolor", "markerfacecolor", "markeredgecolor"):
            get, put = (getattr(artist, f"{do}_{part}", None) for do in ("get", "set"))
            if get is not None and put is not None:
                old = get()
                new = [_dark(each) for each in old] if getattr(old, "ndim", 1) == 2 else _dark(old)
                put(new)


def _dark(colour: Any) -> Any:
    """One colour; what is invisible stays so, and what shines through does as much."""
    if isinstance(colour, str) and colour in ("none", "auto"):
        return colour
    rgba = to_rgba(colour)
    given = to_hex(rgba)
    # A colour that has been changed already, through another name of the same property, stays.
    return rgba if given in DARK.values() else (*to_rgba(DARK[given])[:3], rgba[3])


def _put(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    print(f"{path}: {len(content) / 1e3:.0f} kB")


def table(heading: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the table below a heading of docs/figures.md, with plain cells."""
    return table_after("figures", f"\n## {heading}\n")


def table_after(page: str, text: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of the first table after a text in a page of docs/, with plain cells."""
    rest = (FOLDER.parent / f"{page}.md").read_text(encoding="utf-8").split(text, 1)[1]
    found = re.search(r"^(\| .*)\n\|-.*\n((?:\| .*\n)+)", rest, re.MULTILINE)
    assert found is not None, f"{page}.md has no table after {text!r}"
    head, *rows = (
        [cell.strip() for cell in re.sub("[`*]", "", line).split("|")[1:-1]]
        for line in (found[1], *found[2].splitlines())
    )
    return head, rows


def records(name: str) -> tuple[list[str], list[list[str]]]:
    """The head and the rows of docs/data/NAME.csv."""
    with (FOLDER.parent / "data" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        head, *rows = csv.reader(file)
    return head, rows


def value(cell: str) -> float:
    """The number of a cell; NaN where nothing was measured."""
    return float("nan") if cell in ("–", "") else float(cell.replace(",", "").split(" ±")[0])


def dots(
    axes: Any, heading: str, columns: dict[str, int], limits: tuple[float, float], over: int | None = None
) -> None:
    """A row of dots for each row of a table of docs/figures.md, one for each of the columns. limits: of the
    horizontal axis. over: a column that divides the others."""
    head, rows = table(heading)
    series = {}
    for name, column in columns.items():
        assert head[column].startswith(name), f"{heading}: column {column} is {head[column]}, not {name}"
        values = [value(row[column]) / (1 if over is None else value(row[over])) for row in rows]
        series[name] = values, *STYLES[name]
    rows_of_dots(axes, [row[0] for row in rows], series, limits)


def rows_of_dots(
    axes: Any,
    labels: list[str],
    series: dict[str, tuple[list[float], str, str]],
    limits: tuple[float, float],
) -> None:
    """A row for each label, with a dot of each series: its values, colour and shape."""
    axes.set_xlim(*limits)
    for name, (values, colour, shape) in series.items():
        axes.plot(values, range(len(labels)), shape, color=colour, label=name, markersize=6)
    ground = {"facecolor": "white", "linewidth": 0, "pad": 0.5}  # hides what crosses a label
    for place, label in enumerate(labels):  # above the dots, so that the picture fits on a telephone
        axes.text(
            0.01,
            place - 0.28,
            label,
            transform=axes.get_yaxis_transform(),
            fontsize=9,
            bbox=ground,
            zorder=1.9,
        )
    axes.set_yticks([])
    axes.spines.left.set_visible(False)
    axes.set_ylim(len(labels) - 0.6, -0.9)
    axes.hlines(range(len(labels)), *axes.get_xlim(), color="#cccccc", linewidth=0.5, zorder=0)
    axes.legend(frameon=False, fontsize=9, loc="lower center", bbox_to_anchor=(0.5, 1), ncols=4)
