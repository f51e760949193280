"""Pictures of a simulation: seconds of each round, what the oracle would have saved, and who did how much."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.errors import PacelineError
from paceline.simulate.figure import figure
from paceline.simulate.measures import band, estimate, regret
from paceline.simulate.rounds import Outcome

PANELS = 4  # workers' shares of so many policies side by side


def draw(outcome: Outcome, folder: Path) -> list[Path]:
    """latency.png, regret.png, total.png and shares.png in ``folder``; their paths."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PacelineError(f"cannot make the folder {folder}: {error.strerror}; choose another") from error
    makers = (("latency", latency), ("regret", cumulative_regret), ("total", total), ("shares", shares))
    paths = []
    for name, make in makers:
        picture = figure(min(PANELS, len(outcome.policies))) if name == "shares" else figure()
        make(outcome, picture)
        paths.append(folder / f"{name}.png")
        picture.savefig(paths[-1], dpi=150)
    return paths


def latency(outcome: Outcome, picture: object) -> None:
    """Mean seconds of each round, with the 95 % interval of the mean."""
    axes = picture.axes[0]  # type: ignore[attr-defined]
    rounds = np.arange(1, outcome.scenario.rounds + 1)
    for name, played in outcome.policies.items():
        mean, half = band(played.latency)
        (line,) = axes.plot(rounds, mean, label=name, linewidth=1.2)
        axes.fill_between(rounds, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="round", ylabel="seconds", ylim=(0, None), title="seconds of each round")
    axes.legend(fontsize="small")


def cumulative_regret(outcome: Outcome, picture: object) -> None:
    """Seconds beyond the oracle's, summed."""
    axes = picture.axes[0]  # type: ignore[attr-defined]
    rounds = np.arange(1, outcome.scenario.rounds + 1)
    for name, played in outcome.policies.items():
        mean, half = band(regret(played, outcome))
        (line,) = axes.plot(rounds, mean, label=name, linewidth=1.2)
        axes.fill_between(rounds, mean - half, mean + half, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set(xlabel="round", ylabel="seconds beyond the oracle's", title="dynamic regret")
    axes.legend(fontsize="small")


def total(outcome: Outcome, picture: object) -> None:
    """Where the workers' time goes: computing, overhead, waiting."""
    axes = picture.axes[0]  # type: ignore[attr-defined]
    names = list(outcome.policies)
    workers = outcome.scenario.size
    left = np.zeros(len(names))
    for label in ("compute", "overhead", "wait"):
        width = np.array([getattr(p, label).mean() / workers for p in outcome.policies.values()])
        axes.barh(names, width, left=left, label=label)
        left += width
    halves = [estimate(p.latency.sum(0)).half for p in outcome.policies.values()]
    axes.errorbar(left, np.arange(len(names)), xerr=halves, fmt="none", ecolor="black", capsize=2)
    axes.set(xlabel="seconds of a worker, all rounds", title="where the time goes")
    axes.invert_yaxis()
    axes.legend(fontsize="small")


def shares(outcome: Outcome, picture: object) -> None:
    """Each worker's samples in the first realization, under the first few policies."""
    rounds = np.arange(1, outcome.scenario.rounds + 1)
    for axes, (name, played) in zip(picture.axes, outcome.policies.items(), strict=False):  # type: ignore[attr-defined]
        axes.plot(rounds, played.first_shares * outcome.scenario.global_batch, linewidth=0.8)
        axes.set(title=name, xlabel="round", ylabel="samples of each worker", ylim=(0, None))
