"""Rounds that are not settled yet: from the first micro-batch on this rank to what all ranks reported.

A round is opened with its first micro-batch, finished after the optimizer step, and settled when the others'
reports are taken in: then the next plan is made, and listeners hear of it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balancer import Balancer, Decision
from paceline.errors import PacelineError
from paceline.few import total
from paceline.pieces.sharing import PieceRecord
from paceline.rounds import Array
from paceline.samples.cost import cost_of
from paceline.torch import peers
from paceline.torch.liveness.patience import named
from paceline.torch.measuring.exchange import Rows
from paceline.torch.measuring.meter import Meter, check_counts
from paceline.torch.measuring.piece_reports import PieceReports
from paceline.torch.plan import RoundPlan

OnNan = str | Callable[[int, list[int]], object]


class RoundResult(NamedTuple):
    """One finished round, the same on every rank. Arrays of shape (n,)."""

    step: int
    epoch: int
    batch: int
    loads: NDArray[np.int64]
    compute: Array  # seconds, without the wait for others
    overhead: Array  # the part of compute that does not grow with the load, as fitted
    seconds: float  # wall seconds of the round on this rank
    loss: float  # mean over the round's samples, or what was counted; NaN where backward() was not used
    shares: Array  # the plan made from it
    within: PieceRecord | None = None  # its pieces, where work may move within the round
    learning_rate: float = (
        math.nan
    )  # of the first optimizer's first group; NaN where pace.step did not step it
    costs: Array | None = None  # of each rank's part in mean samples, where the loader was given costs
    parts: Array | None = (
        None  # lengths, squared lengths and micro-batches that these are made of, shape (n, 3)
    )


class Outcome(NamedTuple):
    """What a round's reports come to, the same on every rank. Arrays of shape (n,)."""

    step: int
    loads: NDArray[np.int64]  # that the ranks really ran
    compute: Array  # seconds, as in RoundResult
    loss: float  # as there
    losses: list[float]  # each rank's, summed
    told: list[float]  # 1 where a rank handed in its loss, else 0
    overhead: Array  # seconds, as there
    shares: Array  # the plan made from it
    within: PieceRecord | None
    parts: Array | None = None  # as there, (n, 3)
    decision: Decision | None = None  # that is still to be taken; None where the balancer has it already


class _Open(NamedTuple):
    """A round whose measurements have not come in yet."""

    plan: RoundPlan
    epoch: int
    seconds: float = 0.0
    learning_rate: float = math.nan


class OpenRounds:
    """Keeps the rounds that are not settled yet.

    moves_work: whether work may move within rounds, so that the ranks report what they really ran.
    listeners: called in turn with each settled round. on_nan: what to do next where its loss is no number.
    """

    def __init__(
        self,
        balancer: Balancer,
        meter: Meter,
        moves_work: bool,
        listeners: list[Callable[[RoundResult], None]],
        on_nan: OnNan = "warn",
    ) -> None:
        self._balancer, self._meter, self._moves_work = balancer, meter, moves_work
        self.listeners = listeners
        self._finite = Finite(on_nan)
        self._settled = -1  # newest round whose reports have been taken in
        self._open: dict[int, _Open] = {}

    def restart(self, rounds: int) -> None:
        """Go on after this many rounds."""
        self._settled = rounds - 1

    def open(self, plan: RoundPlan, epoch: int) -> None:
        """A round's first micro-batch goes out."""
        self._open[plan.step] = _Open(plan, epoch)

    def finish(self, step: int, seconds: float, learning_rate: float) -> None:
        """The round's optimizer step is done, ``seconds`` after its beginning, at this learning rate."""
        plan, epoch, _, _ = self._open[step]
        self._open[step] = _Open(plan, epoch, seconds, learning_rate)

    def settle(self, rounds: int) -> None:
        """Take in what the ranks reported of the newest of so many finished rounds, once."""
        if self._settled == rounds - 1:
            return
        self._settled = rounds - 1
        # What takes no time to decide is not worth waiting for another rank.
        shared = self._balancer.decides_at_once and self._balancer.policy.follows
        if shared and (outcome := self._meter.published()) is not None:
            self._take(outcome)
        elif (rows := self._meter.collect(self._settled)) is not None:
            outcome = self._outcome(rows)
            if shared:
                self._meter.publish(outcome)
            self._take(outcome)

    def flush(self, rounds: int) -> None:
        """``settle``, and on a GPU also wait for the last round's reading. Collective."""
        self.settle(rounds)
        if (rows := self._meter.flush(self._balancer.digest)) is not None:
            self._take(self._outcome(rows))

    def _outcome(self, rows: Rows) -> Outcome:
        """What all ranks' reports of a round come to, with the next plan. Where the balancer does not decide at
        once, it has taken them in then."""
        step, balancer = int(rows["step"][0]), self._balancer
        plan = self._open[step].plan
        known, took, losses = rows["overhead"], rows["seconds"], rows["loss"].tolist()
        loads, reports, within, first = plan.loads, None, None, None
        parts = None if plan.deal is None else plan.deal.parts
        if self._moves_work:
            reports = PieceReports.of(rows["pieces"])
            piece_cost = total(reports.cost.tolist()) / len(reports.cost)
            within = PieceRecord(plan.at_once, piece_cost, reports.pieces, reports.seconds)
            if plan.deal is None:  # else the cost model has what micro-batches cost
                if max(map(len, reports.pieces)) > 1:
                    known = known + (reports.counts - 1).clip(0) * reports.cost
            elif plan.division is not None:
                parts, first = reports.parts, reports.before_claims(plan.deal, plan.division)
            loads = reports.loads
            if (ran := sum(loads.tolist())) != plan.batch:
                raise PacelineError(
                    f"round {step}: the ranks ran {ran} of its {plan.batch} samples; expected "
                    "all: check that every rank works through all that its loader yields"
                )
        elif "samples" in (rows.dtype.names or ()):  # a rank that was lost left its part to others
            loads = rows["samples"].astype(np.int64)
            parts = None if plan.deal is None else rows["parts"]
        counts = rows["count"].tolist()
        check_counts(step, counts)
        times = None if reports is None else reports.times()
        cpu, memory = (rows["cpu"], rows["memory"]) if balancer.needs_readings else (None, None)
        decision = None
        if balancer.decides_at_once:
            decision = balancer.decide(step, loads, took, known, cpu, memory, times)
            overhead, shares = decision.overhead, decision.plan.shares
        else:
            overhead, shares = balancer.report(step, loads, took, known, cpu, memory, times, parts, first)
        return Outcome(
            step=step,
            loads=loads,
            compute=took,
            loss=mean_loss(losses, counts, plan.batch),
            losses=losses,
            told=rows["told"].tolist(),
            overhead=overhead,
            shares=shares,
            within=within,
            parts=parts,
            decision=decision,
        )

    def _take(self, outcome: Outcome) -> None:
        """The plan takes effect, and listeners hear of the round."""
        plan, epoch, seconds, learning_rate = self._open.pop(outcome.step)
        parts = outcome.parts
        if outcome.decision is not None:
            self._balancer.take(outcome.decision)
        result = RoundResult(
            step=outcome.step,
            epoch=epoch,
            batch=plan.batch,
            loads=outcome.loads,
            compute=outcome.compute,
            overhead=outcome.overhead,
            seconds=seconds,
            loss=outcome.loss,
            shares=outcome.shares,
            within=outcome.within,
            learning_rate=learning_rate,
            costs=None if plan.deal is None or parts is None else cost_of(plan.deal.model, parts),
            parts=parts,
        )
        for listener in self.listeners:
            listener(result)
        self._finite.check(outcome.step, outcome.losses, outcome.told)


def mean_loss(losses: list[float], counts: list[float], batch: int) -> float:
    """Of each rank's summed loss, over what they are sums of: samples where no rank counted something else."""
    counted = [count for count in counts if not math.isnan(count)]
    many = total(counted) if counted else batch
    return total(losses) / many if many else math.nan


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
        """Of a round: each rank's summed loss, and 1 where it handed it in, else 0; (n,)."""
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
