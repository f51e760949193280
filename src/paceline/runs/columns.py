"""The rounds of a run in columns that grow, and what a chart asks of any stretch of them.

Sums up to every round are kept beside the values. Whoever follows a run pays for its new rounds only, and a
stretch of T rounds and n workers is answered from a bounded number of buckets, not from T times n values.
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

SERVER = ("quorum", "present", "staleness", "stalest", "dropped")  # what a parameter server's rounds add
PLAIN = (*SCALARS, "ideal", "last", "late", *SERVER)
EACH = ("loads", "compute", "overhead", "wait")
BANDS = 8  # up to this many workers are drawn in full
LIMIT = 300  # buckets of a curve
RECENT = 1024  # rounds by whose median workers are called slow


class Growing:
    """An array that is appended to along its first axis, at amortised cost of what is new."""

    def __init__(self, *width: int, start: float | None = None) -> None:
        self._data = np.zeros((16, *width))
        self._count = 0
        if start is not None:
            self.extend(np.full((1, *width), start))

    @property
    def values(self) -> Array:
        """All so far: a view, good until the next ``extend``."""
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
        """More entries on the last axis, ``fill`` in what is there already."""
        pad = [(0, 0)] * (self._data.ndim - 1) + [(0, width - self._data.shape[-1])]
        self._data = np.pad(self._data, pad, constant_values=fill)


class Window:
    """Rounds ``start`` to ``end`` (as places in the record) in at most about ``LIMIT`` buckets.

    span: the first round's number, and the last one's and 1.
    edges, middles: round numbers between which and about which the buckets lie, shapes (buckets + 1,), (buckets,).
    whole: whether these are all rounds so far.
    short: rounds of fewer samples than usual, as the last one of an epoch often is; uneven: whether the run has any.
    seconds, loss: thinned, seconds without the short rounds. ideal (without these, too), time (at a bucket's end),
        and ``server``'s: shape (buckets,).
    loads, portions, pace: samples a round, part of the batch and seconds per sample of each worker, each of shape
        (buckets, n).
    computed, overhead, waited: seconds of each worker over the window, shape (n,); elapsed: of the window.
    last: portion of the rounds that each worker was the straggler in; slowness: its seconds per sample as a
        multiple of the others' median, shape (n,).
    lengths: seconds of every round, not thinned and without the short ones.
    rows: the workers to draw where there are too many for all.
    lost: the rounds in which workers were lost or left.
    """

    def __init__(self, columns: Columns, start: int, end: int, recent: int | None) -> None:
        self.start, self.end, self.workers, self.rows = start, end, columns.workers, columns.rows
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
    """The rounds of one run; ``extend`` with the newest, ask for a ``window`` or a ``part``."""

    def __init__(self, path: Path | None = None, config: dict[str, Any] | None = None) -> None:
        self.path, self.config = path or Path(), config or {}
        self.workers = 0
        self.happened: list[Happened] = []  # to the workers
        self.dropped: Counter[str] = Counter()  # gradients that a server did not use, by what became of them
        self._events: list[Any] = []  # of each round
        self._plain = Growing(len(PLAIN))
        self._each = Growing(len(EACH), 0)
        self._sums = Growing(len(EACH) + 1, 0, start=0.0)  # EACH, and how often each worker was there
        self._speeds = np.zeros(0)
        self._judged, self._order = 0, np.zeros(0, np.int64)  # rounds by which workers were ordered, and how

    @classmethod
    def of(cls, run: Run) -> Columns:
        """All rounds of a run."""
        columns = cls(run.path, run.config)
        columns.extend(run)
        return columns

    def __len__(self) -> int:
        return len(self._plain.values)

    def __getitem__(self, name: str) -> Array:
        """A column, one number a round: the record's, and the ``ideal`` seconds, who was ``last`` (-1: nobody), and
        who was so ``late`` that it counts (-1: nobody)."""
        return self._plain.values[:, PLAIN.index(name)]

    def extend(self, run: Run) -> None:
        """Take in rounds that follow those here."""
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

    def sums(self, start: int | NDArray[np.int64], end: int | NDArray[np.int64]) -> Array:
        """Loads, seconds computed, of overhead and waited, and rounds present, of each worker: shape (..., 5, n)."""
        sums: Array = self._sums.values[end] - self._sums.values[start]
        return sums

    def part(self, start: int, end: int) -> Run:
        """Some of the rounds as a record, without copying: good until the next ``extend``."""
        plain: dict[str, Any] = {name: self[name][start:end] for name in SCALARS}
        plain |= {name: plain[name].astype(np.int64) for name in ("round", "epoch")}
        values = self._each.values[start:end]
        each: dict[str, Any] = {name: values[:, i] for i, name in enumerate(EACH)}
        extras = {"events": self._events[start:end]} if self.happened else {}
        return Run(path=self.path, config=self.config, **plain, **each, extras=extras, summary={}, notes=[])

    def places(self, first: float | None, last: float | None) -> tuple[int, int]:
        """Where the rounds from number ``first`` up to and without ``last`` lie; one round at least."""
        rounds, count = self["round"], len(self)
        start = 0 if first is None else min(int(np.searchsorted(rounds, first)), count - 1)
        end = count if last is None else int(np.searchsorted(rounds, last))
        return start, min(max(end, start + 1), count)

    def window(self, start: int = 0, end: int | None = None, recent: int | None = None) -> Window:
        """A stretch of at least one round, ready to draw. recent: judge slowness by this many of the last rounds."""
        return Window(self, start, len(self) if end is None else end, recent)

    def rows(self, limit: int) -> list[int]:
        """All workers, or ``limit`` from the slowest to the fastest, by rank; chosen again when the record has
        doubled."""
        if self.workers <= limit:
            return list(range(self.workers))
        if len(self) >= 2 * self._judged:
            self._judged = len(self)
            judged = self.part(max(len(self) - RECENT, 0), len(self))
            self._order = np.argsort(np.nan_to_num(slowness(judged)), kind="stable")
        return sorted(self._order[np.linspace(0, self.workers - 1, limit).astype(int)].tolist())

    def _of_server(self, run: Run) -> dict[str, Array]:
        """What a parameter server adds to the rounds; NaN if none does."""
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
    """Which rounds have fewer samples than usual, given all rounds' samples, shape (T,); none if that is usual.

    Usual is the largest batch that a third of the rounds have.
    """
    sizes, counts = np.unique(batch, return_counts=True)
    usual = sizes[3 * counts >= len(batch)]
    fewer: NDArray[np.bool_] = batch < usual.max(initial=0.0)
    return fewer if 2 * fewer.sum() <= len(batch) else np.zeros(len(batch), bool)


def _behind(run: Run) -> NDArray[np.bool_]:
    """Rounds whose straggler took LATE times the median or more."""
    if not run.workers:
        return np.zeros(len(run.round), bool)
    known = np.where((~np.isnan(run.compute)).sum(axis=1, keepdims=True) > 1, run.compute, 0.0)
    behind: NDArray[np.bool_] = np.nanmax(known, axis=1) > LATE * np.nanmedian(known, axis=1)
    return behind


def _over(part: Array, whole: Array) -> Array:
    return np.divide(part, whole, out=np.full(part.shape, np.nan), where=whole > 0)


class Thin(NamedTuple):
    """A series of T values in buckets of equal length, each of shape (buckets,); NaN if a bucket knows none."""

    mean: Array
    low: Array
    high: Array


def edges(start: int, end: int, limit: int) -> NDArray[np.int64]:
    """Cut ``start`` to ``end`` into about ``limit`` buckets at most; their first places, and ``end``.

    Buckets hold 1, 2, 3, 4, 6, 8, 12, ... values and begin at multiples of that, so that a series that grows
    keeps its buckets, and what was drawn of it stays.
    """
    size = 1
    while size * limit < end - start:
        size = 3 * size // 2 if size & (size - 1) == 0 and size > 1 else max(4 * size // 3, size + 1)
    inner = np.arange((start // size + 1) * size, end, size)
    return np.concatenate(([start], inner, [end])).astype(np.int64)


def thin(values: Array, at: NDArray[np.int64]) -> Thin:
    """The buckets of values of shape (T,). at: index of each bucket's first value, and T, shape (buckets + 1,)."""
    starts = at[:-1]
    total = np.add.reduceat(np.where(np.isnan(values), 0.0, values), starts)
    number = np.add.reduceat((~np.isnan(values)).astype(float), starts)
    return Thin(_over(total, number), np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts))
