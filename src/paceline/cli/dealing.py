"""What ``paceline simulate`` says of samples that cost differently: every policy by count, and by cost."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from paceline import tables
from paceline.runs import words
from paceline.simulate.dealt import COUNT, DealtOutcome
from paceline.simulate.measures import estimate

DEFAULT = ("equal", "level", "optimum")


def verdict(outcome: DealtOutcome) -> str:
    """The answer in one sentence; the oracle, which knows speeds and costs in advance, is left out."""
    totals = {key: float(each.latency.sum(0).mean()) for key, each in outcome.ways.items()}
    real = [key for key in totals if key[0].split(":")[0] != "optimum"] or list(totals)
    best = min(real, key=lambda key: totals[key])
    by_count = [key for key in real if key[1] == COUNT]
    usual = min(by_count, key=lambda key: totals[key])
    figures = f"{words.seconds(totals[best])}, {words.percent(outcome.of_bound(*best))} of the bound"
    if best == usual:
        return f"Dividing by cost gains nothing here: {' '.join(best)} takes {figures}."
    gain = words.times(totals[usual] / totals[best])
    return f"{' '.join(best)} takes {figures}, and is {gain} as fast as {' '.join(usual)}."


def table(outcome: DealtOutcome) -> Table:
    """The figures of every policy in both ways, the fastest first."""
    shown = tables.begun(
        "policy", "divided", figures=("total (s)", "of the bound", "waiting", "micro-batches")
    )
    for (name, way), each in sorted(outcome.ways.items(), key=lambda item: item[1].latency.sum(0).mean()):
        total = estimate(each.latency.sum(0))
        shown.add_row(
            name,
            way,
            f"{total.mean:.4g}" + (f" ±{total.half:.2g}" if total.half else ""),
            words.percent(outcome.of_bound(name, way), 1),
            words.percent(float(each.wait.mean())),
            f"{each.micro_batches:.1f}",
        )
    return shown


def to_json(outcome: DealtOutcome) -> dict[str, Any]:
    """All figures, for a file."""
    return {
        "scenario": outcome.scenario.name,
        "verdict": verdict(outcome),
        "bound_seconds": outcome.bound.sum(0).tolist(),
        "policies": [
            {
                "policy": name,
                "divided": way,
                "total_seconds": each.latency.sum(0).tolist(),
                "of_bound": outcome.of_bound(name, way),
                "waiting": each.wait.tolist(),
                "micro_batches": each.micro_batches,
                "round_seconds": each.latency[:, 0].tolist(),
            }
            for (name, way), each in outcome.ways.items()
        ],
    }
