"""Pictures of a simulation: seconds of each round, regret, how the time is spent, and the shares."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.commands import installation
from paceline.errors import PacelineError, saying
from paceline.files import write_whole
from paceline.rounds import Array
from paceline.simulate.measures import band, estimate, regret
from paceline.simulate.rounds import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """Write latency.png, regret.png, total.png and shares.png into ``folder``; returns their paths."""
    with saying(f"cannot make the folder {folder}", "choose another"):
        folder.mkdir(parents=True, exist_ok=True)
    makers = (("latency", latency), ("regret", cumulative_regret), ("total", total), ("shares", shares))
    paths = []
    for name, make in makers:
        # At most four policies have their shares drawn, side by side.
        picture = figure(min(4, len(outcome.policies))) if name == "shares" else figure()
        make(outcome, picture)
        paths.append(save(picture, folder / f"{name}.png"))
    return paths


def save(picture: Figure, path: Path) -> Path:
    """Write a picture as PNG, whole or not at all. Raises PacelineError if it cannot be written."""
    content = io.BytesIO()
    picture.savefig(content, format="png", dpi=150)
    return write_whole(path, content.getvalue())


def bands(axes: Any, curves: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Draw each curve's mean over the realizations and its 95 % interval; returns their (mean, half width).

    curves: values by name, (T, R).
    """
    found = {name: band(values) for name, values in curves.items()}
    for name, (mean, half) in found.items():
        rounds = np.arange(1, len(mean) + 1)
        (line,) = axes.plot(rounds, mean, label=name, linewidth=1.2)
        axes.fill_between(rounds, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.legend(fontsize="small")
    return found


def latency(outcome: Outcome, picture: Figure) -> None:
    """Draw the mean seconds of each round, with the 95 % interval of the mean."""
    bands(picture.axes[0], {name: played.latency for name, played in outcome.policies.items()})
    picture.axes[0].set(xlabel="round", ylabel="seconds", ylim=(0, None), title="seconds of each round")


def cumulative_regret(outcome: Outcome, picture: Figure) -> None:
    """Draw the sum of seconds beyond the oracle's."""
    bands(picture.axes[0], {name: regret(played, outcome) for name, played in outcome.policies.items()})
    picture.axes[0].set(xlabel="round", ylabel="seconds beyond the oracle's", title="dynamic regret")


def total(outcome: Outcome, picture: Figure) -> None:
    """Draw how the workers' time is spent: computing, overhead, waiting."""
    axes = picture.axes[0]
    names = list(outcome.policies)
    workers = outcome.scenario.size
    left = np.zeros(len(names))
    for label in ("compute", "overhead", "wait"):
        width = np.array([getattr(p, label).mean() / workers for p in outcome.policies.values()])
        axes.barh(names, width, left=left, label=label)
        left += width
    halves = [estimate(p.latency.sum(0)).half for p in outcome.policies.values()]
    axes.errorbar(left, np.arange(len(names)), xerr=halves, fmt="none", ecolor="black", capsize=2)
    axes.set(xlabel="seconds of a worker, all rounds", title="how the time is spent")
    axes.invert_yaxis()
    axes.legend(fontsize="small")


def shares(outcome: Outcome, picture: Figure) -> None:
    """Draw each worker's samples in the first realization, under the first few policies."""
    rounds = np.arange(1, outcome.scenario.rounds + 1)
    for axes, (name, played) in zip(picture.axes, outcome.policies.items(), strict=False):
        axes.plot(rounds, played.first_shares * outcome.scenario.global_batch, linewidth=0.8)
        axes.set(title=name, xlabel="round", ylabel="samples of each worker", ylim=(0, None))


def figure(columns: int = 1, width: float = 6.0, height: float = 4.0) -> Figure:
    """An empty figure with ``columns`` axes side by side that needs no display."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PacelineError(f"pictures need matplotlib; {installation('plot')}") from error
    made = Figure(figsize=(width * columns, height), layout="constrained")
    FigureCanvasAgg(made)
    made.subplots(1, columns)
    return made
