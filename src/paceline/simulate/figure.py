"""An empty picture to draw into, which needs no display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import PacelineError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(columns: int = 1, width: float = 6.0, height: float = 4.0) -> Figure:
    """An empty figure with ``columns`` axes side by side that needs no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PacelineError("pictures need matplotlib: pip install 'paceline[plot]'") from error
    made = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(made)
    made.subplots(1, columns)
    return made
