"""A run in figures: how fast it was, and how close it came to its workers' combined speed."""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.runs import pieces
from paceline.runs.run import Array, Run
from paceline.runs.waiting import waiting_share


def speeds(run: Run, before: Array | None = None) -> Array:
    """Samples per second of each worker in each round, shape (T, n).

    Load over compute seconds; where the load was 0, the last known speed; NaN where none is known yet and
    where the worker was absent. before: speeds known from earlier rounds, shape (n,).
    """
    return np.where(np.isnan(run.compute), np.nan, known_speeds(run, before))


def known_speeds(run: Run, before: Array | None = None) -> Array:
    """The same, absent workers included: what was last known of each."""
    with np.errstate(divide="ignore", invalid="ignore"):
        measured = np.where((run.loads > 0) & (run.compute > 0), run.loads / run.compute, np.nan)
    if before is None:
        return carried(measured)
    return carried(np.vstack((before, measured)))[1:]


def carried(values: Array) -> Array:
    """Each NaN replaced by the last known value above it, shape (T, n); NaN where there is none."""
    rows = np.arange(len(values))[:, None]
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, rows), axis=0)
    return np.where(last >= 0, np.take_along_axis(values, np.maximum(last, 0), axis=0), np.nan)


def ideal_seconds(run: Run, before: Array | None = None) -> Array:
    """Seconds of each round if its samples were spread by speed, shape (T,); NaN where no speed is known."""
    total = np.nansum(speeds(run, before), axis=1)
    return np.divide(run.batch, total, out=np.full(total.shape, np.nan), where=total > 0)


def final_batches(run: Run) -> list[int]:
    """The loads of the last round that was not a short one."""
    if not len(run.batch):
        return []
    full = np.flatnonzero(run.batch == run.batch.max())[-1]
    loads = run.loads[full]
    return [int(load) for load in np.round(loads[~np.isnan(loads)])]


def final_loss(run: Run) -> float | None:
    """Loss of the last round that has any: where the loss curve ends."""
    known = run.loss[~np.isnan(run.loss) & (run.batch > 0)]
    return float(known[-1]) if len(known) else None


def last_loss(run: Run) -> float | None:
    """Mean loss over the samples of the last epoch that has any loss."""
    known = ~np.isnan(run.loss) & (run.batch > 0)
    if not known.any():
        return None
    epoch = known & (run.epoch == run.epoch[known][-1])
    return float(np.average(run.loss[epoch], weights=run.batch[epoch]))


def summarize(run: Run) -> dict[str, Any]:
    """The run's figures, ready for JSON; None where the record cannot tell.

    steps, samples, seconds (of all rounds), samples_per_second.
    bound_samples_per_second: samples over the sum of the rounds' ideal seconds: the workers' combined speed.
    share_of_bound: the sum of the ideal seconds over that of the real ones, 1 at best.
    idle_share: the part of the workers' time that was waiting, see ``paceline.runs.waiting``.
    final_batches: the last full round's loads.
    train_loss: mean over the last epoch. test_accuracy: as the engine left it.
    Where work could move within the rounds, the figures of ``pieces.figures`` are added.
    """
    ideal = ideal_seconds(run)
    known = ~np.isnan(ideal)
    samples, seconds = float(run.batch.sum()), float(run.seconds.sum())
    figures = {
        "policy": run.policy,
        "workers": run.config.get("workers", run.workers),
        "global_batch": run.config.get("global_batch"),
        "steps": len(run.round),
        "samples": int(samples),
        "seconds": seconds,
        "samples_per_second": _ratio(samples, seconds),
        "bound_samples_per_second": _ratio(float(run.batch[known].sum()), float(ideal[known].sum())),
        "share_of_bound": _ratio(float(ideal[known].sum()), float(run.seconds[known].sum())),
        "idle_share": waiting_share(run.seconds, run.compute),
        "final_batches": final_batches(run),
        "train_loss": last_loss(run),
        "test_accuracy": None,
    }
    figures |= pieces.figures(run)
    # The record itself is the witness; summary.json adds what it cannot tell, such as the test accuracy.
    left = {name: value for name, value in run.summary.items() if figures.get(name) is None}
    return figures | left | {"run_dir": str(run.path)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None
