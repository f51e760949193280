"""Bulk-synchronous rounds on a virtual clock: every policy on the same rounds, all realizations at once.

Each round, every policy's plan is played, the slowest worker sets the time, and the policy hears what happened.
What is kept grows with n x R and with T x R, never with T x R x n.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import costs, policies
from paceline.balance.dolbie import Dolbie
from paceline.balance.members import among_present, bounds
from paceline.costs import Cost, Linear, Only, Saturating
from paceline.errors import PacelineError
from paceline.forecast import overheads
from paceline.policies import Policy
from paceline.rounds import Array, Cluster, PiecePlan, PieceTimes, Plan, Round
from paceline.shares import water_level, whole_samples
from paceline.simulate.pieces import play
from paceline.simulate.scenario import Scenario
from paceline.simulate.timing import assemble


class Moment(NamedTuple):
    """One round of the cluster; arrays of shape (R, n).

    costs: seconds of any load; impossible for who is not there.
    overhead: the part that does not grow with the load. slope: seconds per sample; both finite.
    knee: samples below which a load takes no less time.
    present: who is there when the round begins.
    stopped: who of them stops without notice before its end.
    everybody: all are there and none stops.
    """

    costs: Cost
    slope: Array
    overhead: Array
    knee: Array
    present: NDArray[np.bool_]
    stopped: NDArray[np.bool_]
    everybody: bool


def moments(scenario: Scenario) -> Iterator[Moment]:
    """Every round of every realization, all realizations of a round at once.

    Raises PacelineError where the timing models draw what no clock tells (``costs.SPAN``).
    """
    _, pacing, noising, waiting = np.random.default_rng(scenario.seed).spawn(4)
    shape = (scenario.realizations, scenario.size)
    of, classes = scenario.classes(), scenario.workers
    slopes = assemble([each.seconds_per_sample for each in classes], of).stream(shape, pacing)
    overheads = assemble([each.overhead for each in classes], of).stream(shape, waiting)
    noise = np.array([each.noise for each in classes])[of]
    knee = np.broadcast_to(np.array([each.knee for each in classes])[of], shape)
    limits = [scenario.global_batch if each.most is None else each.most for each in classes]
    most = np.broadcast_to(np.array(limits, float)[of], shape)
    saturating = bool(knee.any())
    linked = any(each.link for each in classes)
    for index in range(scenario.rounds):
        with np.errstate(over="ignore", invalid="ignore"):  # said below
            slope, overhead = next(slopes), next(overheads)
            if noise.any():
                slope = slope * np.exp(noise * noising.standard_normal(shape))
            if linked:
                transfer = [each.link.seconds(index) if each.link else 0.0 for each in classes]
                overhead = overhead + np.array(transfer)[of]
        _check(slope, index, "seconds_per_sample", costs.LEAST)
        _check(overhead, index, "overhead", 0.0)
        here, stops = scenario.members(index)
        present = np.broadcast_to(here, shape) & ~np.isnan(slope) & ~np.isnan(overhead)
        stopped = present & stops
        everybody = bool(present.all()) and not stopped.any()
        if not everybody:
            slope, overhead = np.where(present, slope, 1.0), np.where(present, overhead, 0.0)
        cost: Cost = Saturating(slope, overhead, knee, most) if saturating else Linear(slope, overhead)
        if not everybody:
            cost = Only(cost, present & ~stopped)
        yield Moment(cost, slope, overhead, knee, present, stopped, everybody)


def _check(seconds: Array, index: int, name: str, least: float) -> None:
    """Raise PacelineError for drawn seconds that no clock tells; NaN, an absent worker, may be."""
    wrong = (seconds < least) | (seconds > costs.MOST)
    if wrong.any():
        worker = int(np.argwhere(wrong)[0][-1])
        span = costs.SPAN if least else costs.SPAN_0
        raise PacelineError(
            f"{name} of worker {worker} in round {index + 1} is drawn as {seconds[wrong].ravel()[0]:.3g} seconds; "
            f"expected {span}: give its timing model a smaller spread"
        )


class Played(NamedTuple):
    """What one policy made of the rounds; T rounds, R realizations, n workers.

    latency: seconds of each round, (T, R).
    compute, overhead, wait: seconds of all workers and rounds together, (R,): at work on samples, on what does
        not grow with them, and waiting for the slowest.
    shares: mean over the realizations, (T, n). first_shares, first_seconds: of the first realization, (T, n),
        NaN where a worker was absent.
    decide_seconds: spent in the policy, all realizations together.
    steps: DOLBIE's alpha_t, (T, R), where it decided; None otherwise.
    """

    latency: Array
    compute: Array
    overhead: Array
    wait: Array
    shares: Array
    first_shares: Array
    first_seconds: Array
    decide_seconds: float
    steps: Array | None


class Outcome(NamedTuple):
    """Every policy's rounds, and what the oracle would have needed for the same.

    oracle: seconds of each round at best, (T, R): of fractions where these were played, else of whole samples.
    path: P_T, how far the fractional optimum moved in all, (R,). steepest: the largest seconds of a full batch
        on one worker beyond its overhead, (R,): a Lipschitz constant of every round's time in the shares.
    whole_cluster: everybody was there in all rounds.
    """

    scenario: Scenario
    policies: dict[str, Played]
    oracle: Array
    path: Array
    steepest: Array
    whole_cluster: bool


def run(
    scenario: Scenario, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> Outcome:
    """Play the scenario under each policy named (``name:key=value,...``): DOLBIE, eqs. (1) to (3).

    progress: called with the rounds done and their number, after each.
    Raises PacelineError on a name or option that does not exist.
    """
    if not names:
        raise PacelineError(f"no policy named; expected some of {', '.join(policies.names())}")
    if scenario.samples is not None:
        raise PacelineError(
            "the scenario has [samples], which paceline.simulate.dealt.run plays; leave them out"
        )
    cluster = scenario.cluster()
    players = {
        name: _Player(scenario, cluster, policies.create(name, cluster)) for name in dict.fromkeys(names)
    }
    oracle = np.empty((scenario.rounds, scenario.realizations))
    path, steepest = np.zeros(scenario.realizations), np.zeros(scenario.realizations)
    whole_cluster = True
    best: Array | None = None  # fractions of the round before
    stream = moments(scenario)
    coming: Moment | None = next(stream)
    for t in range(scenario.rounds):
        moment, coming = coming, next(stream, None)
        assert moment is not None
        before = best
        oracle[t], best = _optimum(scenario, cluster, moment, scenario.batch(t))
        if before is not None:
            path += np.sqrt(np.sum((best - before) ** 2, axis=-1))
        np.maximum(steepest, cluster.global_batch * moment.slope.max(-1), out=steepest)
        whole_cluster &= moment.everybody
        for player in players.values():
            player.round(t, moment, coming)
        if progress is not None:
            progress(t + 1, scenario.rounds)
    played = {name: player.played() for name, player in players.items()}
    return Outcome(scenario, played, oracle, path, steepest, whole_cluster)


def _optimum(scenario: Scenario, cluster: Cluster, moment: Moment, batch: int) -> tuple[Array, Array]:
    """Seconds of the round at best, (R,), and the best fractions, (R, n)."""
    least, most = bounds(cluster, moment.present & ~moment.stopped)
    full = cluster.global_batch
    loads = water_level(moment.costs, batch, least * batch, most * full).loads
    shares = loads / batch
    if not scenario.fractional:
        whole = whole_samples(moment.costs, batch, np.ceil(least * full - 1e-9), np.floor(most * full + 1e-9))
        loads = whole.astype(float)
    # Not the water's level: an idle worker still has its overhead, which no division can avoid.
    return _latency(scenario, moment, _seconds(moment, loads)), shares


def _seconds(moment: Moment, loads: Array) -> Array:
    """Seconds of each worker, NaN for the absent and for who stopped."""
    seconds = moment.costs.seconds(loads)
    return seconds if moment.everybody else np.where(moment.present & ~moment.stopped, seconds, np.nan)


def _latency(scenario: Scenario, moment: Moment, seconds: Array) -> Array:
    """Seconds of the round, (R,), from those of each worker."""
    if moment.everybody:
        return seconds.max(-1)
    slowest = np.nanmax(seconds, axis=-1)  # nobody is told who stops, so nobody can avoid the wait
    return np.where(moment.stopped.any(-1), np.maximum(slowest, scenario.give_up_seconds), slowest)


class _Player:
    """One policy in the middle of a simulation."""

    def __init__(self, scenario: Scenario, cluster: Cluster, policy: Policy[Any]) -> None:
        rounds, realizations, workers = scenario.rounds, scenario.realizations, scenario.size
        self._scenario, self._cluster, self._policy = scenario, cluster, policy
        began = time.perf_counter()
        plan, self._state = policy.init()
        self._decide = time.perf_counter() - began
        delay = min(scenario.decision_delay, rounds)  # later than the last round is never
        self._plans = deque([plan] * (1 + (0 if policy.needs_upcoming else delay)))
        self._fit = None if scenario.known_overhead else overheads.start(cluster.shape)
        # A plan, its batch, and its whole samples: many policies change theirs but now and then.
        self._whole = np.empty(0), 0, np.empty(0)
        compute, overhead, wait = np.zeros((3, realizations))
        shares, first_shares, first_seconds = np.empty((3, rounds, workers))
        latency, steps = np.empty((2, rounds, realizations))
        parts = compute, overhead, wait, shares, first_shares, first_seconds
        self._played = Played(latency, *parts, 0.0, steps if isinstance(policy, Dolbie) else None)

    def round(self, t: int, moment: Moment, coming: Moment | None) -> None:
        """Play round t, and let the policy decide on the next."""
        plan = self._plans.popleft()
        if self._policy.needs_upcoming and t == 0:
            plan = self._policy.plan(moment.costs, moment.present & ~moment.stopped)  # type: ignore[attr-defined]
        batch = self._scenario.batch(t)
        shares = self._ran(plan, moment, batch)
        # Where the round is run in pieces: each worker's seconds beyond their samples, (R, n), and what they tell.
        pieces: tuple[Array, PieceTimes] | None = None
        if plan.piece_plan is None or np.all(plan.piece_plan.at_once >= 1):
            if moment.stopped.any():  # their samples are lost
                shares = np.where(moment.stopped, 0.0, shares)
            seconds = _seconds(moment, shares * batch)
        else:
            shares, seconds, pieces = self._in_pieces(plan.piece_plan, moment, shares, batch)
        self._record(t, moment, shares, seconds)
        if self._played.steps is not None:
            self._played.steps[t] = self._state.alpha[..., 0]
        if coming is not None:
            happened = self._happened(moment, shares, seconds, batch, coming, pieces)
            began = time.perf_counter()
            plan, self._state = self._policy.step(self._state, happened)
            self._decide += time.perf_counter() - began
            self._plans.append(plan)

    def played(self) -> Played:
        return self._played._replace(decide_seconds=self._decide)

    def _ran(self, plan: Plan, moment: Moment, batch: int) -> Array:
        """Shares that are really run: among those there, in whole samples where asked for."""
        cluster, full = self._cluster, self._cluster.global_batch
        shares = plan.shares
        least, most = bounds(cluster, moment.present)
        everybody = bool(moment.present.all())
        if not everybody:
            shares = among_present(cluster, moment.present, shares)
        if not self._scenario.fractional or plan.piece_plan is not None:
            if everybody and plan.costs is None:
                if self._whole[1] != batch or not np.array_equal(self._whole[0], shares):
                    loads = whole_samples(plan, batch, cluster.least, cluster.most)
                    self._whole = shares, batch, loads / batch
                return self._whole[2]
            if not everybody:
                costs = None if plan.costs is None else Only(plan.costs, moment.present)
                plan = Plan(shares, costs=costs)
            least, most = np.ceil(least * full - 1e-9), np.floor(most * full + 1e-9)
            shares = whole_samples(plan, batch, least, most) / batch
        return shares

    def _in_pieces(
        self, piece_plan: PiecePlan, moment: Moment, shares: Array, batch: int
    ) -> tuple[Array, Array, tuple[Array, PieceTimes]]:
        """(shares run, seconds, its pieces) of a round whose work moves within it."""
        here = moment.present & ~moment.stopped
        loads = np.rint(shares * batch).astype(np.int64)
        piece = self._scenario.piece_seconds  # what it does cost, whatever the policy believes
        missed = self._scenario.give_up_seconds
        ran = play(piece_plan, loads, moment.slope, moment.overhead, piece, moment.knee, here, missed=missed)
        # What a single piece costs is in the round's overhead, for this policy as for the others.
        further = np.maximum(ran.pieces - 1, 0) * piece + ran.idle
        seconds: Array = ran.seconds - np.where(ran.pieces > 0, piece, 0.0)
        times = PieceTimes(np.full_like(seconds, piece), ran.expected, ran.strayed)
        seconds = seconds if moment.everybody else np.where(here, seconds, np.nan)
        return ran.loads / batch, seconds, (further, times)

    def _record(self, t: int, moment: Moment, shares: Array, seconds: Array) -> None:
        latency = _latency(self._scenario, moment, seconds)
        here, played = moment.present & ~moment.stopped, self._played
        busy = seconds.sum(-1) if moment.everybody else np.nansum(seconds, axis=-1)
        overhead = np.where(here, moment.overhead, 0.0).sum(-1)
        played.latency[t] = latency
        played.overhead[:] += overhead
        played.compute[:] += busy - overhead
        played.wait[:] += here.sum(-1) * latency - busy
        played.shares[t] = shares.mean(0)
        played.first_shares[t] = np.where(here[0], shares[0], np.nan)
        played.first_seconds[t] = seconds[0]

    def _happened(
        self,
        moment: Moment,
        shares: Array,
        seconds: Array,
        batch: int,
        coming: Moment,
        pieces: tuple[Array, PieceTimes] | None,
    ) -> Round:
        overhead, costs = moment.overhead, moment.costs
        if pieces is not None:  # loads that follow the speeds within the round tell nothing of overhead
            further, times = pieces
            known = overhead + further if self._fit is None else further
            return Round(shares, seconds, batch, known, pieces=times)
        if self._fit is not None:
            self._fit = overheads.update(self._fit, shares * batch, seconds)
            overhead = overheads.certain(self._fit)
        revealed = costs if self._fit is None else None
        if not self._policy.needs_upcoming:
            return Round(shares, seconds, batch, overhead, costs=revealed)
        # Who knows what comes knows who comes, too.
        present = coming.present & ~coming.stopped
        return Round(shares, seconds, batch, overhead, present, revealed, coming.costs)
