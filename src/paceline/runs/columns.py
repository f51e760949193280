"""The rounds of a run in growing columns, and the data that charts need for any range of rounds.

Running sums up to every round are kept beside the values. Following a run costs time for its new rounds only, and
a range of T rounds and n workers is computed from a bounded number of buckets, not from T times n values.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.runs.events import Happened, events
from paceline.runs.run import SCALARS, Array, Run
from paceline.runs.summary import LATE, ideal_seconds, known_speeds, last, slowness

SERVER = ("quorum", "present", "staleness", "stalest", "dropped")  # columns of a parameter server's rounds
PLAIN = (*SCALARS, "ideal", "last", "late", *SERVER)
EACH = ("loads", "compute", "overhead", "wait")
BANDS = 8  # up to this many workers have a curve each
LIMIT = 300  # most buckets of a curve
RECENT = 1024  # recent rounds by which slowness is measured


class Growing:
    """An array that grows along its first axis, at amortised constant cost per new row."""

    def __init__(self, *width: int, start: float | None = None) -> None:
        self._data = np.zeros((16, *width))
        self._count = 0
        if start is not None:
            self.extend(np.full((1, *width), start))

    @property
    def values(self) -> Array:
        """All rows so far, as a view that is valid until the next ``extend``."""
        return self._data[: self._count]

    def extend(self, values: Array | NDArray[np.int64]) -> None:
        """Append rows."""
        end = self._count + len(values)
        if end > len(self._data):
            larger = np.zeros((max(end, 2 * len(self._data)), *self._data.shape[1:]))
            larger[: self._count] = self.values
            self._data = larger
        self._data[self._count : end] = values
        self._count = end

    def widen(self, width: int, fill: float) -> None:
        """Widen the last axis to ``width``; existing rows get ``fill`` in the new entries."""
        pad = [(0, 0)] * (self._data.ndim - 1) + [(0, width - self._data.shape[-1])]
        self._data = np.pad(self._data, pad, constant_values=fill)


class Window:
    """Rounds ``start`` to ``end`` (as indices into the record) in at most about ``LIMIT`` buckets.

    span: the first round's number, and the last round's number plus 1.
    edges, middles: the buckets' edges and middles in round numbers, shapes (buckets + 1,) and (buckets,).
    whole: whether these are all rounds so far.
    short: number of rounds with fewer samples than usual, as an epoch's last often has; uneven: if the run has any.
    seconds, loss: thinned, seconds without the short rounds. ideal (also without these), time (at a bucket's end)
        and the arrays of ``server``: shape (buckets,).
    loads, portions, pace: samples per round, portion of the batch and seconds per sample of each worker, each of
        shape (buckets, n).
    computed, overhead, waited: seconds of each worker over the window, shape (n,); elapsed: seconds of the window.
    last: portion of the rounds in which each worker was the straggler; slowness: its seconds per sample as a
        multiple of the others' median; both of shape (n,).
    lengths: seconds of every round, not thinned and without the short ones.
    rows: chooses the workers to draw if there are too many for all. label: a worker in words.
    lost: the rounds in which workers were lost or left.
    """

    def __init__(self, columns: Columns, start: int, end: int, recent: int | None) -> None:
        self.start, self.end, self.workers, self.rows = start, end, columns.workers, columns.rows
        self.label = columns.label
        self.whole = end - start == len(columns)
        rounds = np.append(columns["round"][start:end], columns["round"][end - 1] + 1)
        self.span = float(rounds[0]), float(rounds[-1])
        at = edges(start, end, LIMIT)
        self.edges = rounds[at - start]
        self.middles = (self.edges[:-1] + self.edges[1:]) / 2
        fewer, seconds = short(columns["batch"]), columns["seconds"][start:end]
        here = fewer[start:end] if not fewer[start:end].all() else np.zeros(end - start, bool)
        self.short, self.uneven = int(here.sum()), bool(fewer.any())
        self.time = columns["time"][at[1:] - 1]
        self.seconds = thin(np.where(here, np.nan, seconds), at - start)
        self.ideal = thin(np.where(here, np.nan, columns["ideal"][start:end]), at - start).mean
        self.loss = thin(columns["loss"][start:end], at - start)
        self.lengths, self.elapsed = seconds[~here], float(seconds.sum())
        loads, compute, overhead, _, there = np.moveaxis(columns.sums(at[:-1], at[1:]), 1, 0)
        self.loads = _over(loads, there)
        self.portions = _over(np.where(there > 0, loads, np.nan), loads.sum(axis=1, keepdims=True))
        self.pace = _over(compute - overhead, loads)
        _, spent, self.overhead, self.waited, _ = columns.sums(start, end)
        self.computed = spent - self.overhead
        who = columns["last"][start:end]
        self.last = np.bincount(who[who >= 0].astype(int), minlength=self.workers) / max(end - start, 1)
        judged = columns.part(start if recent is None else max(start, end - recent), end)
        self.slowness = slowness(judged)
        self.server: dict[str, Array] = {}
        if np.isfinite(columns["quorum"]).any():
            self.server = {name: thin(columns[name][start:end], at - start).mean for name in SERVER}
        gone = {each.round for each in columns.happened if not each.joined}
        self.lost = sorted(number for number in gone if rounds[0] <= number < rounds[-1])


class Columns:
    """The rounds of one run: ``extend`` adds the newest, ``window`` and ``part`` return a range."""

    def __init__(self, path: Path | None = None, config: dict[str, Any] | None = None) -> None:
        self.path, self.config = path or Path(), config or {}
        self.workers = 0
        self.happened: list[Happened] = []  # the workers that were lost, left or joined
        self.dropped: Counter[str] = Counter()  # number of gradients that a server did not use, by reason
        self.names: dict[int, str] = {}  # the newest name of each worker that has one
        self._events: list[Any] = []  # one entry per round
        self._plain = Growing(len(PLAIN))
        self._each = Growing(len(EACH), 0)
        self._sums = Growing(len(EACH) + 1, 0, start=0.0)  # EACH, and the rounds with each worker present
        self._speeds = np.zeros(0)
        self._judged, self._order = 0, np.zeros(0, np.int64)  # rounds when workers were ordered; the order

    @classmethod
    def of(cls, run: Run) -> Columns:
        """All rounds of a run."""
        columns = cls(run.path, run.config)
        columns.extend(run)
        return columns

    def __len__(self) -> int:
        return len(self._plain.values)

    def __getitem__(self, name: str) -> Array:
        """A column with one number per round: a field of the record, the ``ideal`` seconds, the worker that was
        ``last``, or that worker only if it was ``late`` beyond LATE (-1: none)."""
        return self._plain.values[:, PLAIN.index(name)]

    def extend(self, run: Run) -> None:
        """Append rounds that follow the present ones."""
        if not len(run.round):
            return
        if run.workers > self.workers:
            self._each.widen(run.workers, np.nan)
            self._sums.widen(run.workers, 0.0)
            self._speeds = np.pad(self._speeds, (0, run.workers - self.workers), constant_values=np.nan)
            self.workers, self._judged = run.workers, 0
        more = ((0, 0), (0, self.workers - run.workers))
        padded: dict[str, Any] = {
            name: np.pad(getattr(run, name), more, constant_values=np.nan) for name in EACH
        }
        run = replace(run, **padded)
        who = last(run)
        found = {
            "ideal": ideal_seconds(run, self._speeds),
            "last": who,
            "late": np.where(_behind(run), who, -1),
        }
        found |= {name: getattr(run, name) for name in SCALARS} | self._of_server(run)
        self._plain.extend(np.stack([found[name] for name in PLAIN], axis=1))
        self._speeds = known_speeds(run, self._speeds)[-1]
        each = np.stack(list(padded.values()), axis=1)
        self._each.extend(each)
        steps = np.concatenate((np.nan_to_num(each), ~np.isnan(each[:, :1])), axis=1)
        self._sums.extend(self._sums.values[-1] + np.cumsum(steps, axis=0))
        self._events += run.extras.get("events") or [None] * len(run.round)
        self.happened += events(run)
        self.names |= run.names

    def sums(self, start: int | NDArray[np.int64], end: int | NDArray[np.int64]) -> Array:
        """Sums of each worker's load, compute, overhead and wait, and of its rounds present, shape (..., 5, n)."""
        sums: Array = self._sums.values[end] - self._sums.values[start]
        return sums

    def part(self, start: int, end: int) -> Run:
        """A range of the rounds as a ``Run``, without copying; valid until the next ``extend``."""
        plain: dict[str, Any] = {name: self[name][start:end] for name in SCALARS}
        plain |= {name: plain[name].astype(np.int64) for name in ("round", "epoch")}
        values = self._each.values[start:end]
        each: dict[str, Any] = {name: values[:, i] for i, name in enumerate(EACH)}
        extras = {"events": self._events[start:end]} if self.happened else {}
        facts: dict[str, Any] = {"path": self.path, "config": self.config, "names": self.names}
        return Run(**facts, **plain, **each, extras=extras, summary={}, notes=[])

    def places(self, first: float | None, last: float | None) -> tuple[int, int]:
        """The indices (start, end) of the rounds numbered ``first`` to before ``last``; at least one round."""
        rounds, count = self["round"], len(self)
        start = 0 if first is None else min(int(np.searchsorted(rounds, first)), count - 1)
        end = count if last is None else int(np.searchsorted(rounds, last))
        return start, min(max(end, start + 1), count)

    def window(self, start: int = 0, end: int | None = None, recent: int | None = None) -> Window:
        """A range of at least one round, ready to draw. recent: measure slowness over this many last rounds."""
        return Window(self, start, len(self) if end is None else end, recent)

    def label(self, worker: int) -> str:
        """A worker in words: its number, and its name if it has one."""
        name = self.names.get(worker)
        return f"worker {worker}" if name is None else f"worker {worker}, {name}"

    def rows(self, limit: int) -> list[int]:
        """All workers, or ``limit`` of them spread over all speeds, by rank; chosen again when the record doubles. No
        two of ``BANDS`` workers have the same colour."""
        if self.workers <= limit:
            return list(range(self.workers))
        if len(self) >= 2 * self._judged:
            self._judged = len(self)
            judged = self.part(max(len(self) - RECENT, 0), len(self))
            self._order = np.argsort(np.nan_to_num(slowness(judged)), kind="stable")
        wanted = np.linspace(0, self.workers - 1, limit).astype(int)
        if limit != BANDS:
            return sorted(self._order[wanted].tolist())
        chosen: dict[int, int] = {}  # by colour
        for place in wanted.tolist():
            near = self._order[np.argsort(np.abs(np.arange(self.workers) - place), kind="stable")]
            worker = next(int(each) for each in near if int(each) % BANDS not in chosen)
            chosen[worker % BANDS] = worker
        return sorted(chosen.values())

    def _of_server(self, run: Run) -> dict[str, Array]:
        """The columns of a parameter server; NaN for other runs."""
        blank = [None] * len(run.round)
        stale = [value or [] for value in run.extras.get("staleness", blank)]
        dropped = [value or {} for value in run.extras.get("dropped", blank)]
        for counts in dropped:
            self.dropped.update(counts)
        columns = {
            "quorum": run.extras.get("quorum", blank),
            "present": run.extras.get("present", blank),
            "staleness": [sum(ages) / len(ages) if ages else None for ages in stale],
            "stalest": [max(ages) if ages else None for ages in stale],
            "dropped": [sum(counts.values()) for counts in dropped],
        }
        return {name: np.array(values, float) for name, values in columns.items()}


def short(batch: Array) -> NDArray[np.bool_]:
    """Which rounds have fewer samples than usual, shape (T,); none if these are most rounds.

    batch: samples of all rounds. The usual batch is the largest that at least a third of the rounds have.
    """
    sizes, counts = np.unique(batch, return_counts=True)
    usual = sizes[3 * counts >= len(batch)]
    fewer: NDArray[np.bool_] = batch < usual.max(initial=0.0)
    return fewer if 2 * fewer.sum() <= len(batch) else np.zeros(len(batch), bool)


def _behind(run: Run) -> NDArray[np.bool_]:
    """Whether the straggler of each round took more than LATE times the median, shape (T,)."""
    if not run.workers:
        return np.zeros(len(run.round), bool)
    known = np.where((~np.isnan(run.compute)).sum(axis=1, keepdims=True) > 1, run.compute, 0.0)
    behind: NDArray[np.bool_] = np.nanmax(known, axis=1) > LATE * np.nanmedian(known, axis=1)
    return behind


def _over(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


class Thin(NamedTuple):
    """A series of T values in buckets of equal length, each of shape (buckets,); NaN for a bucket without a value."""

    mean: Array
    low: Array
    high: Array


def edges(start: int, end: int, limit: int) -> NDArray[np.int64]:
    """Cut ``start`` to ``end`` into at most about ``limit`` buckets; returns their first indices, and ``end``.

    Buckets hold 1, 2, 3, 4, 6, 8, 12, ... values and begin at multiples of that number, so that a growing series
    keeps its buckets, and its curve does not change.
    """
    size = 1
    while size * limit < end - start:
        size = 3 * size // 2 if size & (size - 1) == 0 and size > 1 else max(4 * size // 3, size + 1)
    inner = np.arange((start // size + 1) * size, end, size)
    return np.concatenate(([start], inner, [end])).astype(np.int64)


def thin(values: Array, at: NDArray[np.int64]) -> Thin:
    """Thin values of shape (T,) to buckets. at: index of each bucket's first value, and T, shape (buckets + 1,)."""
    starts = at[:-1]
    total = np.add.reduceat(np.where(np.isnan(values), 0.0, values), starts)
    number = np.add.reduceat((~np.isnan(values)).astype(float), starts)
    return Thin(_over(total, number), np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts))
