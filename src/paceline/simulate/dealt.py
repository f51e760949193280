"""Rounds of samples that cost differently, on a virtual clock: each policy by count, and by cost.

By count, a worker runs the next samples of the epoch's order, as elsewhere. By cost, the round's samples are dealt
by their costs, which are learned during the run from the seconds alone, exactly as in training.
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
from paceline.simulate.pieces import CLAIM_SECONDS
from paceline.simulate.rounds import moments
from paceline.simulate.scenario import DIE, FREEZE, Samples, Scenario


class Claimed(NamedTuple):
    """What each of n workers ran in a round.

    loads: samples, (n,). parts: sums over its micro-batches, (n, 3). seconds: until it was done, (n,); NaN for
    absent workers. If a part of the round was claimed, first: parts and seconds of what each worker ran before its
    first claim, NaN if nothing; times: figures from the pieces' seconds.
    """

    loads: Counts
    parts: Array
    seconds: Array
    first: tuple[Array, Array] | None = None
    times: PieceTimes | None = None


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
    """Run a round in pieces, in which the worker that is free first claims next; all arrays have shape (n,).

    slope: seconds of each worker for a cost of 1. overhead: seconds before its first sample. costs: seconds of a
    piece beyond its samples, as measured so far, changed in place. micro_batch: most samples of a micro-batch; most:
    most samples of each worker in the round. present: the workers that take part.
    """
    own, pool, n = dealt.own, dealt.pool, len(slope)
    here = np.flatnonzero(present).tolist()
    free, parts, loads = overhead.astype(float), np.zeros((n, 3)), np.zeros(n, np.int64)
    # The estimated costs of each worker's micro-batches, without launches, and their seconds.
    amounts, times = ([list[float]() for _ in range(n)] for _ in range(2))

    def run(w: int, lengths: Array, sizes: list[int], asking: float = 0.0) -> None:
        """Run micro-batches of these samples, after ``asking`` seconds for their claim."""
        free[w] += asking
        start = 0
        for size in sizes:
            batch = batch_parts(lengths[start : start + size], np.array([size]), truth.padded)
            times[w].append(float(slope[w] * cost_of(truth, batch)))
            amounts[w].append(micro_cost(own.model, batch))
            free[w] += times[w][-1]
            parts[w] += batch
            start += size
        loads[w] += start

    def speed(w: int) -> float:
        """Cost per second in this round, as measured so far; 0 before the first measurement."""
        busy = sum(times[w]) - float(costs[w]) * len(times[w])
        return sum(amounts[w]) / busy if busy > 0 else 0.0

    for w in here:
        sizes = own.sizes[w].tolist()
        run(w, own.lengths[int(own.starts[w]) :], sizes[:-1] if dealt.kept[w] else sizes)
    first = parts.copy(), np.where(loads > 0, free, np.nan)
    place = 0
    asking = [w for w in here if most[w] - loads[w] > dealt.kept[w]]
    while place < len(pool.lengths):
        w = min(asking, key=lambda each: (free[each], each))
        measured = [speed(each) for each in range(n)]
        speeds = [measured[each] or float(piece_plan.speeds[each]) for each in range(n)]
        known = float(piece_plan.speeds.sum()) > 0
        wanted = portion(
            piece_plan,
            w,
            reported=all(measured[each] > 0 for each in here),
            left=pool.left(place),
            batch=dealt.whole,
            held=sum(amounts[w]) + float(dealt.kept_costs[w]),
            speed=speeds[w],
            together=sum(speeds[each] for each in here) if known else 0.0,
            workers=n,
        )
        size = pool.samples(place, float(wanted), int(most[w] - loads[w] - dealt.kept[w]))
        if not size:
            asking.remove(w)
            continue
        run(w, pool.lengths[place:], pool.cuts(place, size, micro_batch), CLAIM_SECONDS)
        place += size
    for w in here:
        if dealt.kept[w]:
            stop, kept = int(own.starts[w + 1]), int(dealt.kept[w])
            run(w, own.lengths[stop - kept : stop], [kept])
        costs[w] = piece_cost(amounts[w][:-1], times[w][:-1], float(costs[w]))
    strays = [against_the_first(amounts[w], times[w], float(costs[w])) for w in range(n)]
    piece_times = PieceTimes(costs.copy(), *np.array(strays, float).T)
    return Claimed(loads, parts, np.where(present, free, np.nan), first, piece_times)


COUNT, COST = WAYS = ("by count", "by cost")


class Dealt(NamedTuple):
    """One policy's rounds, divided in one way; R realizations.

    latency: seconds of each round, (T, R). wait: portion of the workers' time spent waiting, (R,). micro_batches:
    mean number per worker and round.
    """

    latency: Array
    wait: Array
    micro_batches: float


class DealtOutcome(NamedTuple):
    """All policies in both ways; bound: seconds of each round without padding, launches and waiting, (T, R)."""

    scenario: Scenario
    ways: dict[tuple[str, str], Dealt]
    bound: Array

    def of_bound(self, name: str, way: str) -> float:
        """The bound's total seconds as a portion of the policy's total seconds."""
        return float(self.bound.sum() / self.ways[name, way].latency.sum())


def run(
    scenario: Scenario, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> DealtOutcome:
    """Simulate a scenario with ``[samples]`` under each named policy, by count and by cost.

    Raises PacelineError for features that these rounds do not support: workers that stop without notice, knees,
    random draws of workers, fractions.
    """
    if scenario.fractional or scenario.draw or any(each.knee for each in scenario.workers):
        raise PacelineError("[samples] does not go with fractional, draw or a knee; leave these out")
    if any(event.kind in (DIE, FREEZE) for event in scenario.events):
        raise PacelineError("[samples] does not go with events die and freeze; use only leave and join")
    shape = (scenario.rounds, scenario.realizations)
    bound, ways = np.empty(shape), {}
    players = {
        (name, way): [_DealtPlayer(scenario, name, way, seed) for seed in range(scenario.realizations)]
        for name in dict.fromkeys(names)
        for way in WAYS
    }
    latency = {key: np.empty(shape) for key in players}
    for t, moment in enumerate(moments(scenario)):
        for r in range(scenario.realizations):
            here, slope, overhead = moment.present[r], moment.slope[r], moment.overhead[r]
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


class _DealtPlayer:
    """One policy in one way and one realization."""

    def __init__(self, scenario: Scenario, name: str, way: str, realization: int) -> None:
        assert scenario.samples is not None
        self._samples = samples = scenario.samples
        rng = np.random.default_rng((scenario.seed, realization, 1))
        cluster = dataclasses.replace(scenario.cluster(), realizations=())
        self._scenario, self._by_cost = scenario, way == COST
        self._costs = samples.costs(scenario.rounds * scenario.global_batch, rng)
        self._truth = self._costs.with_alpha(samples.alpha, samples.launch, samples.padded)
        self._rng = rng
        learner = CostLearner(self._costs, cluster.workers, cluster.global_batch, padded=samples.padded)
        policy = policies.create(name, cluster)
        self._knows = policy.needs_upcoming  # an oracle knows the speeds and the costs, and learns nothing
        if self._knows:
            policy = policies.create("equal", cluster)
        self._balancer = Balancer(policy, learner=learner if self._by_cost else None)
        self._balancer.lag = scenario.decision_delay
        budget = samples.micro_batch_cost or np.inf
        self._room = Room(micro_batch=samples.micro_batch, budget=budget, micro_steps=samples.micro_steps)
        self._piece_costs = np.full(cluster.workers, scenario.piece_seconds)
        self._queue = np.zeros(0, np.int64)
        self.alone = self.waited = self.time = 0.0
        self.launches = 0

    def round(self, t: int, slope: Array, overhead: Array, present: NDArray[np.bool_]) -> float:
        """Run round t and report it to the policy; returns its seconds."""
        batch = self._scenario.batch(t)
        while len(self._queue) < batch:
            self._queue = np.concatenate([self._queue, self._rng.permutation(len(self._costs.lengths))])
        taken, self._queue = self._queue[:batch], self._queue[batch:]
        lengths = self._costs.lengths[taken]
        self.alone = float(self._truth.of(lengths).sum())
        loads, parts, seconds, first, times = self._ran(t, lengths, slope, overhead, present)
        self.launches += int(parts[:, 2].sum())
        known = overhead if self._scenario.known_overhead else None
        sums = parts if self._by_cost else None
        self._balancer.report(t, loads, seconds, known, pieces=times, parts=sums, first=first)
        latency = float(np.nanmax(seconds))
        self.waited += latency * present.sum() - float(np.nansum(seconds))
        self.time += latency * present.sum()
        return latency

    def _ran(
        self, t: int, lengths: Array, slope: Array, overhead: Array, present: NDArray[np.bool_]
    ) -> Claimed:
        """What each worker ran: by count the next samples of the order; by cost those it was dealt and claimed."""
        balancer, samples, room = self._balancer, self._samples, self._room
        cluster, pace = balancer.policy.cluster, np.where(present, slope, np.inf)
        if not self._by_cost:
            if self._knows:
                costs = Linear(pace, overhead)
                loads = whole_samples(costs, len(lengths), cluster.least * present, cluster.most)
            else:
                loads = balancer.loads(t, len(lengths), present)
            each = np.split(lengths, np.cumsum(loads)[:-1])
            parts = np.array([batch_parts(mine, _sizes(mine, samples), samples.padded) for mine in each])
        else:
            planned = None if room.micro_steps is not None else balancer.piece_plan(t)
            pieces = None if planned is None else balancer.in_pieces(t, lengths, present, room)
            if planned is not None and pieces is not None:
                most = np.minimum(cluster.most, len(lengths)).astype(np.int64)
                micro, beyond = samples.micro_batch or len(lengths), self._piece_costs
                return play(pieces, planned, self._truth, slope, overhead, beyond, micro, most, present)
            if self._knows:
                room = room._replace(least=cluster.least, most=cluster.most)
                dealt = deal(lengths, self._truth, pace, overhead, room)
            else:
                dealt = balancer.deal(t, lengths, present, room)
            loads, parts = dealt.loads, dealt.parts
        return Claimed(
            loads, parts, np.where(present, overhead + slope * cost_of(self._truth, parts), np.nan)
        )


def _sizes(lengths: Array, samples: Samples) -> Indices:
    """Sizes of the micro-batches of samples in their given order: the fewest even ones within the limits."""
    count = -(-len(lengths) // (samples.micro_batch or max(len(lengths), 1)))
    while True:
        cuts = np.array_split(lengths, max(count, 1))
        held = [len(each) * each.max(initial=0.0) if samples.padded else each.sum() for each in cuts]
        if max(held) <= (samples.micro_batch_cost or np.inf) or count == len(lengths):
            return np.array([len(each) for each in cuts if len(each)], np.int64)
        count += 1
