"""When new loads are decided, and from what: the reports of all ranks on the rounds since the last decision.

A round ends with the optimizer step; its reports are collected before the next one begins. Then the next plan is made
from them, and the listeners are called with the round's result.

Long rounds are decided one by one. Short ones are decided in intervals, because a decision for each would cost more
than it gains: the next decision is due once the rounds since the last one have taken a fixed multiple of what a
decision costs. The rounds between are light: they use the plan in force, and the ranks report nothing, except what
their losses are means over if that is not the samples. The length of an interval follows from the rows that all ranks
share, so it ends with the same round on each of them.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.rounds import Array, PieceRecord, PieceTimes, RoundResult
from paceline.samples.cost import cost_of
from paceline.torch import peers, timing
from paceline.torch.callbacks import Callback, overriding
from paceline.torch.exchange import Rows
from paceline.torch.liveness.stall import named
from paceline.torch.local import Every
from paceline.torch.meter import Meter, OpenRound
from paceline.torch.piece_reports import PieceReports
from paceline.torch.plan import RoundPlan
from paceline.torch.rows import MOST_ROUNDS, check_counts

LONG_SECONDS = 0.05  # a round that takes this long is settled by itself
# An interval takes this many times what a decision costs: deciding takes at most 1 % of the time.
MULTIPLE = 100
SETTLING_ROUNDS = 16  # rounds at the beginning that are decided one by one; fewer if the loads settle earlier
LOOK = 12  # decisions before the links are measured,
LONG_SUM = 0.25  # if sums take more than this portion of the slowest rank's own seconds
SETTLED = 0.05  # portion of a rank's load; a change by no more than this plus one sample counts as none


class Ran(NamedTuple):
    """What the ranks ran in the mean round of an interval; arrays of shape (n,)."""

    loads: NDArray[Any]  # samples
    overhead: Array  # seconds that do not grow with the samples, as far as they were measured apart
    parts: Array | None = None  # of its cost (``Deal.parts``), (n, 3), if samples cost differently
    # Of a round in which work moves:
    times: PieceTimes | None = None
    within: PieceRecord | None = None
    before_claims: tuple[Array, Array] | None = None


class Planned(NamedTuple):
    """What was decided from an interval; arrays of shape (n,)."""

    overhead: Array  # as fitted
    shares: Array
    ran_out: Array | None  # passes that ran out of memory since the last report; None for none


def ran_in_pieces(plan: RoundPlan, rows: Rows) -> Ran:
    """What the ranks ran in a round in which work moves, by their rows, (n,). Raises PacelineError if samples of its
    plan are missing."""
    reports, overhead, deal, first = PieceReports.of(rows["pieces"]), rows["overhead"], plan.deal, None
    if (ran := int(reports.loads.sum())) != plan.batch:
        raise PacelineError(
            f"round {plan.step}: the ranks ran {ran} of its {plan.batch} samples; expected "
            "all: check that every rank works through all that its loader yields"
        )
    if deal is None:  # else the cost model includes what micro-batches cost
        overhead = overhead + (reports.counts - 1).clip(0) * reports.cost
    elif plan.division is not None:
        first = reports.before_claims(deal, plan.division)
    parts = None if deal is None else deal.parts if first is None else reports.parts
    within = PieceRecord(plan.at_once, float(reports.cost.mean()), reports.pieces, reports.seconds)
    return Ran(reports.loads, overhead, parts, reports.times(), within, first)


class Decisions:
    """Decides from the reports on the newest rounds.

    moves_work: whether work may move within rounds, so that the ranks report what they actually ran. every: chooses
    the number of samples in a round, if it is not fixed. one_by_one: each round is reported by itself, however short.
    looks: find out whether sums take long, so that the links are to be measured.
    """

    def __init__(
        self,
        balancer: Balancer,
        meter: Meter,
        moves_work: bool,
        callbacks: Sequence[Callback],
        *,
        every: Every | None = None,
        one_by_one: bool = False,
        looks: bool = False,
    ) -> None:
        self._balancer, self._meter, self._moves_work = balancer, meter, moves_work
        self._every, self._one_by_one = every, one_by_one
        self.listeners = overriding(callbacks, "on_round")
        self.fits: Array | None = None  # samples that fit into each rank's memory, (n,), if that is limited
        self._ran_out: Array = np.zeros(())  # each rank's passes so far that ran out of memory
        # Rounds' time beyond their slowest rank, as a portion, until ``LOOK`` rounds show whether sums take long.
        self._beyond: list[float] | None = [] if looks else None
        self.links_due = False  # sums take long: each rank's link is to be measured, once
        self.links: Array | None = None  # seconds of each link, (n,), to be recorded with the next round
        self.loss = math.nan  # of the newest settled round
        self.per_sample = 1.0  # the count of a sample in the newest counted round, as a power of two
        self._finite, self._blind = Finite(callbacks), LoadResponseCheck()
        self._settling = SETTLING_ROUNDS  # rounds left of the beginning
        # Ranks for each processor, which decide at the same time.
        self._crowd = max(1.0, peers.ranks() / (os.cpu_count() or 1))

    def settle(self) -> None:
        """Collect the ranks' reports of the newest rounds, if there are any that were not collected yet."""
        if self._meter.reported:
            began = time.thread_time()
            rounds, rows = self._meter.collect()
            if rounds:
                self._take(rounds, rows)
            else:
                self._meter.decided(self._meter.due + 1, self._meter.light)
            self._meter.took((time.thread_time() - began) * self._crowd)

    def flush(self) -> None:
        """Settle all rounds, also those not reported yet; on a GPU (not yet run on one) with the last round's
        reading. Collective."""
        self.settle()
        rounds, rows = self._meter.flush()
        if rows is not None:
            self._take(rounds, rows)

    def measure_links(self) -> None:
        """Measure the links once ``links_due``, between the same two rounds on all ranks. Collective."""
        self.links_due, self.links = False, peers.links()

    def _take(self, rounds: list[OpenRound], rows: Rows) -> None:
        """Settle an interval with all ranks' rows, (n,): make the next plan from its mean round, and call the
        listeners with each round."""
        meter, many, first, newest = self._meter, len(rounds), rounds[0].step, rounds[-1]
        took, losses = rows["seconds"][:, :many], rows["loss"][:, :many]
        counts = rows["count"][:, :many] if meter.counts else None
        ran = self._ran(rounds, rows)
        for number, given in enumerate(() if counts is None else counts.T.tolist()):
            check_counts(first + number, given)
        mean = took[:, 0] if many == 1 else took.sum(-1) / many
        seconds = float(np.fmax.reduce(mean))
        planned = self._plan(newest.step, ran, mean, rows)
        until = self._interval(rows, seconds, ran.loads, newest.plan.batch, planned.shares)
        meter.decided(newest.step + meter.lag + until, light=until > 1)
        if self._every is not None:
            self._every.take(newest.step + 1 + self._balancer.lag, newest.plan.batch, seconds, rows["link"])
        elif self._beyond is not None:
            self._look(self._beyond, newest.seconds - float(took[peers.rank(), -1]), seconds, rows["link"])
        batches = np.array([int(ran.loads.sum())] if meter.drops else [each.plan.batch for each in rounds])
        means = mean_losses(losses, counts, batches).tolist()
        self.loss = means[-1]
        if counts is not None:
            self.per_sample = per_sample(counts[:, -1].tolist(), int(batches[-1]), self.per_sample)
        for number, each in enumerate(rounds if self.listeners else ()):
            result = self._result(
                each, ran, planned, took[:, number], means[number], many > 1, each is newest
            )
            for listener in self.listeners:
                listener(result)
        self.links = None
        # Only if the loads alone say how much work each rank has.
        if not (self._moves_work or meter.drops) and newest.plan.deal is None:
            self._blind.check(ran.loads, mean)
        for number in range(0 if all(map(math.isfinite, means)) else many):
            self._finite.check(first + number, losses[:, number].tolist(), rows["has_loss"].tolist())

    def _ran(self, rounds: list[OpenRound], rows: Rows) -> Ran:
        """What the ranks ran in an interval: as planned, unless work moves within its round or others run a part."""
        plans: list[Any] = [each.plan for each in rounds]
        deal = plans[-1].deal
        if len(plans) > 1:
            dealt = None if deal is None else np.mean([plan.deal.parts for plan in plans], axis=0)
            return Ran(sum(plan.loads for plan in plans) / len(plans), rows["overhead"], dealt)
        if self._moves_work and not self._meter.light:
            return ran_in_pieces(plans[0], rows)
        if self._meter.by_itself:  # others may run a lost rank's part, and late ranks drop some of theirs
            return Ran(
                rows["samples"].astype(np.int64), rows["overhead"], None if deal is None else rows["parts"]
            )
        return Ran(plans[0].loads, rows["overhead"], None if deal is None else deal.parts)

    def _plan(self, last: int, ran: Ran, seconds: Array, rows: Rows) -> Planned:
        """Plan from an interval that ends with round ``last``. seconds: of each rank's mean round, (n,)."""
        balancer, ran_out = self._balancer, None
        cpu, memory = (rows["cpu"], rows["memory"]) if balancer.needs_readings else (None, None)
        pieces = ran.times, ran.parts, ran.before_claims
        overhead, shares = balancer.report(
            *(last, ran.loads, seconds, ran.overhead, cpu, memory, *pieces), short=LONG_SECONDS
        )
        if self._meter.limits:
            ran_out = (rows["ran_out"] - self._ran_out).clip(0)  # the count of a rank that joins begins at 0
            self._ran_out, ran_out = rows["ran_out"].copy(), ran_out if ran_out.any() else None
            if not np.isnan(rows["fits"]).all():
                self.fits = rows["fits"].copy()
                balancer.limit(last + 1 + balancer.lag, self.fits)
        return Planned(overhead, shares, ran_out)

    def _look(self, beyond: list[float], own: float, seconds: float, links: Array) -> None:
        """Find out from ``LOOK`` rounds whether sums take long. own: seconds of this rank's round beyond its own
        work; links: of each rank's round before, (n,). seconds: of the slowest rank's work."""
        self._meter.merged(own)
        beyond.append(float(np.nanmin(np.append(links, np.inf)) / seconds))
        if len(beyond) == LOOK:
            self.links_due, self._beyond = sorted(beyond)[LOOK // 2] > LONG_SUM, None

    def _result(
        self,
        round: OpenRound,
        ran: Ran,
        planned: Planned,
        took: Array,
        loss: float,
        light: bool,
        newest: bool,
    ) -> RoundResult:
        """The result of a round. took: seconds of each rank, (n,). light: it is one of several; newest: the last."""
        plan, deal, drops = round.plan, round.plan.deal, self._meter.drops
        parts = deal.parts if deal is not None and light else ran.parts
        return RoundResult(
            step=round.step,
            epoch=round.epoch,
            batch=int(ran.loads.sum()) if drops else plan.batch,
            loads=plan.loads if light else ran.loads,
            compute=took,
            overhead=np.minimum(planned.overhead, took),  # a mean need not fit into a single round
            # Another rank may have begun its work before this one, which then waited less.
            seconds=max(round.seconds, float(np.fmax.reduce(took))),
            loss=loss,
            shares=planned.shares,
            within=ran.within,
            learning_rate=round.learning_rate,
            costs=None if deal is None or parts is None else cost_of(deal.model, parts),
            parts=parts,
            ran_out=planned.ran_out if newest else None,
            links=self.links if newest else None,
            dropped_loads=plan.loads - ran.loads if drops else None,
            ended=round.summed,
        )

    def _interval(self, rows: Rows, seconds: float, loads: NDArray[Any], batch: int, shares: Array) -> int:
        """The number of rounds until the next decision is due, the same on all ranks: from the ``seconds`` of a
        round, the mean loads, (n,), and the shares that are planned next, (n,)."""
        alone = self._meter.by_itself or self._one_by_one
        if seconds >= LONG_SECONDS or alone or not self._balancer.steady:
            return 1
        if self._settling > 0:
            changed = np.abs(shares * batch - loads) > 1 + SETTLED * loads
            self._settling -= 1 if changed.any() else self._settling
            return 1
        deciding = float(np.fmax.reduce(rows["deciding"]))
        return min(max(math.ceil(MULTIPLE * deciding / max(seconds, 1e-9)), 1), MOST_ROUNDS)


def mean_losses(losses: Array, counts: Array | None, batches: NDArray[np.int64]) -> Array:
    """The mean loss of each round, (rounds,), from the ranks' summed losses and counts, both (n, rounds): over the
    samples if no rank counted something else. NaN for a mean over nothing."""
    many: NDArray[Any] = batches
    if counts is not None:
        counted = ~np.isnan(counts)
        many = np.where(counted.any(0), np.where(counted, counts, 0.0).sum(0), batches)
    return losses.sum(0) / np.where(many > 0, many, np.nan)


def per_sample(counts: Sequence[float], batch: int, before: float) -> float:
    """The power of two that is nearest to the count of a sample, from the ranks' counts of a round, (n,); ``before``
    if nothing was counted. No rounding depends on an order, so it is the same on all ranks and processors."""
    total = math.fsum(counts)
    if not (0 < total < math.inf and batch):
        return before
    part, power = math.frexp(total / batch)
    return math.ldexp(1.0, power if part >= math.sqrt(0.5) else power - 1)


class Finite:
    """Checks that each round's losses are finite, the same on every rank: training would silently continue after one
    that is not, and ruin the parameters.

    callbacks: those that override ``on_nan`` are called; without one, rank 0 warns once.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._on_nan = overriding(callbacks, "on_nan")
        self._warned = False

    def check(self, step: int, losses: Sequence[float], has_loss: Sequence[float]) -> None:
        """Check a round. losses: each rank's sum; has_loss: 1 if the rank reported its loss, else 0; both (n,)."""
        if all(map(math.isfinite, losses)):
            return
        ranks = [rank for rank, loss in enumerate(losses) if has_loss[rank] == 1 and not math.isfinite(loss)]
        if not ranks:
            return
        for on_nan in self._on_nan:
            on_nan(step, ranks)
        if not (self._on_nan or self._warned or peers.rank()):
            self._warned = True
            warnings.warn(
                f"the loss of {named(ranks)} was not finite in round {step} ({losses[ranks[0]]:g}); lower the "
                "learning rate or look for bad values in the data. Training continues; StopOnNan ends it",
                RuntimeWarning,
                stacklevel=timing.level(),
            )


class LoadResponseCheck:
    """Checks whether a rank's seconds follow its load. If its load changes by a quarter, and still all ranks take the
    same seconds and rounds get no shorter, then the times give nothing to balance by; warns once, on rank 0.
    """

    ROUNDS = 64  # or intervals, that are examined together

    def __init__(self) -> None:
        self._seen: list[tuple[Array, Array]] = []  # shares and seconds, each (n,)
        self._warned = False

    def check(self, loads: NDArray[Any], seconds: Array) -> None:
        """Take in a round or an interval: each rank's mean load and mean seconds, both (n,)."""
        if self._warned or len(loads) < 2:
            return
        self._seen.append((loads / loads.sum(), seconds))
        if len(self._seen) < self.ROUNDS:
            return
        shares, took = map(np.array, zip(*self._seen, strict=True))
        self._seen = []
        few, many = np.sort(shares, axis=0)[[self.ROUNDS // 4, -self.ROUNDS // 4]]
        rank = int(np.argmax(many / np.maximum(few, 1e-9)))
        own, whole = shares[:, rank], took.max(1)
        # np.quantile and np.median would load numpy.ma in the middle of the run
        less, more = (
            sorted(each)[len(each) // 2] for each in (whole[own <= few[rank]], whole[own >= many[rank]])
        )
        # A change of speed shows in a round in which the ranks' seconds differ, before the loads follow it. And a
        # small part of all ranks changes too little of the whole to conclude anything.
        alike = bool((whole <= 1.05 * took.min(1)).all()) and abs(more / less - 1) <= 0.03
        varied = many[rank] >= 1.25 * few[rank] and many[rank] - few[rank] >= 0.1 * (1 - few[rank])
        if alike and varied:
            self._warned = True
            if peers.rank() == 0:
                warnings.warn(
                    f"rank {rank} was given {100 * few[rank]:.0f} to {100 * many[rank]:.0f} % of the samples, and "
                    "all ranks took the same seconds: steps hardly depend on samples, or waits look like work, and "
                    "balancing gains nothing; see docs/limits.md",
                    RuntimeWarning,
                    stacklevel=timing.level(),
                )
