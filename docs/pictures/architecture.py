"""Draws architecture.png: the rooms of the package and who imports whom, read from the sources.

python docs/pictures/architecture.py
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import grimp
from common import BLUE, GREEN, GREY, ORANGE, PURPLE, figure, save
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[2]
# Any room may use these.
GROUND = (
    "rounds",
    "costs",
    "machines",
    "attach",
    "commands",
    "options",
    "files",
    "tables",
    "tokens",
    "errors",
)
BANDS = {  # what rooms are for, and their colour
    "what people start": (
        BLUE,
        ("cli", "papers", "doctor", "verify", "serve", "train", "hosts", "live", "client"),
    ),
    "engines": (ORANGE, ("torch", "ray", "simulate")),
    "what engines share": (
        PURPLE,
        ("learners", "runs", "coded", "paramserver", "pieces", "data", "balancer"),
    ),
    "decisions": (GREEN, ("policies", "samples", "balance", "backup", "sync", "forecast", "shares")),
}
COLOURS = {room: colour for colour, rooms in BANDS.values() for room in rooms}
# fmt: off
ACROSS = {  # a room's place from left to right
    "cli": 4.2,
    "serve": 0.6, "doctor": 2.0, "verify": 3.4, "papers": 4.8, "train": 6.2, "hosts": 7.6,
    "live": 1.9,
    "simulate": 3.2, "ray": 5.0, "torch": 7.5,
    "runs": 1.9, "coded": 3.6, "learners": 5.6,
    "paramserver": 4.8,
    "data": 6.3, "balancer": 4.8, "pieces": 7.9,
    "policies": 4.8, "samples": 7.0,
    "client": 0.5, "sync": 2.0, "backup": 3.4, "balance": 4.8,
    "forecast": 4.0, "shares": 5.6,
}
# fmt: on
STEP, WIDE, HIGH = 0.72, 1.3, 0.4


def rows() -> list[list[str]]:
    """The rooms of each layer, from the contract that ``make lint`` checks."""
    told = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = told["tool"]["importlinter"]["contracts"][0]["layers"]
    rooms = [layer.replace(" ", "").split("|") for layer in layers]
    drawn = {*ACROSS, *GROUND, "__main__"}
    if missing := [room for each in rooms for room in each if room not in drawn]:
        raise SystemExit(
            f"architecture.py has no place for {', '.join(missing)}: add it to ACROSS and BANDS, or to GROUND"
        )
    return [row for each in rooms if (row := [room for room in each if room in ACROSS])]


def imports() -> list[tuple[str, str]]:
    """(room, room that it imports), but for what other arrows on the way say already."""
    graph, below = grimp.build_graph("paceline"), defaultdict(set)
    for module in graph.modules:
        for used in graph.find_modules_directly_imported_by(module):
            room, other = (name.partition(".")[2].partition(".")[0] for name in (module, used))
            if room != other and {room, other} <= set(ACROSS):
                below[room].add(other)

    def reached(room: str, seen: set[str]) -> set[str]:
        for other in below[room] - seen:
            seen.add(other)
            reached(other, seen)
        return seen

    return sorted(
        (room, used)
        for room in tuple(below)
        for used in below[room]
        if not any(used in reached(other, {room}) for other in below[room] - {used})
    )


def main() -> None:
    layers = rows()
    place = {room: (ACROSS[room], -STEP * y) for y, row in enumerate(layers) for room in row}
    place["client"] = ACROSS["client"], place["sync"][1]  # which needs none of them
    layers = [row for row in layers if row != ["client"]]
    made, axes = figure(width=9.4, height=0.6 * len(layers))
    axes.set(xlim=(-0.2, 8.6), ylim=(-STEP * len(layers) - 0.25, 0.75))
    axes.axis("off")
    for room, used in imports():
        (x, y), (to_x, to_y) = place[room], place[used]
        arrow = {"arrowstyle": "-|>", "mutation_scale": 9, "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
        ends = (x, y - HIGH / 2), (to_x, to_y + HIGH / 2)
        axes.add_patch(FancyArrowPatch(*ends, color=COLOURS[room], alpha=0.6, zorder=1, **arrow))
    for room, (x, y) in place.items():
        box(axes, x, y, WIDE, room, COLOURS[room])
    box(axes, 4.2, -STEP * len(layers), 8.2, "     ".join(GROUND), GREY)
    for number, (band, (colour, _)) in enumerate(BANDS.items()):
        axes.text(0.1 + 2.2 * number, 0.55, band, color=colour, fontsize=9.5, fontweight="bold")
    save(made, __file__, ".png")


def box(axes: Any, x: float, y: float, wide: float, text: str, colour: str) -> None:
    """A room, its middle at (x, y)."""
    shape = {"boxstyle": "round,pad=0,rounding_size=0.08", "facecolor": "white", "linewidth": 1.4}
    corner = (x - wide / 2, y - HIGH / 2)
    axes.add_patch(FancyBboxPatch(corner, wide, HIGH, edgecolor=colour, zorder=2, **shape))
    axes.text(x, y, text, ha="center", va="center", fontsize=9, zorder=3)


if __name__ == "__main__":
    main()
