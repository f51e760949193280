"""What the pictures share: colours that stay apart for the colour-blind, sizes, and where they go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY = "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#8a8f98"
WAIT = "#d5d8de"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE, YELLOW, GREY)


def figure(columns: int = 1, height: float = 3.4, width: float = 9.0, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes, without boxes around them."""
    made, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained", **options)
    for each in made.axes:
        each.spines[["top", "right"]].set_visible(False)
    return made, axes


def save(made: Any, script: str) -> None:
    """Write the picture beside its script, under its name."""
    path = FOLDER / f"{Path(script).stem}.png"
    made.savefig(path, dpi=110)
    print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
