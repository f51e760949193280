"""``factoring``: a part of the plan first, the rest in shrinking pieces that free workers claim.

No plan can foresee that a worker will stall in the next round. Here only a portion of each share runs at once; the
rest is claimed while the round runs: each claim is a part of what the worker still has to do if all are to end
together, by the speeds measured in this round. So all end within one small piece of each other, and the
number of pieces grows with the logarithm of the round's length (Polychronopoulos and Kuck 1987: guided
self-scheduling; Hummel, Schonberg and Flynn 1992: factoring; Banicescu, Velusamy and Devaprasad 2003: adaptive
weighted factoring). The portion to run at once is learned by replaying each round: what would it have lost to its
slowest worker, had each portion been run at once? The size of a claim, once every worker has reported its speed, is
learned from how far the times of claims deviated from those expected by the first pieces.

A replay assumes that the claimed part is divided perfectly. It is not, if workers are interrupted rather than slow,
for example by other processes on their processors: no claim can foresee that, and it delays the last pieces as much
as a whole plan. So the real times of rounds in pieces are compared with their replays. And the pace after a worker's
first piece shows what part of its seconds does not grow with the load; that part is remembered for rounds that run as
planned, in which constant seconds would otherwise look like slowness.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.level import Level
from paceline.balance.protocol import Forecasting, Policy
from paceline.costs import LONGEST, QUICKEST, Linear, line_through
from paceline.errors import choice, number, whole
from paceline.forecast.portable_math import log
from paceline.rounds import Array, Cluster, PiecePlan, PieceTimes, Plan, Round

AT_FIRST = 0.25  # portion to run at once until a plan has been measured
PART = 0.5  # of what is due to a worker: a claim before all have reported their speeds, as in factoring
MOST = 0.97  # the most that a claim is afterwards, if paces are constant within the round
STRAY = 2.0  # a claim leaves this many times the mean deviation of the claims' times unclaimed
STRAY_MEMORY = 0.9  # factor on the weight of earlier deviations, each round
PORTIONS = np.concatenate([np.arange(0.05, 0.96, 0.05), [1.0]])  # candidates for the portion to run at once
LEFT = 1 - PORTIONS
MEMORY = 0.98  # factor on the weight of earlier rounds, each round
FIRST = 0.1  # weight of each of the first rounds, which include warm-up, and of the plans made from these
WARM = 0.45  # weight from which on rounds count in full: after five
LEAST_OWN = 1e-3  # the least that a sample costs, as a part of the seconds that it seems to take
LEAST = 3.0  # the smallest piece takes this many times what a piece costs beyond its samples
BELIEVED = 1.0  # weight of rounds in pieces at which half of their loss is taken into account


class FactoringState(NamedTuple):
    plan: Any  # the state of ``planner``
    planned: Array  # its newest shares, (..., n)
    losses: Array  # weighted mean loss of each portion, as a part of the round's seconds, (..., K)
    weight: Array  # the weight in this mean, (..., 1)
    speeds: Array  # samples per second, (..., n); zeros while nothing is known
    piece: Array  # seconds that a piece costs beyond its samples, (..., 1)
    claimed: Array  # weighted sum of the seconds that claims were expected to take, (..., 1)
    strayed: Array  # weighted sum of the deviations from these seconds, (..., 1)
    at_once: Array  # portion of the newest plan that runs at once, (..., 1)
    ends: Array  # mean delay of rounds in pieces beyond their replay, as a part of their seconds, (..., 1)
    flat: Array  # mean part of their seconds that did not grow with the load, (..., 1)
    seen: Array  # the weight in these two means, (..., 1)


@dataclass(frozen=True)
class Factoring(Forecasting, Policy[FactoringState]):
    """A part of the plan at once, the rest in shrinking pieces, claimed while the round runs.

    Args:
        cluster: The workers and their limits.
        scheme: "adaptive" learns what portion to run at once; "factoring" runs half, then half of what is left, and
            so on; "guided" claims an n-th (weighted) of what is left from the start; "self" claims pieces of one
            size.
        portion: Run this portion of the plan at once, instead of learning it.
        part: A claim is this part of what is due to the worker, instead of learning it.
        piece: Samples of the smallest piece (of every piece, with "self"), if its cost is not to decide. On a GPU,
            the load below which a piece takes no less time.
        overhead: Seconds that a piece costs beyond its samples, until it has been measured.
        forecast: The forecast of the plan's paces, as for level.
    """

    cluster: Cluster
    scheme: Literal["adaptive", "factoring", "guided", "self"] = "adaptive"
    portion: float | None = None
    part: float | None = None
    piece: int | None = None
    overhead: float = 1e-3
    forecast: str = "tracking"
    whole: ClassVar[bool] = False  # whether it may choose to run the whole plan at once

    def __post_init__(self) -> None:
        for name, value in (("portion", self.portion), ("part", self.part)):
            if value is not None:
                number(name, value, "more than 0 and at most 1", lambda part: 0 < part <= 1)
        if self.piece is not None:
            whole("piece", self.piece)
        number("overhead", self.overhead, "more than 0 seconds", lambda seconds: seconds > 0)
        choice("scheme", self.scheme, "adaptive", "factoring", "guided", "self")
        Level(self.cluster, self.forecast)  # raises for an unknown forecast

    def init(self) -> tuple[Plan, FactoringState]:
        plan, inner = self.planner.init()
        lead, speeds = self.cluster.shape[:-1], np.zeros(self.cluster.shape)
        losses, nothing = np.zeros((*lead, len(PORTIONS))), np.zeros((*lead, 1))
        learned = (speeds, nothing + self.overhead, nothing, nothing, nothing + 1.0, *[nothing] * 3)
        return self._in_pieces(plan, FactoringState(inner, plan.shares, losses, nothing, *learned))

    def step(self, state: FactoringState, round: Round) -> tuple[Plan, FactoringState]:
        plan, inner = self.planner.step(state.plan, round)
        lost = self._lost(state, round)
        assert isinstance(plan.costs, Linear)
        # The plan has margins for uncertain workers; claims go by the expected paces without margins.
        expected = inner.expected
        speeds = 1.0 / np.where(np.isfinite(plan.costs.seconds_per_sample), expected, np.inf)
        pieces = _learned(state, round.pieces)
        state = FactoringState(inner, plan.shares, *lost[:2], speeds, *pieces, state.at_once, *lost[2:])
        return self._in_pieces(plan, state)

    def train(self, state: FactoringState) -> FactoringState:
        return state._replace(plan=self.planner.train(state.plan))

    def _lost(self, state: FactoringState, round: Round) -> tuple[Array, Array, Array, Array, Array]:
        """``losses``, ``weight``, ``ends``, ``flat`` and ``seen`` of the state after a round."""
        pace = line_through(round.loads, round.seconds, round.overhead, np.nan)
        # Workers measured in this round whose plan was made from earlier measurements.
        known = np.isfinite(pace) & (state.speeds > 0)
        pieces, own = round.pieces, pace * (1.0 - state.flat)
        later = None if pieces is None else pieces.pace
        if later is not None:
            # A worker that was slower after its first piece was delayed there: none of its seconds are flat.
            own = np.where(np.isnan(later), own, np.minimum(later, pace))
        replay = Hindsight.of(np.where(known, round.loads, 0.0), state.planned, own, pace)
        measured = replay.ideal > 0
        missed, found, counts = *np.zeros((2, *measured.shape)), np.zeros(measured.shape, bool)
        if pieces is not None:
            claimed = np.any(pieces.expected > 0, axis=-1, keepdims=True)
            counts = measured & (state.at_once < 1) & (state.weight >= WARM) & claimed
            # How much later the slowest worker ended than expected; the smallest piece's time is not a delay.
            late = replay.ended - np.maximum(replay.begun(state.at_once), replay.ideal) - LEAST * state.piece
            missed = np.where(counts, np.maximum(late, 0.0) / np.where(measured, replay.ideal, 1.0), 0.0)
            found = replay.flat_part
        losses, weight = learn_losses(state.losses, state.weight, replay.losses(), measured, missed)
        seen = MEMORY * state.seen + counts  # the weight of rounds in pieces fades during other rounds
        gain = np.where(counts, 1.0 / np.maximum(seen, 1.0), 0.0)
        ends, flat = (old + gain * (new - old) for old, new in ((state.ends, missed), (state.flat, found)))
        return losses, weight, ends, flat, seen

    @cached_property
    def planner(self) -> Level:
        """The policy that plans the rounds."""
        return Level(self.cluster, self.forecast)

    def _in_pieces(self, plan: Plan, state: FactoringState) -> tuple[Plan, FactoringState]:
        speeds, piece = state.speeds, state.piece
        together = speeds.sum(-1, keepdims=True)
        known = together > 0
        seconds = np.where(known, self.cluster.global_batch / np.where(known, together, 1.0), 1.0)
        samples = self.piece
        least = LEAST * piece * speeds if samples is None else np.full(self.cluster.shape, float(samples))
        then = self._then(state)
        part, first = PART if self.part is None else self.part, self.portion
        if self.scheme in ("guided", "self"):
            part, first = (1.0 if self.scheme == "guided" else 0.0), 0.0
        elif self.scheme == "factoring" and first is None:
            first = part
        if self.part is not None or self.scheme != "adaptive":
            then = np.full_like(then, part)
        if first is None:
            portion = self._portion(state, seconds, part, then)
        else:
            portion = np.full(plan.shares.shape[:-1], float(first))
        piece_plan = PiecePlan(portion, np.full(portion.shape, part), then, np.maximum(least, 1.0), speeds)
        divided = Plan(plan.shares, plan.quorum, plan.costs, piece_plan)
        return divided, state._replace(at_once=np.asarray(portion)[..., None])

    def _then(self, state: FactoringState) -> Array:
        """The part of a worker's due that it claims once all have reported their speeds; (...,)."""
        strayed, claimed = state.strayed[..., 0], state.claimed[..., 0]
        deviation = np.where(claimed > 0, strayed / np.where(claimed > 0, claimed, 1.0), np.inf)
        return np.minimum(np.maximum(1.0 - STRAY * deviation, PART), MOST)

    def _portion(self, state: FactoringState, seconds: Array, part: float, then: Array) -> Array:
        """The portion to run at once; (...,)."""
        uneven = state.ends * (state.seen / (state.seen + BELIEVED))
        best = best_portion(state.losses, uneven, state.piece, seconds, part, then, self.whole)
        alone = self.whole and self.cluster.workers == 1  # no other worker could claim anything
        return np.where(state.weight[..., 0] > 0, best, 1.0 if alone else AT_FIRST)


@dataclass(frozen=True)
class Auto(Factoring):
    """Each round as planned, or in pieces: whichever would have lost less in the rounds before.

    Its options are those of ``Factoring``.
    """

    whole: ClassVar[bool] = True


def _learned(state: FactoringState, pieces: PieceTimes | None) -> tuple[Array, Array, Array]:
    """``piece``, ``claimed`` and ``strayed`` of the state after a round's pieces."""
    piece, claimed, strayed = state.piece, state.claimed, state.strayed
    if pieces is None:
        return piece, claimed, strayed
    expected = np.nansum(pieces.expected, -1, keepdims=True)
    kept = np.where(expected > 0, STRAY_MEMORY, 1.0)
    piece = _mean_of_known(pieces.cost, piece)
    return piece, kept * claimed + expected, kept * strayed + np.nansum(pieces.strayed, -1, keepdims=True)


def _mean_of_known(values: Array, otherwise: Array) -> Array:
    known = np.isfinite(values)
    if known.all():
        return values.sum(-1, keepdims=True) / values.shape[-1]
    counted = np.maximum(known.sum(-1, keepdims=True), 1)
    mean = np.where(known, values, 0.0).sum(-1, keepdims=True) / counted
    return np.where(known.any(-1, keepdims=True), mean, otherwise)


class Hindsight(NamedTuple):
    """A model of a past round for other loads: each worker takes flat + own * load seconds."""

    planned: Array  # samples as planned, scaled to the sum of those that ran, (..., n)
    own: Array  # seconds per sample, (..., n)
    flat: Array  # seconds that do not grow with the load, (..., n)
    ended: Array  # real seconds of the slowest worker, (..., 1)
    ideal: Array  # seconds with which all could have ended together; 0 if nothing is known, (..., 1)
    flat_part: Array  # the flat part of all workers' seconds, (..., 1)

    @classmethod
    def of(cls, loads: Array, planned: Array, own: Array, pace: Array) -> Hindsight:
        """The model of a round. loads: samples that ran, 0 for workers of which too little is known. planned: shares.
        own, pace: seconds per sample without and with those that do not grow with the load; all (..., n)."""
        known = loads > 0
        pace = np.where(known, pace, 0.0)
        own = np.where(known, np.maximum(own, LEAST_OWN * pace), 0.0)
        took, flat = pace * loads, (pace - own) * loads
        speed = np.divide(1.0, own, out=np.zeros_like(own), where=known)
        planned = np.where(known, planned, 0.0)
        each_worker = loads, planned, speed, took
        total, together, speeds, seconds = (each.sum(-1, keepdims=True) for each in each_worker)
        planned *= np.divide(total, together, out=np.zeros_like(total), where=together > 0)
        level = (total + (flat * speed).sum(-1, keepdims=True)) / np.where(speeds > 0, speeds, 1.0)
        ideal = np.where(together > 0, np.maximum(level, flat.max(-1, keepdims=True)), 0.0)
        part = flat.sum(-1, keepdims=True) / np.where(seconds > 0, seconds, 1.0)
        return cls(planned, own, flat, took.max(-1, keepdims=True), ideal, part)

    def begun(self, portion: Array) -> Array:
        """Seconds until the slowest worker has run this portion of its plan, (..., 1). portion: (..., 1)."""
        return (self.flat + self.own * portion * self.planned).max(-1, keepdims=True)

    def losses(self) -> Array:
        """The relative delay of the slowest worker beyond the ideal for each of ``PORTIONS``, if that portion had run
        at once and the rest had been divided perfectly; (..., K)."""
        begun = self.flat[..., None, :] + PORTIONS[:, None] * (self.own * self.planned)[..., None, :]
        return np.maximum(begun.max(-1) / np.where(self.ideal > 0, self.ideal, 1.0) - 1.0, 0.0)


def learn_losses(
    losses: Array, weight: Array, lost: Array, counts: NDArray[np.bool_], doubt: Array
) -> tuple[Array, Array]:
    """(each portion's mean loss, (..., K), the weight in it, (..., 1)) after one more round.

    lost: the replay's losses, (..., K). counts: whether the replay is known, (..., 1). doubt: the part of the whole
    plan's loss that may be due to the pieces of this round rather than to the plan, (..., 1); rounds that run whole
    later measure it.
    """
    lost[..., -1:] = np.maximum(lost[..., -1:] - doubt, 0.0)
    own = np.where(weight < WARM, FIRST, 1.0)
    weight = np.where(counts, MEMORY * weight + own, weight)
    gain = np.where(counts, own / np.maximum(weight, FIRST), 0.0)
    return losses + gain * (lost - losses), weight


def best_portion(
    losses: Array, ends: Array, piece: Array, seconds: Array, part: float, then: Array, whole: bool
) -> Array:
    """The portion with the least loss, including the cost of the pieces; (...,).

    losses: as learned, (..., K). ends: further loss of pieces, as a part of the round's seconds. piece: seconds that
    a piece costs beyond its samples; seconds: of the coming round; these three (..., 1). part, then: the part of a
    worker's due that it claims before and after the speeds are known. whole: the whole plan at once is allowed, too.
    """
    smallest = np.maximum(LEAST * piece, QUICKEST)
    after_one_claim = (1 - part) * LEFT * seconds
    later = np.maximum(np.minimum(after_one_claim, LONGEST), smallest)
    stages = log(later / smallest) / -log(1 - np.minimum(then, 0.99))[..., None]
    lost = losses + ends + ((2 + stages) * piece + smallest / 2) / seconds
    lost[..., -1] = losses[..., -1] if whole else np.inf
    return np.asarray(PORTIONS[np.argmin(lost, axis=-1)])
