"""What ``paceline simulate --learn`` shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from paceline.errors import PacelineError
from paceline.runs.words import percent
from paceline.simulate.learning import Learnt
from paceline.simulate.scenario import Scenario


def show(scenario: Scenario, learnt: Learnt, console: Console, plot: Path | None) -> dict[str, Any]:
    """Print the result and draw it; returns the figures for JSON."""
    figures = learnt.to_json()
    last, dropped = learnt.updates[-1], figures["gradients_dropped"]
    lost = ", ".join(f"{count} {what}" for what, count in sorted(dropped.items())) or "none"
    console.print(
        f"{scenario.name}: {scenario.size} workers, batch {scenario.global_batch}; {figures['sync']}, "
        f"{figures['backup']}, {figures['policy']}, {figures['mode']}; {figures['model']} on {figures['data']}",
        markup=False,
    )
    console.print(
        f"{figures['updates']} updates in {last.now:.4g} virtual seconds; loss {learnt.updates[0].loss:.3f} -> "
        f"{last.loss:.3f}; test accuracy {percent(learnt.test_accuracy, 1)}"
    )
    console.print(
        f"{figures['gradients_used']} gradients used, dropped: {lost}; waited for "
        f"{np.mean([u.quorum for u in learnt.updates]):.1f} of {scenario.size} on average; mean staleness "
        f"{figures['mean_staleness']:.2f}"
    )
    if plot is not None:
        console.print(f"Picture: {_draw(learnt, plot)}")
    return figures


def _draw(learnt: Learnt, folder: Path) -> Path:
    """learning.png: loss, and gradients waited for, against virtual time."""
    from paceline.simulate.plots import figure

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PacelineError(f"cannot make the folder {folder}: {error.strerror}; choose another") from error
    picture = figure(2)
    now = [u.now for u in learnt.updates]
    picture.axes[0].plot(now, [u.loss for u in learnt.updates])
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss")
    picture.axes[1].plot(now, [u.quorum for u in learnt.updates], drawstyle="steps-post")
    picture.axes[1].set(xlabel="virtual seconds", ylabel="gradients waited for", ylim=(0, None))
    path = folder / "learning.png"
    picture.savefig(path, dpi=150)
    return path
