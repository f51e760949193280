"""Beyond DBW: a cluster with two speeds, where workers are not exchangeable."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.papers import Result, write
from paceline.papers.dbw_runs import WORKERS, play, reached, said
from paceline.simulate.figure import figure
from paceline.simulate.timing import Exponential

SLOW = 3.0  # times slower is the slower half


def speeds(out: Path, quick: bool) -> Result:
    """Half of the workers three times slower: exchangeable arrivals, a model of each, and balancing besides."""
    batch, target, seeds = (100, 1.0, 1) if quick else (500, 0.2, 2)
    slow = np.where(np.arange(WORKERS) < WORKERS // 2, 1.0, SLOW) / batch  # seconds a sample
    configs = [
        ("equal", "everyone"),
        ("level", "everyone"),
        ("equal", "dbw"),
        ("equal", "dbw:times=workers"),
        ("equal", "dbw:worth=noise"),
        ("equal", "dbw:worth=noise,times=workers"),
        ("level", "dbw"),
        ("level", "dbw:worth=noise"),
        ("level", "dbw:worth=noise,times=workers"),
    ]
    rows: list[dict[str, Any]] = []
    times: dict[str, list[float]] = {}
    for policy, backup in configs:
        name = f"{policy} + {backup}"
        for seed in range(seeds):
            pace = Exponential(0.2 * slow, 0.8 * slow)
            updates, _ = play(
                backup,
                Exponential(1e-3),
                seconds_per_sample=pace,
                seed=seed,
                batch=batch,
                policy=policy,
                target=target,
            )
            times.setdefault(name, []).append(reached(updates, target))
            rows.append({"policy": policy, "backup": backup, "seed": seed, "seconds": times[name][-1]})
    picture = figure(1)
    picture.axes[0].barh(list(times), [float(np.mean(found)) for found in times.values()])
    picture.axes[0].set(xlabel=f"virtual seconds to loss {target}")
    picture.axes[0].invert_yaxis()
    base = float(np.mean(times["equal + dbw"]))
    return write(
        out,
        "speeds",
        picture,
        rows,
        {
            "claim": "(not in the paper) DBW takes workers to be exchangeable",
            "ours": "; ".join(
                f"{name} {said(found)}, {base / np.mean(found):.2f}x" for name, found in times.items()
            ),
            "why": "backup workers leave half of the cluster's work unused where half of the workers are "
            "slow; balancing uses it",
            "setting": f"MNIST, n = 16, B = {batch}, rate .08; a sample takes 1 or 3 units times .8 + .2 "
            f"Exp(1); {seeds} runs",
            "command": "paceline reproduce dbw speeds" + (" --quick" if quick else ""),
        },
    )
