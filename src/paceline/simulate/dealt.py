"""Rounds of samples that cost differently, on a virtual clock: each policy by count, and by cost.

By count a worker runs the next so many samples of the epoch's order, as everywhere else; by cost the round's
samples are dealt by what they cost, which is learned on the way from the seconds alone, exactly as in training.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import policies
from paceline.balancer import Balancer
from paceline.costs import Array, Linear
from paceline.errors import PacelineError
from paceline.pieces.rule import Counts, against_the_first, piece_cost, portion
from paceline.rounds import Indices, PiecePlan, PieceTimes
from paceline.samples import CostLearner, CostModel, InPieces, Room, deal
from paceline.samples.cost import batch_parts, cost_of
from paceline.samples.pool import micro_cost
from paceline.shares import whole_samples
from paceline.simulate.pieces import AHEAD, CLAIM_SECONDS
from paceline.simulate.rounds import moments
from paceline.simulate.scenario import DIE, FREEZE, Samples, Scenario


class Claimed(NamedTuple):
    """The outcome of a round in pieces; n workers.

    loads: samples run, (n,). parts: what each worker's micro-batches add up to, (n, 3). seconds: until each was
    done, (n,). first: parts and seconds of what each ran before it claimed anything, NaN where nothing. times: what
    the pieces' seconds tell. pieces: cost of each worker's micro-batches as believed, in order.
    """

    loads: Counts
    parts: Array
    seconds: Array
    first: tuple[Array, Array]
    times: PieceTimes
    pieces: list[list[float]]


class _Worker:
    """One worker within the round. Amounts are costs as believed, without launches."""

    def __init__(
        self, slope: float, overhead: float, cost: float, believed: CostModel, truth: CostModel
    ) -> None:
        self._slope, self._cost, self._believed, self._truth = slope, cost, believed, truth
        self.overhead = self.free = overhead
        self.running = 0.0
        self.samples, self.parts = 0, np.zeros(3)
        self.amounts: list[float] = []
        self.times: list[float] = []

    def run(self, lengths: Array, sizes: list[int], asking: float = 0.0) -> None:
        """Micro-batches of these samples, after so long for their claim."""
        start = 0
        for size in sizes:
            parts = batch_parts(lengths[start : start + size], np.array([size]), self._truth.padded)
            self.running = asking + self._slope * float(cost_of(self._truth, parts))
            self.free += self.running
            self.times.append(self.running - asking)
            self.amounts.append(micro_cost(self._believed, parts))
            self.parts, self.samples = self.parts + parts, self.samples + size
            start, asking = start + size, 0.0

    @property
    def speed(self) -> float:
        """Cost a second in this round, as measured so far; 0 before that."""
        busy = sum(self.times) - self._cost * len(self.times)
        return sum(self.amounts) / busy if busy > 0 else 0.0


def play(
    dealt: InPieces,
    piece_plan: PiecePlan,
    truth: CostModel,
    slope: Array,
    overhead: Array,
    costs: Array,
    micro_batch: int,
    most: Counts,
    present: NDArray[np.bool_],
) -> Claimed:
    """Run a round in pieces, in which who is free first claims next; all arrays have shape (n,).

    slope: seconds of each worker for a cost of 1. overhead: before its first sample. costs: seconds of a piece beyond
    its samples, as measured so far, changed in place. micro_batch: samples of a micro-batch at most; most: of each
    worker in the round. present: who takes part.
    """
    own, pool, n = dealt.own, dealt.pool, len(slope)
    workers = [
        _Worker(float(slope[w]), float(overhead[w]), float(costs[w]), own.model, truth) for w in range(n)
    ]
    here = np.flatnonzero(present).tolist()
    first_parts, first_seconds = np.zeros((n, 3)), np.full(n, np.nan)
    for w in here:
        start, sizes = int(own.starts[w]), own.sizes[w].tolist()
        if dealt.kept[w]:
            sizes.pop()
        if sizes:
            workers[w].run(own.lengths[start:], sizes)
            first_parts[w], first_seconds[w] = workers[w].parts, workers[w].free
    place = 0
    asking = [w for w in here if most[w] - workers[w].samples > dealt.kept[w]]
    while place < len(pool.lengths):
        w = min(asking, key=lambda each: (workers[each].free - AHEAD * workers[each].running, each))
        mine = workers[w]
        speeds = [workers[each].speed or float(piece_plan.speeds[each]) for each in range(n)]
        known = float(piece_plan.speeds.sum()) > 0
        wanted = portion(
            piece_plan,
            w,
            told=all(workers[each].speed > 0 for each in here),
            left=pool.left(place),
            batch=dealt.whole,
            held=sum(mine.amounts) + float(dealt.kept_costs[w]),
            speed=speeds[w],
            together=sum(speeds[each] for each in here) if known else 0.0,
            workers=n,
        )
        room = int(most[w]) - mine.samples - int(dealt.kept[w])
        size = pool.samples(place, float(wanted), room)
        if not size:
            asking.remove(w)
            continue
        claim = max(CLAIM_SECONDS - AHEAD * mine.running, 0.0)
        mine.run(pool.lengths[place:], pool.cuts(place, size, micro_batch), claim)
        place += size
    for w in here:
        if dealt.kept[w]:
            stop = int(own.starts[w + 1])
            workers[w].run(own.lengths[stop - int(dealt.kept[w]) :], [int(dealt.kept[w])])
        costs[w] = piece_cost(workers[w].amounts[:-1], workers[w].times[:-1], float(costs[w]))
    strays = [
        against_the_first(each.amounts, each.times, float(cost))
        for each, cost in zip(workers, costs, strict=True)
    ]
    return Claimed(
        np.array([each.samples for each in workers]),
        np.array([each.parts for each in workers]),
        np.array([workers[w].free if present[w] else np.nan for w in range(n)]),
        (first_parts, first_seconds),
        PieceTimes(costs.copy(), *np.array(strays, float).T),
        [each.amounts for each in workers],
    )


COUNT, COST = WAYS = ("by count", "by cost")


class Dealt(NamedTuple):
    """One policy's rounds, divided in one way; R realizations.

    latency: seconds of each round, (T, R). wait: part of the workers' time that they waited, (R,). micro_batches:
    of a worker in a round, in the mean.
    """

    latency: Array
    wait: Array
    micro_batches: float


class DealtOutcome(NamedTuple):
    """Every policy in both ways; bound: seconds of each round without padding, launches and waiting, (T, R)."""

    scenario: Scenario
    ways: dict[tuple[str, str], Dealt]
    bound: Array

    def of_bound(self, name: str, way: str) -> float:
        """The bound's seconds of all rounds as a part of what the policy took."""
        return float(self.bound.sum() / self.ways[name, way].latency.sum())


def run(
    scenario: Scenario, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> DealtOutcome:
    """Play a scenario with ``[samples]`` under each policy named, by count and by cost.

    Raises PacelineError for what such rounds cannot have: workers that stop without notice, knees, fractions.
    """
    if scenario.fractional or scenario.draw or any(each.knee for each in scenario.workers):
        raise PacelineError("[samples] goes with whole samples, given workers and no knee; leave these out")
    if any(event.kind in (DIE, FREEZE) for event in scenario.events):
        raise PacelineError(
            "[samples] goes with workers that leave and join; leave out those that die or freeze"
        )
    shape = (scenario.rounds, scenario.realizations)
    bound, ways = np.empty(shape), {}
    known = list(dict.fromkeys(names))
    players = {
        (name, way): [_Player(scenario, name, way, seed) for seed in range(scenario.realizations)]
        for name in known
        for way in WAYS
    }
    latency = {key: np.empty(shape) for key in players}
    for t, moment in enumerate(moments(scenario)):
        for r in range(scenario.realizations):
            here = moment.present[r] if moment.present.ndim > 1 else moment.present
            slope, overhead = moment.slope[r], moment.overhead[r]
            for key, each in players.items():
                latency[key][t, r] = each[r].round(t, slope, overhead, here)
            first = next(iter(players.values()))[r]
            bound[t, r] = first.alone / (here / slope).sum()
        if progress is not None:
            progress(t + 1, scenario.rounds)
    for key, each in players.items():
        waits = np.array([player.waited / player.time for player in each])
        launches = float(np.mean([player.launches for player in each]))
        ways[key] = Dealt(latency[key], waits, launches / scenario.rounds / scenario.size)
    return DealtOutcome(scenario, ways, bound)


class _Player:
    """One policy in one way and one realization."""

    def __init__(self, scenario: Scenario, name: str, way: str, realization: int) -> None:
        assert scenario.samples is not None
        self._samples = samples = scenario.samples
        rng = np.random.default_rng((scenario.seed, realization, 1))
        cluster = dataclasses.replace(scenario.cluster(), realizations=())
        self._scenario, self._by_cost = scenario, way == COST
        self._costs = samples.costs(scenario.rounds * scenario.global_batch, rng)
        self._truth = samples.truth(self._costs)
        self._rng = rng
        learner = CostLearner(self._costs, cluster.workers, cluster.global_batch, padded=samples.padded)
        policy = policies.create(name, cluster)
        self._knows = policy.needs_upcoming  # an oracle is told the speeds and the costs, and learns nothing
        if self._knows:
            policy = policies.create("equal", cluster)
        self._balancer = Balancer(policy, learner=learner if self._by_cost else None)
        self._balancer.lag = scenario.decision_delay
        self._room = Room(
            micro_batch=samples.micro_batch, budget=samples.micro_batch_cost, micro_steps=samples.micro_steps
        )
        self._piece_costs = np.full(cluster.workers, scenario.piece_seconds)
        self._queue = np.zeros(0, np.int64)
        self.alone = self.waited = self.time = 0.0
        self.launches = 0

    def round(self, t: int, slope: Array, overhead: Array, present: NDArray[np.bool_]) -> float:
        """Seconds of the round; the policy hears of it."""
        lengths = self._costs.lengths[self._next(self._scenario.batch(t))]
        self.alone = float(self._truth.of(lengths).sum())
        claimed = self._in_pieces(t, lengths, slope, overhead, present)
        if claimed is None:
            loads, parts = self._divided(t, lengths, slope, overhead, present)
            seconds = np.where(present, overhead + slope * cost_of(self._truth, parts), np.nan)
            first = times = None
        else:
            loads, parts, seconds, first, times = claimed[:5]
        self.launches += int(parts[:, 2].sum())
        known = overhead if self._scenario.known_overhead else None
        parts_told = parts if self._by_cost else None
        self._balancer.report(t, loads, seconds, known, pieces=times, parts=parts_told, first=first)
        latency = float(np.nanmax(seconds))
        self.waited += latency * present.sum() - float(np.nansum(seconds))
        self.time += latency * present.sum()
        return latency

    def _divided(
        self, t: int, lengths: Array, slope: Array, overhead: Array, present: NDArray[np.bool_]
    ) -> tuple[Indices, Array]:
        """Samples of each worker, (n,), and the parts of their costs, (n, 3)."""
        balancer, cluster = self._balancer, self._balancer.policy.cluster
        if self._by_cost:
            if self._knows:
                limits = self._room._replace(least=cluster.least, most=cluster.most)
                dealt = deal(lengths, self._truth, np.where(present, slope, np.inf), overhead, limits)
            else:
                dealt = balancer.deal(t, lengths, present, self._room)
            return dealt.loads, dealt.parts
        if self._knows:
            costs = Linear(np.where(present, slope, np.inf), overhead)
            loads = whole_samples(costs, len(lengths), cluster.least * present, cluster.most)
        else:
            loads = balancer.loads(t, len(lengths), present)
        parts, start = np.zeros((len(loads), 3)), 0
        for worker, load in enumerate(loads.tolist()):  # each runs the next so many samples
            mine, start = lengths[start : start + load], start + load
            if load:
                parts[worker] = batch_parts(mine, _sizes(mine, self._samples), self._samples.padded)
        return loads, parts

    def _in_pieces(
        self, t: int, lengths: Array, slope: Array, overhead: Array, present: NDArray[np.bool_]
    ) -> Claimed | None:
        """The round, where a part of it is claimed by cost; None where it is run as planned."""
        balancer = self._balancer
        piece_plan = balancer.piece_plan(t)
        if piece_plan is None or not self._by_cost or self._room.micro_steps is not None:
            return None
        dealt = balancer.in_pieces(t, lengths, present, self._room)
        if dealt is None:
            return None
        most = np.minimum(balancer.policy.cluster.most, len(lengths)).astype(np.int64)
        micro = self._samples.micro_batch or len(lengths)
        costs = self._piece_costs
        return play(dealt, piece_plan, self._truth, slope, overhead, costs, micro, most, present)

    def _next(self, batch: int) -> Indices:
        while len(self._queue) < batch:
            self._queue = np.concatenate([self._queue, self._rng.permutation(len(self._costs.lengths))])
        taken, self._queue = self._queue[:batch], self._queue[batch:]
        return taken


def _sizes(lengths: Array, samples: Samples) -> Indices:
    """Sizes of the micro-batches of samples that stand as they are: the fewest even ones within the limits."""
    load = len(lengths)
    count = -(-load // (samples.micro_batch or load))
    while True:
        sizes = np.full(count, load // count)
        sizes[: load % count] += 1
        starts = np.cumsum(sizes) - sizes
        held = (
            np.maximum.reduceat(lengths, starts) * sizes
            if samples.padded
            else np.add.reduceat(lengths, starts)
        )
        if held.max() <= (samples.micro_batch_cost or np.inf) or count == load:
            return sizes
        count += 1
