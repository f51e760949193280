"""A recorded run as a scenario: each worker's pace in every round, and what of the record can be played at all."""

from __future__ import annotations

import dataclasses

import numpy as np
from numpy.typing import NDArray

from paceline import costs
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.run import waits
from paceline.runs.summary import carried, piece_figures
from paceline.runs.words import listing, plural
from paceline.simulate.scenario import PIECE_SECONDS, Scenario, WorkerClass
from paceline.simulate.timing import Replay

LEAST_PACE = 0.05  # of a worker's seconds, at least, are taken to grow with its load
PREFETCHED = 2  # batches that each of a loader's processes draws ahead, torch's default
EARLY = 1.05  # times a round's seconds: who computed for longer was not waited for
BULK = {
    "sync": "bsp",
    "mode": "push-wait",
    "backup": "everyone",
}  # what rounds of all workers together are run by


def usable(record: Run) -> Run:
    """The rounds that other policies can be played on; ``notes`` says what was left out, and what is odd.

    Raises PacelineError for a record without rounds, with one worker only, or of a run whose rounds were not
    shared by all workers: what it tells of single updates says nothing of rounds.
    """
    if not len(record.round):
        raise PacelineError(f"{record.path} has no finished round yet; let the run go on and ask again")
    for name, needed in BULK.items():
        given = str(record.config.get(name) or needed)
        if given.partition(":")[0] != needed:
            raise PacelineError(
                f"{record.path} was run with {name} {given}; whatif replays rounds that all workers share: expected "
                f"a record with {name} {needed}"
            )
    notes = list(record.notes)
    there = ~np.isnan(record.compute) & ~np.isnan(record.loads)
    loads = np.where(there, record.loads, np.nan)
    if np.any(np.nan_to_num(loads) % 1):
        raise PacelineError(
            f"{record.path} holds fractions of samples; expected whole ones, as engines run them"
        )
    worked: NDArray[np.bool_] = np.any(loads > 0, axis=1)
    if not worked.any():
        raise PacelineError(
            f"{record.path} has no round in which anybody ran a sample; nothing can be told from it"
        )
    if not worked.all():
        notes.append(f"{plural(int((~worked).sum()), 'round')} without samples left out.")
    loads, there = loads[worked], there[worked]
    ran = (np.nan_to_num(loads) > 0).any(0)
    idle = [int(i) for i in np.flatnonzero(there.any(0) & ~ran)]
    if idle:
        who = f"worker{'s' if len(idle) > 1 else ''} {listing(idle)}"
        notes.append(
            f"Nothing is known of the speed of {who}, without a sample in the record; nobody gives it any."
        )
    compute = np.where(there & ran, record.compute[worked], np.nan)
    loads = np.where(there & ran, loads, np.nan)
    if compute.shape[1] < 2:
        raise PacelineError(f"{record.path} has 1 worker only; expected at least 2 to divide a batch between")
    seconds = record.seconds[worked]
    early = int((np.nanmax(compute, axis=1) > EARLY * seconds).sum())
    if early:
        notes.append(
            f"{plural(early, 'round')} ended before the slowest worker was done; here, every policy waits for it."
        )
    per_round = {
        name: getattr(record, name)[worked] for name in ("round", "epoch", "time", "batch", "loss", "shares")
    }
    return dataclasses.replace(
        record,
        **per_round,
        seconds=seconds,
        loads=loads,
        compute=compute,
        overhead=np.where(np.isnan(compute), np.nan, record.overhead[worked]),
        wait=waits(seconds, compute),
        extras={
            name: [value for value, kept in zip(values, worked, strict=True) if kept]
            for name, values in record.extras.items()
        },
        notes=notes,
    )


def of_record(record: Run) -> Scenario:
    """The scenario that plays a usable record's rounds."""
    pace, overhead = paces(record)
    batches = tuple(int(b) for b in np.rint(np.nansum(record.loads, axis=1)))
    full = max(batches)
    least, most = _limits(record, full)
    measured = piece_figures(record).get("piece_cost")
    classes = tuple(
        WorkerClass(Replay(pace[:, i : i + 1]), Replay(overhead[:, i : i + 1]), least=least[i], most=most[i])
        for i in range(record.workers)
    )
    try:
        return Scenario(
            classes,
            global_batch=full,
            rounds=len(batches),
            batches=batches,
            decision_delay=PREFETCHED * int(record.config.get("loader_workers") or 0),
            known_overhead=False,
            piece_seconds=measured or PIECE_SECONDS,
        )
    except PacelineError as error:
        raise PacelineError(f"{record.path}: {error}") from None


def paces(record: Run) -> tuple[Array, Array]:
    """Seconds per sample and overhead of each worker in each round, (T, n); NaN where it was absent.

    The overhead is what the run's later half found it to be (0 where it could not tell); where a worker had
    no load, its pace is the last one known.
    """
    overhead = np.nan_to_num(record.overhead)
    settled = np.median(overhead[len(overhead) // 2 :], axis=0)
    fixed = np.minimum(settled, (1 - LEAST_PACE) * record.compute)
    with np.errstate(divide="ignore", invalid="ignore"):
        pace = np.where(record.loads > 0, (record.compute - fixed) / record.loads, np.nan)
    known = carried(pace)
    known = np.where(
        np.isnan(known), carried(pace[::-1])[::-1], known
    )  # before its first load: the first known
    anybody = np.nanmean(known) if not np.isnan(known).all() else 1.0
    known = np.where(np.isnan(known), anybody, known)
    absent = np.isnan(record.compute)
    return np.where(absent, np.nan, np.maximum(known, costs.LEAST)), np.where(absent, np.nan, fixed)


def _limits(record: Run, batch: int) -> tuple[list[int], list[int | None]]:
    """As the run had them: at least one sample each where there are enough."""
    workers = record.loads.shape[1]
    given = record.config.get("limits") or [(None, None)] * workers
    if len(given) != workers:
        owners = plural(len(given), "worker")
        record.notes.append(f"run.json has limits of {owners}, not of {workers}; none are kept to.")
        given = [(None, None)] * workers
    least = [min(1, batch // workers) if low is None else int(low) for low, _ in given]
    return least, [None if high is None else int(high) for _, high in given]
