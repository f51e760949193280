"""``factoring``: a part of the plan first, the rest in shrinking pieces that whoever is free claims.

No plan can know that a worker will stall in the coming round. Here only a portion of each share is run at
once; what is left is claimed while the round runs, in stages: each hands out a part of what the stage before
left, to every worker by the speed that it has in this very round. So all end within one small piece of each
other, and the number of pieces grows with the logarithm of the round's length (Polychronopoulos and Kuck 1987:
guided self-scheduling; Hummel, Schonberg and Flynn 1992: factoring; Banicescu, Velusamy and Devaprasad 2003:
adaptive weighted factoring). How much is run at once is learned by replaying each round: what would it have
lost to its slowest worker, had each portion been run at once?
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.level import Level
from paceline.costs import Linear, line_through
from paceline.errors import PacelineError
from paceline.rounds import Array, Cluster, Plan, Pull, Round

PORTIONS = np.concatenate([np.arange(0.05, 0.96, 0.05), [1.0]])  # candidates for what is run at once
AT_FIRST = 0.25  # until a plan has been measured once
MEMORY = 0.98  # weight of what was learned, kept each round
LEAST = 3.0  # the smallest piece takes this many times what a piece costs beyond its samples
Counts = NDArray[np.int64]


class FactoringState(NamedTuple):
    plan: Any  # of the policy that plans
    planned: Array  # its newest shares, (..., n)
    losses: Array  # weighted mean of what each portion would have lost, of the round's seconds, (..., K)
    weight: Array  # behind it, (..., 1)
    speeds: Array  # samples per second, (..., n); zeros while nothing is known
    piece: Array  # seconds that a piece costs beyond its samples, (..., 1)


@dataclass(frozen=True)
class Factoring:
    """A part of the plan at once, the rest in shrinking pieces, claimed while the round runs.

    scheme: "adaptive" learns what portion to run at once; "factoring" runs half, then half of what is left, and
        so on; "guided" claims an n-th (weighted) of what is left from the start; "self" pieces of one size.
    portion: run this portion of the plan at once, instead of learning it.
    part: portion of what is left that a stage hands out.
    piece: samples of the smallest piece (of every piece, under "self"), where its cost shall not decide. On a
        GPU, the load below which a piece takes no less time.
    overhead: seconds that a piece costs beyond its samples, until it has been measured.
    forecast: where the plan's expected paces come from, as for level.
    """

    cluster: Cluster
    scheme: Literal["adaptive", "factoring", "guided", "self"] = "adaptive"
    portion: float | None = None
    part: float = 0.5
    piece: int | None = None
    overhead: float = 1e-3
    forecast: str = "tracking"
    needs_upcoming: ClassVar[bool] = False
    whole: ClassVar[bool] = False  # whether running the whole plan at once is a choice

    def __post_init__(self) -> None:
        for name, value in (("portion", self.portion), ("part", self.part)):
            if value is not None and not 0 < value <= 1:
                raise PacelineError(f"{name}={value:g}: expected more than 0 and at most 1")
        if self.piece is not None and self.piece < 1:
            raise PacelineError(f"piece={self.piece}: expected at least 1 sample")
        if not self.overhead > 0:
            raise PacelineError(f"overhead={self.overhead:g}: expected more than 0 seconds")
        self.planner()

    @property
    def needs_readings(self) -> bool:
        """Whether the plan's forecast reads Round.cpu and memory."""
        return self.planner().needs_readings

    @property
    def trains(self) -> bool:
        """Whether the plan's forecast fits a model, which engines do aside."""
        return self.planner().trains

    def init(self) -> tuple[Plan, FactoringState]:
        plan, inner = self.planner().init()
        lead = self.cluster.shape[:-1]
        state = FactoringState(
            inner,
            plan.shares,
            np.zeros((*lead, len(PORTIONS))),
            np.zeros((*lead, 1)),
            np.zeros(self.cluster.shape),
            np.full((*lead, 1), self.overhead),
        )
        return self._pulled(plan, state), state

    def step(self, state: FactoringState, round: Round) -> tuple[Plan, FactoringState]:
        plan, inner = self.planner().step(state.plan, round)
        pace = line_through(round.loads, round.seconds, round.overhead, np.nan)
        losses, weight = _learn(state, pace)
        assert isinstance(plan.costs, Linear)
        per_sample = plan.costs.seconds_per_sample
        piece = state.piece
        if round.piece_seconds is not None:
            known = np.isfinite(round.piece_seconds)
            counted = np.maximum(known.sum(-1, keepdims=True), 1)
            measured = np.where(known, round.piece_seconds, 0.0).sum(-1, keepdims=True) / counted
            piece = np.where(known.any(-1, keepdims=True), measured, piece)
        state = FactoringState(inner, plan.shares, losses, weight, 1.0 / per_sample, piece)
        return self._pulled(plan, state), state

    def planner(self) -> Level:
        """What plans the rounds that are divided here."""
        return Level(self.cluster, self.forecast)

    def _pulled(self, plan: Plan, state: FactoringState) -> Plan:
        speeds, piece = state.speeds, state.piece
        together = speeds.sum(-1, keepdims=True)
        known = together > 0
        seconds = np.where(known, self.cluster.global_batch / np.where(known, together, 1.0), 1.0)
        samples = self.piece
        least = LEAST * piece * speeds if samples is None else np.full(self.cluster.shape, float(samples))
        part, first = self.part, self.portion
        if self.scheme in ("guided", "self"):
            part, first = (1.0 if self.scheme == "guided" else 0.0), 0.0
        elif self.scheme == "factoring" and first is None:
            first = part
        portion = (
            self._portion(state, seconds)
            if first is None
            else np.broadcast_to(float(first), plan.shares.shape[:-1])
        )
        pull = Pull(portion, np.broadcast_to(part, portion.shape), np.maximum(least, 1.0), speeds)
        return Plan(plan.shares, plan.quorum, plan.costs, pull)

    def _portion(self, state: FactoringState, seconds: Array) -> Array:
        """What to run at once: least loss by the replayed rounds, the cost of the pieces added; (...,)."""
        smallest = LEAST * state.piece
        stages = np.log2(np.maximum((1 - PORTIONS) * seconds, smallest) / smallest) / -np.log2(
            1 - min(self.part, 0.99)
        )
        claiming = ((2 + stages) * state.piece + smallest / 2) / seconds
        lost = state.losses + np.where(PORTIONS < 1, claiming, 0.0 if self.whole else np.inf)
        best = PORTIONS[np.argmin(lost, axis=-1)]
        alone = self.whole and self.cluster.workers == 1  # nobody else could claim anything
        return np.where(state.weight[..., 0] > 0, best, 1.0 if alone else AT_FIRST)


@dataclass(frozen=True)
class Auto(Factoring):
    """Each round as planned, or in pieces: whichever would have lost less in the rounds before."""

    whole: ClassVar[bool] = True


def _learn(state: FactoringState, pace: Array) -> tuple[Array, Array]:
    """What each portion would have lost: had it been run at once and the rest shared out perfectly, the slowest
    worker would end portion * slowest / ideal after the round began, the others at 1 or later."""
    known = np.isfinite(pace) & (state.speeds > 0)  # measured, and planned for by what was measured before
    speed = np.where(known, 1.0 / np.where(known, pace, 1.0), 0.0)
    planned = np.where(known, state.planned, 0.0)
    total = planned.sum(-1, keepdims=True)
    counts = total > 0
    slowest = np.where(known, planned * np.where(known, pace, 0.0), 0.0).max(-1, keepdims=True)
    ratio = slowest * speed.sum(-1, keepdims=True) / np.where(total > 0, total, 1.0)
    lost = np.maximum(PORTIONS * ratio - 1.0, 0.0)
    weight = np.where(counts, MEMORY * state.weight + 1.0, state.weight)
    gain = np.where(counts, 1.0 / np.maximum(weight, 1.0), 0.0)
    return state.losses + gain * (lost - state.losses), weight


def divide(
    pull: Pull, loads: Counts, unit: int = 1, most: int | Counts | None = None
) -> tuple[Counts, Counts]:
    """(what each worker runs at once, what it keeps for its end), whole samples of shape (..., n).

    What is left of the loads is the pool that is claimed; it holds a multiple of ``unit`` samples of each load,
    so that pieces do too. The kept end makes every worker's last piece known as its last before it begins:
    gradients are reduced in that one. most: samples of a piece at most, for all or for each, (n,).
    """
    kept = _up(np.ceil(pull.least), unit)
    if most is not None:
        kept = np.minimum(kept, most // unit * unit)
    kept = np.minimum(kept, loads)
    first = np.floor(pull.first[..., None] * loads).astype(np.int64) // unit * unit
    first = np.minimum(first, (loads - kept) // unit * unit)
    kept = kept + (loads - kept - first) % unit
    whole = (pull.first >= 1)[..., None]
    return np.where(whole, loads, first), np.where(whole, 0, kept)


def divide_grid(pull: Pull, loads: Counts, cell: int) -> tuple[Counts, Counts]:
    """As ``divide``, but on a grid that no plan moves: whole cells of ``cell`` samples, and what is left of the
    loads, the round's last and perhaps short cell among it, in the pool."""
    cells = loads // cell
    kept = np.minimum(cells, 1)
    first = np.clip(np.floor(pull.first[..., None] * cells).astype(np.int64), 0, cells - kept)
    return first * cell, kept * cell


def size(part: Array, pool: Array, left: Array, weight: Array, least: Array, unit: int = 1) -> Counts:
    """Samples of the next piece; all of one shape.

    part: as in Pull. pool: samples in the pool at the round's beginning; left: now. weight: the worker's part of
    all speeds. least: as in Pull. The stage follows from what is left, so no counting of claims is needed: stage
    k runs from pool (1 - part)^k down to pool (1 - part)^(k + 1) and hands each worker its weight's part of it.
    """
    staged = (part > 0) & (part < 1)
    keep = np.where(staged, 1.0 - part, 0.5)
    there = (left > 0) & (pool > 0)
    ratio = np.where(there, left / np.where(pool > 0, pool, 1), 1.0)
    stage = np.maximum(np.floor(np.log(ratio) / np.log(keep) + 1e-9), 0.0)
    portion = np.where(staged, part * pool * keep**stage, part * left) * weight
    samples = _up(np.ceil(np.maximum(portion, least)), unit)
    return np.minimum(samples, left)


def _up(samples: Array, unit: int) -> Counts:
    return (np.ceil(samples / unit) * unit).astype(np.int64)
