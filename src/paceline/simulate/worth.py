"""Which workers are worth having: the expected seconds of a round with fewer workers, down to the fastest alone.

Each worker adds speed and a cost: the sum (all-reduce) over the ranks takes longer with it. The best workers follow
from seconds per sample, overheads and the seconds of a sum, without trying all 2^n subsets. If k take part, they
finish at the least T at which the k largest of (T - overhead_i) / pace_i hold the batch, so T determines them: one
bisection for each k, and for each speed of a link if links differ. A test compares the result with all subsets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.costs import Linear
from paceline.rounds import Array, Indices
from paceline.runs import Run
from paceline.runs.summary import paces
from paceline.runs.words import listing, percent, times
from paceline.shares import water_level
from paceline.simulate.scenario import Scenario
from paceline.simulate.whatif import BULK

CLEAR = 0.02  # least relative gain that is reported
SURE = 2.0  # standard errors by which a gain must be significant
SLOW_LINK = 2.0  # a link is slow if a sum takes more than this multiple of the seconds over the fastest


class Subset(NamedTuple):
    """Some of the workers. seconds: of a round of theirs; exchange: the part of it that is the sum."""

    members: tuple[int, ...]
    seconds: float
    exchange: float


def growth(exchange: float, workers: int) -> Array:
    """Seconds of a sum over k = 0 to n workers, (n + 1,), from the seconds over all n: in a ring each link carries
    2 (k - 1) / k times the gradients. (If the k - 1 messages dominated, fewer workers would save more.)"""
    k = np.arange(workers + 1)
    ring = np.maximum(k - 1, 0) / np.maximum(k, 1)
    return exchange * ring / max((workers - 1) / workers, 1e-12) if workers > 1 else np.zeros(workers + 1)


def best(
    pace: Array, overhead: Array, batch: float, exchange: Array, links: Array | None = None
) -> list[Subset]:
    """The best subset of each size from 1 to n, all workers last.

    pace, overhead: seconds per sample, and beyond the samples, (n,). exchange: seconds of a sum over k workers,
    (n + 1,). links: the multiple of these seconds with each worker's link, (n,); the slowest link counts. Each member
    has at least one sample.
    """
    slowness = np.ones(len(pace)) if links is None else np.asarray(links, float)
    found = []
    for k in range(1, len(pace) + 1):
        each = []
        for slowest in np.unique(slowness):
            chosen = np.flatnonzero(slowness <= slowest)
            if len(chosen) >= k:
                members = chosen[_quickest(pace[chosen], overhead[chosen], batch, k)]
                each.append(of(members, pace, overhead, batch, exchange, slowness))
        found.append(min(each, key=lambda one: one.seconds))
    return found


def of(members: Indices, pace: Array, overhead: Array, batch: float, exchange: Array, links: Array) -> Subset:
    """The seconds of a given subset, computed as in ``best``."""
    level = float(water_level(Linear(pace[members], overhead[members]), batch).seconds)
    level = max(level, float((overhead[members] + pace[members]).max()))
    summed = float(exchange[len(members)] * links[members].max()) if len(members) > 1 else 0.0
    return Subset(tuple(sorted(int(i) for i in members)), level + summed, summed)


def _quickest(pace: Array, overhead: Array, batch: float, k: int) -> Indices:
    """The k workers that together finish a batch soonest."""
    low, high = 0.0, float((overhead + (batch + 1) * pace).max())
    for _ in range(60):  # steps of the bisection
        middle = (low + high) / 2
        amounts = np.sort((middle - overhead) / pace)[-k:]
        low, high = (low, middle) if amounts[0] >= 1 and amounts.sum() >= batch else (middle, high)
    return np.argsort(-(high - overhead) / pace, kind="stable")[:k]


def of_run(record: Run, exchange: float | None = None, called: str = "worker") -> list[str]:
    """Sentences on the workers worth having in a recorded run: the fastest alone, and fewer workers if these would
    surely be faster; none if the record lacks a worker's speed. exchange: seconds of a sum, by default the seconds
    of rounds beyond their slowest worker. called: the word for a worker."""
    known = measured(record, exchange)
    said = [] if known is None else _judged(*known, bound=True, links=links(record))
    return [each.replace("Worker", called.capitalize()).replace("worker", called) for each in said]


def measured(record: Run, exchange: float | None = None) -> tuple[Array, Array, float, float] | None:
    """Seconds per sample and overheads in the later half of a record's rounds, (T, n), samples of a round, and
    seconds of a sum; None if a worker lacks samples in these rounds, or all do not share them."""
    half = slice(len(record.round) // 2, None)
    there = (np.nan_to_num(record.loads[half]) > 0) & ~np.isnan(record.compute[half])
    alone = any(str(record.config.get(name) or needed) != needed for name, needed in BULK.items())
    if alone or record.workers < 2 or len(there) < 2 or not there.all():  # a server's updates are not rounds
        return None
    pace, fixed = (each[half] for each in paces(record))
    beyond = np.maximum(record.seconds[half] - record.compute[half].max(axis=1), 0.0)
    summed = float(np.median(beyond)) if exchange is None else exchange
    return pace, fixed, float(np.median(record.loads[half].sum(1))), summed


def links(record: Run) -> Array | None:
    """Seconds of a sum with each worker in it, (n,), relative to one over all; None if no link was measured."""
    rows = [row for row in record.extras.get("links") or () if row and len(row) == record.workers]
    return np.array(rows[-1]) / max(rows[-1]) if rows else None


def of_scenario(scenario: Scenario) -> list[str]:
    """The same sentences for a scenario's workers, whose exchange takes no time; none if its workers vary."""
    if scenario.draw or scenario.events or any(each.link is not None for each in scenario.workers):
        return []
    rng, columns = np.random.default_rng(scenario.seed), []
    for each in scenario.workers:
        for model in (each.seconds_per_sample, each.overhead):
            stream = model.stream((each.count,), rng)
            columns.append(np.array([next(stream) for _ in range(min(scenario.rounds, 64))]))
    pace, fixed = np.hstack(columns[::2]), np.hstack(columns[1::2])
    return [] if np.isnan(pace).any() else _judged(pace, fixed, scenario.global_batch, 0.0)


def _judged(
    pace: Array, fixed: Array, batch: float, exchange: float, bound: bool = False, links: Array | None = None
) -> list[str]:
    """The sentences from each round's seconds per sample and overheads, (T, n); bound: as in ``sentences``."""
    rounds, n = pace.shape
    middle, overhead = np.median(pace, axis=0), np.median(fixed, axis=0)
    if n < 2 or batch < n:
        return []
    spread = np.median(np.abs(pace / middle - 1.0), axis=0)
    error = SURE * 1.4826 * 1.2533 * float(spread.max()) / np.sqrt(rounds)  # error of a median
    found = best(middle, overhead, batch, growth(exchange, n), links)
    said = sentences(found, overhead, middle, batch, error, bound)
    return said if links is None else [*said, *_slow_links(links)]


def _slow_links(links: Array) -> list[str]:
    """A sentence on slow links; none if most links are slow. links: relative seconds, (n,)."""
    slow = np.flatnonzero(links > SLOW_LINK * links.min()).tolist()
    if 2 * len(slow) > len(links):
        return []
    if not slow:
        return ["All workers' links are about equally fast: the sums do not wait for a single one."]
    who = f"link of worker {slow[0]} is" if len(slow) == 1 else f"links of workers {listing(slow)} are"
    return [
        f"The {who} {times(links.max() / links.min())} slower than the fastest, and every sum waits for it."
    ]


def sentences(
    found: list[Subset], overhead: Array, pace: Array, batch: float, error: float, bound: bool = False
) -> list[str]:
    """Sentences on the best subsets of each size. error: relative error of the seconds, which a gain must exceed.
    bound: whether more of the seconds may be overhead than is known, so that the ratio is only a bound."""
    everyone, alone = found[-1], found[0]
    ratio = alone.seconds / everyone.seconds
    most, least = ("at most ", "at least ") if bound else ("", "")
    slower = f"{most}{times(ratio)} slower than" if ratio >= 1 + CLEAR else f"{least}as fast as"
    if ratio < 1 / (1 + CLEAR):
        slower = f"{least}{times(1 / ratio)} as fast as"
    said = [
        f"Worker {alone.members[0]} alone, the fastest, would be {slower} all {len(pace)} together, balanced."
    ]
    fewer = min(found[:-1], key=lambda one: one.seconds)
    if fewer.seconds * (1 + 2 * error) < everyone.seconds * (1 - CLEAR):
        out = [worker for worker in everyone.members if worker not in fewer.members]
        none, unlinked = np.zeros(len(pace) + 1), np.ones(len(pace))
        without = of(np.array(fewer.members), pace, overhead, batch, none, unlinked).seconds
        brings = without / (everyone.seconds - everyone.exchange) - 1.0
        costs = (everyone.exchange - fewer.exchange) / everyone.seconds
        who, they, them = (
            ("worker", "it brings", "it") if len(out) == 1 else ("workers", "they bring", "them")
        )
        gain = times(everyone.seconds / fewer.seconds)
        said.append(
            f"Without {who} {listing(out)} the others would be {gain} as fast: {they} {percent(max(brings, 0.0))} "
            f"more speed, but the sums with {them} cost {percent(costs)} of a round."
        )
    return said
