"""The figures of a run: its speed, also against its workers' combined speed, slow workers and stragglers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import costs
from paceline.runs.run import Array, Run, waiting_share

WORTHWHILE = 0.98  # portion of the recorded seconds below which other loads are worth a change
LEAST_PACE = 0.05  # least portion of a worker's seconds that is assumed to grow with its load
LOOKED_BACK = 8  # rounds whose median pace divides the next one in ``balanced_seconds``


def speeds(run: Run, before: Array | None = None) -> Array:
    """Samples per second of each worker in each round, shape (T, n).

    Load over compute seconds; the last known speed if the load was 0; NaN if no speed is known yet or
    the worker was absent. before: speeds known from earlier rounds, shape (n,).
    """
    return np.where(np.isnan(run.compute), np.nan, known_speeds(run, before))


def known_speeds(run: Run, before: Array | None = None) -> Array:
    """The same as ``speeds``, but absent workers keep their last known speed."""
    with np.errstate(divide="ignore", invalid="ignore"):
        measured = np.where((run.loads > 0) & (run.compute > 0), run.loads / run.compute, np.nan)
    if before is None:
        return carried(measured)
    return carried(np.vstack((before, measured)))[1:]


def carried(values: Array) -> Array:
    """Values with each NaN replaced by the last known value above it, shape (T, n); NaN if there is none."""
    rows = np.arange(len(values))[:, None]
    last = np.maximum.accumulate(np.where(np.isnan(values), -1, rows), axis=0)
    return np.where(last >= 0, np.take_along_axis(values, np.maximum(last, 0), axis=0), np.nan)


def ideal_seconds(run: Run, before: Array | None = None) -> Array:
    """Seconds of each round if its samples were split by speed, shape (T,); NaN if no speed is known."""
    total = np.nansum(speeds(run, before), axis=1)
    return np.divide(run.batch, total, out=np.full(total.shape, np.nan), where=total > 0)


def paces(run: Run) -> tuple[Array, Array]:
    """Seconds per sample and overhead of each worker in each round, (T, n); NaN if it was absent.

    The overhead is the median recorded in the run's later half (0 if unknown); if a worker had no load, its pace is
    the last known one.
    """
    settled = np.nan_to_num(median(run.overhead[len(run.overhead) // 2 :]))
    fixed = np.minimum(settled, (1 - LEAST_PACE) * run.compute)
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(run.loads > 0, (run.compute - fixed) / run.loads, np.nan)
    known = carried(pace)
    known = np.where(np.isnan(known), carried(pace[::-1])[::-1], known)  # before its first load
    typical = np.nanmean(known) if not np.isnan(known).all() else 1.0
    known = np.where(np.isnan(known), typical, known)
    absent = np.isnan(run.compute)
    return np.where(absent, np.nan, np.maximum(known, costs.LEAST)), np.where(absent, np.nan, fixed)


def balanced_seconds(run: Run) -> float | None:
    """Seconds of the run if each batch had been divided by the paces and overheads of the rounds before it.

    A round ends with its slowest worker; its recorded seconds beyond that worker (exchange, optimizer, logging) are
    added unchanged, as in ``paceline whatif``. Rounds that lack a worker or samples count as recorded. None if no
    round has all workers.
    """
    whole = ~np.isnan(run.compute).any(axis=1) & (np.nansum(run.loads, axis=1) > 0)
    if not whole.any():
        return None
    pace, fixed = (each[whole] for each in paces(run))
    batch, loads = np.nansum(run.loads[whole], axis=1), np.nan_to_num(run.loads[whole])
    before = np.vstack((np.full((LOOKED_BACK - 1, run.workers), np.nan), pace[:-1]))
    if len(pace) > 1:
        windows = np.lib.stride_tricks.sliding_window_view(before, LOOKED_BACK, axis=0)
        loads[1:] = _divided(np.nanmedian(windows, axis=2), fixed[1:], batch[1:])
    beyond = np.maximum(run.seconds[whole] - run.compute[whole].max(axis=1), 0.0)
    return float(run.seconds[~whole].sum() + ((fixed + pace * loads).max(axis=1) + beyond).sum())


def _divided(pace: Array, fixed: Array, batch: Array) -> Array:
    """Loads with which all workers of a round finish together, (T, n); without load, a worker is left out."""
    in_use = np.ones(pace.shape, bool)
    while True:
        speed = in_use / pace
        level = (batch + (speed * fixed).sum(axis=1)) / speed.sum(axis=1)
        loads = speed * (level[:, None] - fixed)
        if (loads >= 0).all():
            return np.asarray(loads)
        in_use &= loads > 0


def final_loss(run: Run) -> float | None:
    """Loss of the last round that has one: the end of the loss curve."""
    known = run.loss[~np.isnan(run.loss) & (run.batch > 0)]
    return float(known[-1]) if len(known) else None


def last_loss(run: Run) -> float | None:
    """Mean loss over the samples of the last epoch that has a loss."""
    known = ~np.isnan(run.loss) & (run.batch > 0)
    if not known.any():
        return None
    epoch = known & (run.epoch == run.epoch[known][-1])
    return float(np.average(run.loss[epoch], weights=run.batch[epoch]))


def summarize(run: Run) -> dict[str, Any]:
    """The figures of a run. ``seconds`` are those of all rounds; train_loss is the mean over the last epoch.

    - ``bound_samples_per_second``: samples over the sum of the rounds' ideal seconds: the workers' combined speed.
    - ``share_of_bound``: the sum of the ideal seconds over that of the real ones, 1 at best.
    - ``idle_share``: the portion of the workers' time spent waiting, see ``run.waits``.
    - ``final_batches``: the last full round's loads.
    - ``test_accuracy``: from the engine's summary.json.

    If work could move within the rounds, the figures of ``piece_figures`` are added.

    Args:
        run: The record, from ``read``.

    Returns:
        The figures by name, ready for JSON; None if unknown from the record.
    """
    ideal = ideal_seconds(run)
    known = ~np.isnan(ideal)
    samples, seconds = float(run.batch.sum()), float(run.seconds.sum())
    planned = run.batch + dropped(run).sum(axis=1)
    full = run.loads[planned == planned.max(initial=0.0)][-1:]
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
        "final_batches": np.round(full[~np.isnan(full)]).astype(int).tolist(),
        "train_loss": last_loss(run),
        "test_accuracy": None,
    }
    figures |= piece_figures(run)
    # Figures come from the record; summary.json adds only those that it lacks, such as the test accuracy.
    left = {name: value for name, value in run.summary.items() if figures.get(name) is None}
    return figures | left | {"run_dir": str(run.path)}


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


SCATTER_OF_CHANGES = 0.954  # median of the absolute difference of two normal numbers of sd 1


def piece_figures(run: Run) -> dict[str, Any]:
    """Figures of the work that moved within rounds, for the summary; empty if the run's work could not move.

    moved_rounds: portion of the rounds in which work moved. In those rounds, at_once: portion of the plan that was
    assigned up front, mean; pieces: number per worker, mean. piece_cost: seconds that a piece takes beyond its
    samples, median. pace_scatter: relative standard deviation of the seconds per sample from round to round.
    """
    at_once = _numbers(run, "at_once")
    if not len(at_once):
        return {}
    moved = at_once < 1
    rounds = [pieces for pieces, in_parts in zip(_kept(run, "pieces"), moved, strict=False) if in_parts]
    counts = [len(pieces) for workers in rounds for pieces in workers]
    with np.errstate(divide="ignore", invalid="ignore"):
        changes = np.abs(np.diff(np.log(run.compute / run.loads), axis=0))
    changes = changes[np.isfinite(changes)]
    return {
        "moved_rounds": float(moved.mean()),
        "at_once": float(at_once[moved].mean()) if moved.any() else 1.0,
        "pieces": float(np.mean(counts)) if counts else 1.0,
        "piece_cost": float(np.median(_numbers(run, "piece_cost"))),
        "pace_scatter": float(np.median(changes)) / SCATTER_OF_CHANGES if len(changes) else None,
    }


def _kept(run: Run, name: str) -> list[Any]:
    return [value for value in run.extras.get(name, []) if value is not None]


def _numbers(run: Run, name: str) -> np.ndarray:
    return np.array(_kept(run, name), float)


WINDOW = 8  # rounds before and after a change whose medians are compared
LASTING = 1.25  # the least ratio that counts as a change
LATE = 1.1  # a straggler is marked if it takes more than this multiple of the median


class ChangePoint(NamedTuple):
    """From ``round`` on, ``worker`` takes ``ratio`` times as many seconds per sample as before."""

    round: int
    worker: int
    ratio: float


def dropped(run: Run) -> Array:
    """Samples that each worker dropped after a threshold, shape (T, n)."""
    none = [0.0] * run.workers
    recorded = run.extras.get("dropped_loads") or [none] * len(run.round)
    rows = [row if row and len(row) == run.workers else none for row in recorded]
    return np.nan_to_num(np.array(rows, float)).reshape(run.loads.shape)


def seconds_per_sample(run: Run) -> Array:
    """Seconds per sample of each worker in each round, without overhead, shape (T, n); NaN if unknown."""
    spent = run.compute - np.nan_to_num(run.overhead)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((run.loads > 0) & (spent > 0), spent / run.loads, np.nan)


def slowness(run: Run) -> Array:
    """Each worker's median seconds per sample as a multiple of the median of the others', shape (n,)."""
    own = median(seconds_per_sample(run))
    others = np.array([median(np.delete(own, i)[:, None])[0] for i in range(len(own))])
    return own / others if len(own) else own


def last(run: Run) -> NDArray[np.int64]:
    """The straggler of each round, shape (T,): the worker with the most compute seconds (the first); -1 if none."""
    compute = np.where(np.isnan(run.compute), -np.inf, run.compute)
    if compute.size == 0:
        return np.full(len(compute), -1)
    slowest = compute.argmax(axis=1)
    return np.where(np.isfinite(compute.max(axis=1)), slowest, -1)


def straggler_share(run: Run) -> Array:
    """Portion of the rounds in which each worker was the straggler, shape (n,)."""
    who = last(run)
    return np.bincount(who[who >= 0], minlength=run.workers) / max(len(who), 1)


def changes(run: Run) -> list[ChangePoint]:
    """Lasting changes of speed, in order: the medians of the rounds before and after differ by more than noise."""
    series = np.log(carried(seconds_per_sample(run)))
    rounds = len(series)
    if rounds < 2 * WINDOW or not series.size:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(series, WINDOW, axis=0)
    medians = np.median(windows, axis=2)  # [t]: of rounds t to t + WINDOW - 1; NaN if any is unknown
    jump = medians[WINDOW:] - medians[:-WINDOW]  # [t]: at round t + WINDOW
    differences = np.abs(np.diff(series, axis=0))
    # sigma from the mean absolute difference, which is 2 sigma / sqrt(pi) for normal noise; a median would fail
    # for noise of two values.
    known = np.maximum((~np.isnan(differences)).sum(axis=0), 1)
    noise = np.nansum(differences, axis=0) / known * np.sqrt(np.pi) / 2
    # A median of w values deviates by 1.25 sigma / sqrt(w), the difference of two by sqrt(2) times that.
    least = np.maximum(np.log(LASTING), 5 * 1.77 * noise / np.sqrt(WINDOW))
    found = []
    for worker in range(series.shape[1]):
        size = np.abs(np.nan_to_num(jump[:, worker]))
        while size.size and size.max() >= least[worker]:
            # The medians differ most over a plateau around the change; its middle is the change itself.
            top = size.max()
            first = int(size.argmax())
            plateau = np.flatnonzero(size[first : first + WINDOW] >= top - 1e-9 - noise[worker])
            at = first + int(plateau.mean())
            edge = _edge(series[:, worker], at + WINDOW)
            before, after = series[max(edge - 2 * WINDOW, 0) : edge], series[edge : edge + 2 * WINDOW]
            # A cluster of a few spikes does not shift the medians of windows twice as long.
            if abs(np.median(after[:, worker]) - np.median(before[:, worker])) >= least[worker] / 2:
                found.append(ChangePoint(edge, worker, float(np.exp(jump[at, worker]))))
            size[max(at - WINDOW, 0) : at + WINDOW + 1] = 0
    return sorted(found)


def _edge(series: Array, near: int) -> int:
    """The round within WINDOW rounds of ``near`` at which a step from one level to the next fits best."""
    low, high = max(near - WINDOW, 1), min(near + WINDOW, len(series) - 1)
    before, after = np.median(series[max(low - WINDOW, 0) : low]), np.median(series[high : high + WINDOW])
    candidates = range(low, high + 1)
    errors = [
        np.abs(series[low:edge] - before).sum() + np.abs(series[edge:high] - after).sum()
        for edge in candidates
    ]
    return int(candidates[int(np.argmin(errors))])


def settled(run: Run, start: int = 0, end: int | None = None) -> int | None:
    """Rounds from ``start`` until the split no longer changes before ``end``; None if it never settles.

    Settled: in 95 % of the remaining rounds, every worker's share differs from its median over the second half by at
    most a tenth of an equal share, or by at most two samples.
    """
    end = len(run.batch) if end is None else end
    batch = np.maximum(run.batch[start:end], 1)
    shares = np.nan_to_num(run.loads[start:end] / batch[:, None])
    if len(shares) < 4:
        return None
    goal = np.median(shares[len(shares) // 2 :], axis=0)
    near = np.maximum(0.1 / run.workers, 2 / batch) + 1e-12
    away: NDArray[np.bool_] = np.any(np.abs(shares - goal) > near[:, None], axis=1)
    left = np.cumsum(away[::-1])[::-1] / np.arange(len(away), 0, -1)
    calm = (left <= 0.05) & ~away
    first = int(np.argmax(calm))
    return first if calm[first] and first < 0.75 * len(shares) else None


def median(values: Array) -> Array:
    """Median along the first axis over known values; NaN, without a warning, if no value is known."""
    empty = np.isnan(values).all(axis=0)
    if empty.all():
        return np.full(empty.shape, np.nan)
    return np.where(empty, np.nan, np.nanmedian(np.where(empty, 0.0, values), axis=0))
