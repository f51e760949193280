"""DBW's Fig. 5: CIFAR-10, split among the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.papers import Result, write
from paceline.papers.dbw_compare import statics
from paceline.papers.dbw_runs import (
    WORKERS,
    learner,
    play,
    shifted,
    smoothed,
)
from paceline.runs.words import percent
from paceline.simulate.figure import figure


def fig5(out: Path, quick: bool) -> Result:
    """CIFAR-10 split among the workers, Exp(1): loss against time."""
    seconds, seeds = (20.0, 1) if quick else (150.0, 2)
    ks = (8,) if quick else (4, 8, 12, 16)
    configs = [("dbw", "fixed"), ("blind", "fixed"), *statics(ks, (8,))]
    picture = figure(1)
    rows: list[dict[str, Any]] = []
    final: dict[str, list[float]] = {}
    for backup, rate in configs:
        name = f"{backup} {rate}"
        for seed in range(seeds):
            updates, server = play(
                backup,
                shifted(1.0),
                seed=seed,
                rate=rate,
                lr=0.05,
                batch=64 if quick else 256,
                target=None,
                name="cifar10",
                model="mlp",
                shards=WORKERS,
                seconds=seconds,
            )
            accuracy = learner("cifar10", "mlp").test(server.parameters.values)[1]
            final.setdefault(name, []).append(accuracy)
            rows.append({"policy": name, "seed": seed, "accuracy": accuracy, "loss": updates[-1].loss})
            if seed == 0:
                picture.axes[0].plot([u.now for u in updates], smoothed(updates), label=name, linewidth=1)
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss")
    picture.axes[0].legend(fontsize="x-small")
    return write(
        out,
        "fig5",
        picture,
        rows,
        {
            "claim": "DBW is best on average, by less than on MNIST; it begins with k of about 10",
            "ours": f"test accuracy after {seconds:g} s: "
            + ", ".join(f"{name} {percent(float(np.mean(found)), 1)}" for name, found in final.items()),
            "why": "a perceptron in place of ResNet-18, 20,000 images and few seeds, as ResNet-18 for 16 "
            "workers would take days on two cores; accuracies are therefore low, and only their order "
            "means something",
            "setting": f"CIFAR-10 split at random among 16 workers, B = 256, rate .05 k / 16, {seeds} runs",
            "command": "paceline reproduce dbw fig5" + (" --quick" if quick else ""),
        },
    )
