"""Rounds that are not settled yet: from the first micro-batch on this rank to what all ranks reported.

A round is opened with its first micro-batch, finished after the optimizer step, and settled when the others'
reports are taken in: then the next plan is made, and listeners hear of it.

Long rounds are settled one by one. Short ones are settled in intervals, since deciding takes longer than it brings:
the next decision is due once the rounds since the last one have taken a fixed multiple of what a decision costs. The
rounds between are light: their plan is the one in force, and the ranks tell nothing. How long an interval is follows
from the rows that all ranks share, so it ends with the same round on each of them.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.rounds import Array, PieceRecord, RoundResult
from paceline.samples.cost import cost_of
from paceline.torch import peers
from paceline.torch.liveness.stall import named
from paceline.torch.local import Every
from paceline.torch.measuring.exchange import Rows
from paceline.torch.measuring.meter import MOST_ROUNDS, Meter, OpenRound, check_counts
from paceline.torch.measuring.piece_reports import PieceReports

LONG_SECONDS = 0.05  # a round of so many seconds is settled by itself
# An interval takes so many times what a decision costs: deciding takes at most 1 % of the time.
MULTIPLE = 100
SETTLING_ROUNDS = 16  # decided one by one at the beginning, or fewer if the loads stay as they are before
PLAN, LOADS, BATCH = attrgetter("plan"), attrgetter("loads"), attrgetter("batch")
LOOK = 12  # decisions before links are measured,
LONG_SUM = 0.25  # if sums take more than that of the slowest rank's own seconds
SETTLED = 0.05  # of a rank's load, and one sample: a change by less is none

OnNan = str | Callable[[int, list[int]], object]
Listeners = list[Callable[[RoundResult], None]]


class OpenRounds:
    """Keeps the rounds that are not settled yet.

    moves_work: whether work may move within rounds, so that the ranks report what they really ran.
    listeners: called in turn with each settled round. on_nan: what to do next if its loss is no number.
    """

    def __init__(
        self, balancer: Balancer, meter: Meter, moves_work: bool, listeners: Listeners, on_nan: OnNan = "warn"
    ) -> None:
        self._balancer, self._meter, self._moves_work = balancer, meter, moves_work
        self.listeners = listeners
        self.fits: Array | None = None  # samples that fit into each rank's memory, (n,), if that is limited
        self._ran_out: Array = np.zeros(())  # passes of each that did not, until now
        # What rounds took beyond their slowest rank, until that is enough to tell whether sums take long.
        self.beyond: list[float] | None = None
        self.links_due = False  # sums take long: each rank's link is to be measured, once
        self.links: Array | None = None  # seconds of each, (n,), that are to go on record
        self.every: Every | None = None  # how many samples rounds have, if that is found
        self.one_by_one = False  # each round is told of by itself, however short
        self.loss = math.nan  # of the newest settled round
        self._finite, self._blind = Finite(on_nan), Blind()
        self._settling = SETTLING_ROUNDS  # rounds left of the beginning
        # Ranks that decide at once on a processor.
        self._crowd = max(1.0, peers.ranks() / (os.cpu_count() or 1))

    def settle(self) -> None:
        """Take in what the ranks have told of the newest rounds, once."""
        if self._meter.told:
            began = time.thread_time()
            rounds, rows = self._meter.collect()
            if rounds:
                self._take(rounds, rows)
            else:
                self._meter.due += 1
            self._meter.deciding = (time.thread_time() - began) * self._crowd

    def flush(self) -> None:
        """``settle``, also what has not been told yet, on a GPU (not yet run on one) with the last round's reading.
        Collective."""
        self.settle()
        rounds, rows = self._meter.flush()
        if rows is not None:
            self._take(rounds, rows)

    def measure_links(self) -> None:
        """Between two rounds, the same on all ranks, once ``links_due``. Collective."""
        self.links_due, self.links = False, peers.links()

    def _take(self, rounds: list[OpenRound], rows: Rows) -> None:
        """An interval, and what all ranks tell of it: the next plan is made from its mean round, and listeners hear
        of each round."""
        balancer, plans, many = self._balancer, list(map(PLAN, rounds)), len(rounds)
        first, last, newest = rounds[0].step, rounds[-1].step, plans[-1]
        took, losses = rows["seconds"][:, :many], rows["loss"][:, :many]
        counts = rows["count"][:, :many] if self._meter.counts else None
        known, loads, batch = rows["overhead"], newest.loads, newest.batch
        reports, within, head = None, None, None
        parts = None if newest.deal is None else newest.deal.parts
        if many > 1:
            loads = np.mean(list(map(LOADS, plans)), axis=0)
        elif self._moves_work and not self._meter.light:
            reports = PieceReports.of(rows["pieces"])
            within = PieceRecord(newest.at_once, float(reports.cost.mean()), reports.pieces, reports.seconds)
            if newest.deal is None:  # else the cost model has what micro-batches cost
                known = known + (reports.counts - 1).clip(0) * reports.cost
            elif newest.division is not None:
                parts, head = reports.parts, reports.before_claims(newest.deal, newest.division)
            loads = reports.loads
            if (ran := int(loads.sum())) != batch:
                raise PacelineError(
                    f"round {first}: the ranks ran {ran} of its {batch} samples; expected "
                    "all: check that every rank works through all that its loader yields"
                )
        elif self._meter.by_itself:  # a rank that was lost left its part to others, or a late one dropped it
            loads = rows["samples"].astype(np.int64)
            parts = None if newest.deal is None else rows["parts"]
        for number, told in enumerate(() if counts is None else counts.T.tolist()):
            check_counts(first + number, told)
        mean = took[:, 0] if many == 1 else took.mean(-1)
        seconds = float(np.fmax.reduce(mean))
        times = None if reports is None else reports.times()
        cpu, memory = (rows["cpu"], rows["memory"]) if balancer.needs_readings else (None, None)
        overhead, shares = balancer.report(
            *(last, loads, mean, known, cpu, memory, times, parts, head), short=LONG_SECONDS
        )
        ran_out = None
        if self._meter.memory is not None:
            ran_out = (rows["ran_out"] - self._ran_out).clip(0)  # a rank that has joined counts from 0
            self._ran_out, ran_out = rows["ran_out"].copy(), ran_out if ran_out.any() else None
            if not np.isnan(rows["fits"]).all():
                self.fits = rows["fits"].copy()
                balancer.limit(last + 1 + balancer.lag, self.fits)
        self._meter.due = last + self._meter.lag + self._interval(rows, seconds, loads, batch, shares)
        self._meter.light = self._meter.due > last + self._meter.lag + 1
        if self.every is not None:
            self.every.take(last + 1 + balancer.lag, batch, seconds, rows["link"])
        elif self.beyond is not None:
            self._meter.link = rounds[-1].ended - rounds[-1].began - float(took[peers.rank(), -1])
            self.beyond.append(float(np.nanmin(np.append(rows["link"], np.inf)) / seconds))
            if len(self.beyond) == LOOK:
                self.links_due, self.beyond = sorted(self.beyond)[LOOK // 2] > LONG_SUM, None
        batches = np.array([int(loads.sum())] if self._meter.drops else list(map(BATCH, plans)))
        means = mean_losses(losses, counts, batches).tolist()
        self.loss = means[-1]
        for number, each in enumerate(rounds if self.listeners else ()):
            deal = each.plan.deal
            result = RoundResult(
                step=each.step,
                epoch=each.epoch,
                batch=int(batches[number]),
                loads=loads if many == 1 else each.plan.loads,
                compute=took[:, number],
                overhead=overhead,
                seconds=each.ended - each.began,
                loss=means[number],
                shares=shares,
                within=within,
                learning_rate=each.learning_rate,
                costs=None if deal is None or parts is None else cost_of(deal.model, parts),
                parts=parts,
                ran_out=ran_out if each.step == last else None,
                links=self.links if each.step == last else None,
                dropped_loads=each.plan.loads - loads if self._meter.drops else None,
                ended=each.ended,
            )
            for listener in self.listeners:
                listener(result)
        self.links = None
        # where loads alone say how much there is to do
        if not (self._moves_work or self._meter.drops) and newest.deal is None:
            self._blind.check(loads, mean)
        for number in range(0 if all(map(math.isfinite, means)) else many):
            self._finite.check(first + number, losses[:, number].tolist(), rows["told"].tolist())

    def _interval(self, rows: Rows, seconds: float, loads: NDArray[Any], batch: int, shares: Array) -> int:
        """Rounds until the next decision is due, from what all ranks know: rounds of ``seconds``, this mean load, and
        the shares that are planned next."""
        alone = self._meter.by_itself or self.one_by_one
        if seconds >= LONG_SECONDS or alone or not self._balancer.steady:
            return 1
        if self._settling > 0:
            changed = np.abs(shares * batch - loads) > 1 + SETTLED * loads
            self._settling -= 1 if changed.any() else self._settling
            return 1
        deciding = float(np.fmax.reduce(rows["deciding"]))
        return min(max(math.ceil(MULTIPLE * deciding / max(seconds, 1e-9)), 1), MOST_ROUNDS)


def mean_losses(losses: Array, counts: Array | None, batches: NDArray[np.int64]) -> Array:
    """The means of the ranks' summed losses, (n, rounds), over what they are sums of: samples if no rank counted
    something else. Shape (rounds,); NaN for a mean over nothing."""
    many: NDArray[Any] = batches
    if counts is not None:
        counted = ~np.isnan(counts)
        many = np.where(counted.any(0), np.where(counted, counts, 0.0).sum(0), batches)
    return losses.sum(0) / np.where(many > 0, many, np.nan)


class Finite:
    """Looks at each round's losses, the same on every rank: where one is no number, training would go on in silence,
    and spoil all it has learned.

    on_nan: "warn" (once, from rank 0), "raise", or a function, called on every rank with (round, ranks). Raises
    PacelineError for anything else.
    """

    def __init__(self, on_nan: OnNan = "warn") -> None:
        if not callable(on_nan) and on_nan not in ("warn", "raise"):
            raise PacelineError(f"on_nan={on_nan!r}: expected 'warn', 'raise' or a function")
        self._on_nan = on_nan
        self._warned = False

    def check(self, step: int, losses: Sequence[float], told: Sequence[float]) -> None:
        """Look at a round's ``losses``, a sum of each rank; ``told``: 1 if it handed it in, else 0; both (n,)."""
        if all(map(math.isfinite, losses)):
            return
        ranks = [rank for rank, loss in enumerate(losses) if told[rank] == 1 and not math.isfinite(loss)]
        if not ranks:
            return
        if callable(self._on_nan):
            self._on_nan(step, ranks)
            return
        words = (
            f"the loss of {named(ranks)} was not finite in round {step} ({losses[ranks[0]]:g}); lower the learning "
            "rate or look for bad values in the data"
        )
        if self._on_nan == "raise":
            raise PacelineError(words)
        if not self._warned and peers.rank() == 0:
            warnings.warn(f"{words}; training goes on (on_nan='raise' ends it)", RuntimeWarning, stacklevel=2)
        self._warned = True


class Blind:
    """Looks whether a rank's seconds follow its load. If its load changes by a quarter, all ranks take the same
    seconds all the same, and rounds get no shorter by it, then there is nothing to balance by; warns once, on rank 0.
    """

    ROUNDS = 64  # or intervals, that are looked at together

    def __init__(self) -> None:
        self._told: list[tuple[Array, Array]] = []  # shares and seconds, each (n,)
        self._warned = False

    def check(self, loads: NDArray[Any], seconds: Array) -> None:
        """Of a round or an interval: each rank's mean load and mean seconds, (n,)."""
        if self._warned or len(loads) < 2:
            return
        self._told.append((loads / loads.sum(), seconds))
        if len(self._told) < self.ROUNDS:
            return
        shares, took = map(np.array, zip(*self._told, strict=True))
        self._told = []
        few, many = np.sort(shares, axis=0)[[self.ROUNDS // 4, -self.ROUNDS // 4]]
        rank = int(np.argmax(many / np.maximum(few, 1e-9)))
        own, whole = shares[:, rank], took.max(1)
        # np.quantile and np.median would load numpy.ma in the middle of the run
        less, more = (
            sorted(each)[len(each) // 2] for each in (whole[own <= few[rank]], whole[own >= many[rank]])
        )
        # A change of speed shows in a round in which ranks take unlike seconds, before the loads follow it. And what
        # a small part of all ranks does changes too little of the whole to tell anything.
        alike = bool((whole <= 1.05 * took.min(1)).all()) and abs(more / less - 1) <= 0.03
        varied = many[rank] >= 1.25 * few[rank] and many[rank] - few[rank] >= 0.1 * (1 - few[rank])
        if alike and varied:
            self._warned = True
            if peers.rank() == 0:
                warnings.warn(
                    f"rank {rank} was given {100 * few[rank]:.0f} to {100 * many[rank]:.0f} % of the samples, and "
                    "all ranks took the same seconds throughout: either a step hardly depends on its samples, or the "
                    "ranks wait for each other in something that cannot be told from work; balancing gains nothing "
                    "then, see docs/limits.md",
                    RuntimeWarning,
                    stacklevel=2,
                )
