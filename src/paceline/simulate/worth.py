"""Who is worth having: expected seconds of a round with fewer workers, the fastest alone among them.

A worker brings speed, and costs: the sum over the ranks takes longer with each of them. Which workers are best
follows from seconds per sample, overheads and the seconds of a sum, without trying all 2^n subsets. If k take part,
they end at the least T at which the k largest of (T - overhead_i) / pace_i hold the batch, so that T alone says who
they are: one bisection for each k, and for each speed of a link if links differ. A test compares it with all subsets.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.costs import Linear
from paceline.rounds import Array, Indices
from paceline.runs import Run
from paceline.runs.words import listing, percent, times
from paceline.shares import water_level
from paceline.simulate.scenario import Scenario
from paceline.simulate.whatif import BULK, paces

CLEAR = 0.02  # a gain of less is not told
SURE = 2.0  # standard errors
SLOW_LINK = 2.0  # times as long as over the fastest: a link of its own kind


class Subset(NamedTuple):
    """Some of the workers. seconds: of their rounds; exchange: the part of it that is their sum."""

    members: tuple[int, ...]
    seconds: float
    exchange: float


def growth(exchange: float, workers: int) -> Array:
    """Seconds of a sum over k = 0 to n workers, (n + 1,), from those over all n: in a ring each link carries
    2 (k - 1) / k times the gradients. (If messages took the time, whose number grows by k - 1, fewer took less.)"""
    k = np.arange(workers + 1)
    ring = np.maximum(k - 1, 0) / np.maximum(k, 1)
    return exchange * ring / max((workers - 1) / workers, 1e-12) if workers > 1 else np.zeros(workers + 1)


def best(
    pace: Array, overhead: Array, batch: float, exchange: Array, links: Array | None = None
) -> list[Subset]:
    """The best subset of each size from 1 to n, all workers last.

    pace, overhead: seconds per sample, and beside the samples, (n,). exchange: seconds of a sum over k workers,
    (n + 1,). links: how many times as long a sum takes with each worker in it, (n,): it goes at the slowest. Who
    takes part has a sample at least.
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
    """A given subset, as ``best`` has them."""
    level = float(water_level(Linear(pace[members], overhead[members]), batch).seconds)
    level = max(level, float((overhead[members] + pace[members]).max()))
    summed = float(exchange[len(members)] * links[members].max()) if len(members) > 1 else 0.0
    return Subset(tuple(sorted(int(i) for i in members)), level + summed, summed)


def _quickest(pace: Array, overhead: Array, batch: float, k: int) -> Indices:
    """The k workers that end a batch soonest together."""
    low, high = 0.0, float((overhead + (batch + 1) * pace).max())
    for _ in range(60):  # of a bisection
        middle = (low + high) / 2
        amounts = np.sort((middle - overhead) / pace)[-k:]
        low, high = (low, middle) if amounts[0] >= 1 and amounts.sum() >= batch else (middle, high)
    return np.argsort(-(high - overhead) / pace, kind="stable")[:k]


def of_run(record: Run, exchange: float | None = None) -> list[str]:
    """What a record says of who is worth having: the fastest worker alone, and fewer workers if these would surely be
    faster. exchange: seconds of a sum, by default what rounds take beyond their slowest worker. Nothing is said of a
    record that tells nothing of all workers."""
    known = measured(record, exchange)
    return [] if known is None else _told(*known, bound=True, links=links(record))


def measured(record: Run, exchange: float | None = None) -> tuple[Array, Array, float, float] | None:
    """Seconds per sample and overheads in the later half of a record's rounds, (T, n), samples of a round, and
    seconds of a sum; None for a record that tells nothing of all workers."""
    half = slice(len(record.round) // 2, None)
    there = (np.nan_to_num(record.loads[half]) > 0) & ~np.isnan(record.compute[half])
    alone = any(str(record.config.get(name) or needed) != needed for name, needed in BULK.items())
    if alone or record.workers < 2 or len(there) < 2 or not there.all():  # a server's updates are no rounds
        return None
    pace, fixed = (each[half] for each in paces(record))
    beyond = np.maximum(record.seconds[half] - record.compute[half].max(axis=1), 0.0)
    summed = float(np.median(beyond)) if exchange is None else exchange
    return pace, fixed, float(np.median(record.loads[half].sum(1))), summed


def links(record: Run) -> Array | None:
    """How long a sum takes with each worker in it, (n,), as a part of one over all; None if no link was measured."""
    told = [row for row in record.extras.get("links") or () if row and len(row) == record.workers]
    return np.array(told[-1]) / max(told[-1]) if told else None


def of_scenario(scenario: Scenario) -> list[str]:
    """The same of a scenario's workers, if it says who they are; their exchange takes no time there."""
    if scenario.draw or scenario.events or any(each.link is not None for each in scenario.workers):
        return []
    rng, columns = np.random.default_rng(scenario.seed), []
    for each in scenario.workers:
        for model in (each.seconds_per_sample, each.overhead):
            stream = model.stream((each.count,), rng)
            columns.append(np.array([next(stream) for _ in range(min(scenario.rounds, 64))]))
    pace, fixed = np.hstack(columns[::2]), np.hstack(columns[1::2])
    return [] if np.isnan(pace).any() else _told(pace, fixed, scenario.global_batch, 0.0)


def _told(
    pace: Array, fixed: Array, batch: float, exchange: float, bound: bool = False, links: Array | None = None
) -> list[str]:
    """From each round's seconds per sample and overheads, (T, n); bound: as ``sentences`` has it."""
    rounds, n = pace.shape
    middle, overhead = np.median(pace, axis=0), np.median(fixed, axis=0)
    if n < 2 or batch < n:
        return []
    spread = np.median(np.abs(pace / middle - 1.0), axis=0)
    error = SURE * 1.4826 * 1.2533 * float(spread.max()) / np.sqrt(rounds)  # of a median
    found = best(middle, overhead, batch, growth(exchange, n), links)
    said = sentences(found, overhead, middle, batch, error, bound)
    return said if links is None else [*said, *_slow_links(links)]


def _slow_links(links: Array) -> list[str]:
    """Whose link is slow, if sums take long enough to ask. links: how long each takes, (n,), in any unit."""
    slow = np.flatnonzero(links > SLOW_LINK * links.min()).tolist()
    if 2 * len(slow) > len(links):
        return []
    if not slow:
        return ["All workers' links are about equally fast: none of them is what the sums wait for."]
    who = f"link of worker {slow[0]} is" if len(slow) == 1 else f"links of workers {listing(slow)} are"
    return [
        f"The {who} {times(links.max() / links.min())} slower than the fastest, and every sum waits for it."
    ]


def sentences(
    found: list[Subset], overhead: Array, pace: Array, batch: float, error: float, bound: bool = False
) -> list[str]:
    """Of the best subsets of each size. error: relative, of the seconds, by which a gain is to be larger. bound: more
    of the seconds may be overhead than is known, so that fewer workers would take as long at most."""
    everyone, alone = found[-1], found[0]
    ratio = alone.seconds / everyone.seconds
    most, least = ("at most ", "at least ") if bound else ("", "")
    slower = f"{most}{times(ratio)} slower than" if ratio >= 1 + CLEAR else f"{least}as fast as"
    if ratio < 1 / (1 + CLEAR):
        slower = f"{least}{times(1 / ratio)} faster than"
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
        gain = percent(everyone.seconds / fewer.seconds - 1)
        said.append(
            f"Without {who} {listing(out)} the others would be {gain} faster: {they} {percent(max(brings, 0.0))} of "
            f"speed, and the sums with {them} cost {percent(costs)} of a round."
        )
    return said
