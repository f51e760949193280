"""DBW's Figs. 7 and 8: batch sizes under the knee rule, with round trips as on a Spark cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.papers import Result, write
from paceline.papers.dbw_compare import DYNAMIC, table
from paceline.papers.dbw_runs import (
    CAP,
    WORKERS,
    dataset,
    learner,
    play,
    reached,
)
from paceline.paramserver import rates
from paceline.simulate.figure import figure
from paceline.simulate.timing import Lognormal

SPARK = Lognormal(0.9, 0.4, 0.03, 3.0)  # the paper's trace is not public; this stands in for it


def fig7(out: Path, quick: bool) -> Result:
    """The distribution of round trips that stands in for the Spark cluster's."""
    drawn = next(SPARK.stream((20000,), np.random.default_rng(0)))
    picture = figure(1)
    picture.axes[0].hist(drawn, bins=80, density=True)
    picture.axes[0].set(xlabel="round trip (s)", ylabel="density")
    rows = [{"percentile": p, "seconds": float(np.percentile(drawn, p))} for p in (1, 10, 50, 90, 99)]
    return write(
        out,
        "fig7",
        picture,
        rows,
        {
            "claim": "round trips measured on a production Spark cluster with 16 servers",
            "ours": "lognormal, median .9 s, sd of the logarithm .4, 3 % of the trips three times as long: "
            f"90 % below {np.percentile(drawn, 90):.2f} s, 99 % below {np.percentile(drawn, 99):.2f} s",
            "why": "the trace is not public",
            "setting": "20,000 draws",
            "command": "paceline reproduce dbw fig7" + (" --quick" if quick else ""),
        },
    )


def knee_rates(batch: int, ks: Sequence[int], runs: int, steps: int = 100) -> dict[int, float]:
    """The knee rule's rate for each k: the range test's on the mean of some runs, from the same first
    weights."""
    sweep = rates.sweep(1e-3, 10.0, steps)
    learns = learner()
    found = {}
    for k in ks:
        curves = []
        for seed in range(runs):
            rng = np.random.default_rng((seed, k))
            values, losses = learns.start(), []
            for rate in sweep:
                samples = rng.integers(len(dataset("mnist").x_train), size=k * batch)
                gradient, loss = learns.gradient(values, samples)
                losses.append(min(loss, 1e3) if np.isfinite(loss) else 1e3)
                values = values - np.float32(rate) * gradient
            curves.append(losses)
        found[k] = rates.knee(sweep, np.mean(curves, axis=0))
    return found


def fig8(out: Path, quick: bool) -> Result:
    """Batch sizes 16, 128 and 500 under the knee rule, Spark-like round trips."""
    ks = (1, 8, 16) if quick else (1, 4, 6, 8, 12, 16)
    target, seeds, most = (1.0, 1, 60) if quick else (0.2, 1, CAP)
    picture = figure(3)
    rows: list[dict[str, Any]] = []
    parts = []
    for axes, batch in zip(picture.axes, (16, 128, 500), strict=True):
        knees = knee_rates(batch, ks, 1, 36) if quick else knee_rates(batch, ks, 3)
        full = knees[WORKERS]
        times: dict[str, list[float]] = {}
        for name in DYNAMIC:
            times[name] = [
                reached(
                    play(name, SPARK, seed=s, batch=batch, lr=full, target=target, updates=most)[0], target
                )
                for s in range(seeds)
            ]
        for k in ks:
            times[f"static:{k}"] = [
                reached(
                    play(f"static:{k}", SPARK, seed=s, batch=batch, lr=knees[k], target=target, updates=most)[
                        0
                    ],
                    target,
                )
                for s in range(seeds)
            ]
        rows += [
            {
                **row,
                "rate": knees.get(int(str(row["policy"]).split(":")[-1]), full)
                if "static" in row["policy"]
                else full,
            }
            for row in table(times, batch=batch)
        ]
        means = {name: float(np.mean(found)) for name, found in times.items()}
        axes.barh(list(means), [min(value, 1e5) for value in means.values()])
        axes.set(title=f"B = {batch}", xlabel=f"virtual seconds to loss {target}")
        quickest = min((name for name in means if name.startswith("static")), key=lambda name: means[name])
        parts.append(
            f"B = {batch}: best {quickest} {means[quickest]:.0f} s, dbw {means['dbw']:.0f} s, with worth=noise "
            f"{means['dbw:worth=noise']:.0f} s, blind {means['blind']:.0f} s (rates "
            + ", ".join(f"{k}: {knees[k]:.3f}" for k in ks)
            + ")"
        )
    return write(
        out,
        "fig8",
        picture,
        rows,
        {
            "claim": "the best static k falls from 6 (B = 16) to 1 (B = 500); DBW is close to it, and "
            "better than B-DBW for B = 128 and 500",
            "ours": "; ".join(parts),
            "why": "another network and stand-in round trips; the range test of small k is noisy, and what "
            "it finds decides which static k is best",
            "setting": f"MNIST, n = 16, lognormal round trips with a tail, knee rule, {seeds} run(s), at "
            f"most {CAP} updates",
            "command": "paceline reproduce dbw fig8" + (" --quick" if quick else ""),
        },
    )
