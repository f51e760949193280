"""Bulk-synchronous rounds on a virtual clock: every policy on the same rounds, all realizations at once.

In each round, every policy's plan is played, the slowest worker sets the time, and the result is reported to the
policy. Memory grows with n x R and with T x R, never with T x R x n.
"""

from __future__ import annotations

import dataclasses
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

    costs: seconds of any load; any load is impossible for absent workers.
    overhead: the part that does not grow with the load. slope: seconds per sample; both finite.
    knee: samples below which a load takes no less time.
    present: the workers present when the round begins. stopped: those of them that stop without notice before its
    end; here: those that do not.
    """

    costs: Cost
    slope: Array
    overhead: Array
    knee: Array
    present: NDArray[np.bool_]
    stopped: NDArray[np.bool_]
    here: NDArray[np.bool_]


def moments(scenario: Scenario) -> Iterator[Moment]:
    """All rounds, each with all of its realizations at once.

    Raises PacelineError if the timing models draw seconds out of range (``costs.SPAN``).
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
    for index in range(scenario.rounds):
        with np.errstate(over="ignore", invalid="ignore"):  # checked below
            slope, overhead = next(slopes), next(overheads)
            if noise.any():
                slope = slope * np.exp(noise * noising.standard_normal(shape))
            transfer = [each.link.seconds(index) if each.link else 0.0 for each in classes]
            overhead = overhead + np.array(transfer)[of]
        _check(slope, index, "seconds_per_sample", costs.LEAST)
        _check(overhead, index, "overhead", 0.0)
        member, stops = scenario.members(index)
        present = np.broadcast_to(member, shape) & ~np.isnan(slope) & ~np.isnan(overhead)
        stopped = present & stops
        slope, overhead = np.where(present, slope, 1.0), np.where(present, overhead, 0.0)
        cost: Cost = Saturating(slope, overhead, knee, most) if saturating else Linear(slope, overhead)
        if not (here := present & ~stopped).all():
            cost = Only(cost, here)
        yield Moment(cost, slope, overhead, knee, present, stopped, here)


def _check(seconds: Array, index: int, name: str, least: float) -> None:
    """Raise PacelineError for drawn seconds out of range; NaN, for an absent worker, is allowed."""
    wrong = (seconds < least) | (seconds > costs.MOST)
    if wrong.any():
        worker = int(np.argwhere(wrong)[0][-1])
        span = costs.SPAN if least else costs.SPAN_0
        raise PacelineError(
            f"{name} of worker {worker} in round {index + 1} is drawn as {seconds[wrong].ravel()[0]:.3g} seconds; "
            f"expected {span}: give its timing model a smaller spread"
        )


class Played(NamedTuple):
    """The rounds under one policy; T rounds, R realizations, n workers.

    Attributes:
        latency: Seconds of each round, shape (T, R).
        compute: Seconds of all workers in all rounds on samples, shape (R,).
        overhead: Seconds of all workers on overhead that does not grow with the samples, shape (R,).
        wait: Seconds of all workers waiting for the slowest, shape (R,).
        shares: Mean over the realizations, shape (T, n).
        first_shares: Of the first realization, shape (T, n); NaN if a worker was absent.
        first_seconds: Of the first realization, shape (T, n); NaN if a worker was absent.
        decide_seconds: Seconds spent in the policy, over all realizations.
        steps: The steps that DOLBIE took after each round, alpha_t, shape (T, R); None for other policies.
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
    """All policies' rounds, and the oracle's seconds for the same rounds.

    Attributes:
        scenario: What was simulated.
        policies: The rounds under each policy, by its name.
        oracle: Least possible seconds of each round, shape (T, R), with fractions if the scenario has them, otherwise
            with whole samples.
        path: P_T, the length of the fractional optimum's path, shape (R,).
        steepest: The largest seconds of a full batch on one worker beyond its overhead, shape (R,): a Lipschitz
            constant of every round's time in the shares.
        whole_cluster: Whether all workers were present in all rounds.
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
    """Simulate the scenario under each named policy (``name:key=value,...``): DOLBIE, eqs. (1) to (3).

    Args:
        scenario: The workers and their rounds.
        names: Policies to simulate, one or more.
        progress: Called after each round with the number of rounds done and of all rounds.

    Returns:
        The rounds under each policy, and the oracle's.

    Raises:
        PacelineError: For a name or option that does not exist, no name, or a scenario with [samples].
    """
    if not names:
        raise PacelineError(f"no policy named; expected one or more of {', '.join(policies.names())}")
    if scenario.samples is not None:
        raise PacelineError(
            "the scenario has [samples], which only paceline.simulate.dealt.run supports; leave them out"
        )
    cluster = scenario.cluster()
    players = {
        name: _Player(scenario, cluster, policies.create(name, cluster)) for name in dict.fromkeys(names)
    }
    oracle = np.empty((scenario.rounds, scenario.realizations))
    path, steepest = np.zeros(scenario.realizations), np.zeros(scenario.realizations)
    whole_cluster = True
    best: Array | None = None  # best fractions of the previous round
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
        whole_cluster &= bool(moment.here.all())
        for player in players.values():
            player.round(t, moment, coming)
        if progress is not None:
            progress(t + 1, scenario.rounds)
    played = {
        name: each.played._replace(decide_seconds=each.decide_seconds) for name, each in players.items()
    }
    return Outcome(scenario, played, oracle, path, steepest, whole_cluster)


def _optimum(scenario: Scenario, cluster: Cluster, moment: Moment, batch: int) -> tuple[Array, Array]:
    """Least possible seconds of the round, (R,), and the best fractions, (R, n)."""
    least, most = bounds(cluster, moment.here)
    loads = water_level(moment.costs, batch, least * batch, most * cluster.global_batch).loads
    shares = loads / batch
    if not scenario.fractional:
        loads = _whole(moment.costs, cluster, moment.here, batch)
    # Not the water level: an idle worker still has its overhead, which no division can avoid.
    return _latency(scenario, moment, _seconds(moment, loads)), shares


def _whole(expected: Plan | Cost, cluster: Cluster, here: NDArray[np.bool_], batch: int) -> Array:
    """Whole samples of each worker, as floats, within the limits of the workers that are here."""
    least, most = (share * cluster.global_batch for share in bounds(cluster, here))
    return whole_samples(expected, batch, np.ceil(least - 1e-9), np.floor(most + 1e-9)).astype(float)


def _seconds(moment: Moment, loads: Array) -> Array:
    """Seconds of each worker; NaN if it is absent or stopped."""
    return np.where(moment.here, moment.costs.seconds(loads), np.nan)


def _latency(scenario: Scenario, moment: Moment, seconds: Array) -> Array:
    """Seconds of the round, (R,), from those of each worker."""
    slowest = np.nanmax(seconds, axis=-1)  # no policy knows which worker stops, so none can avoid the wait
    return np.where(moment.stopped.any(-1), np.maximum(slowest, scenario.give_up_seconds), slowest)


class _Player:
    """One policy and its state in a simulation."""

    def __init__(self, scenario: Scenario, cluster: Cluster, policy: Policy[Any]) -> None:
        rounds, realizations, workers = scenario.rounds, scenario.realizations, scenario.size
        self._scenario, self._cluster, self._policy = scenario, cluster, policy
        began = time.perf_counter()
        plan, self._state = policy.init()
        self.decide_seconds = time.perf_counter() - began
        delay = min(scenario.decision_delay, rounds)  # a plan after the last round is never used
        self._plans = deque([plan] * (1 + (0 if policy.needs_upcoming else delay)))
        self._fit = None if scenario.known_overhead else overheads.start(cluster.shape)
        compute, overhead, wait = np.zeros((3, realizations))
        shares, first_shares, first_seconds = np.empty((3, rounds, workers))
        latency, steps = np.empty((2, rounds, realizations))
        parts = compute, overhead, wait, shares, first_shares, first_seconds
        self.played = Played(latency, *parts, 0.0, steps if isinstance(policy, Dolbie) else None)

    def round(self, t: int, moment: Moment, coming: Moment | None) -> None:
        """Play round t, and let the policy plan the next."""
        plan, batch = self._plans.popleft(), self._scenario.batch(t)
        if self._policy.needs_upcoming and t == 0:
            plan = self._policy.plan(moment.costs, moment.here)  # type: ignore[attr-defined]
        shares = self._ran(plan, moment, batch)
        overhead, costs, times = moment.overhead, moment.costs if self._fit is None else None, None
        if plan.piece_plan is None or np.all(plan.piece_plan.at_once >= 1):
            if moment.stopped.any():  # their samples are lost
                shares = np.where(moment.stopped, 0.0, shares)
            seconds = _seconds(moment, shares * batch)
            if self._fit is not None:
                self._fit = overheads.update(self._fit, shares * batch, seconds)
                overhead = overheads.certain(self._fit)
        else:  # overhead cannot be estimated from loads that follow the speeds within the round
            shares, seconds, further, times = self._in_pieces(plan.piece_plan, moment, shares, batch)
            overhead, costs = further if self._fit is not None else overhead + further, None
        self._record(t, moment, shares, seconds)
        if coming is not None:
            # A policy that knows the coming costs also knows the coming workers.
            here, upcoming = (coming.here, coming.costs) if self._policy.needs_upcoming else (None, None)
            happened = Round(shares, seconds, batch, overhead, here, costs, upcoming, pieces=times)  # type: ignore[arg-type]
            began = time.perf_counter()
            plan, self._state = self._policy.step(self._state, happened)
            self.decide_seconds += time.perf_counter() - began
            self._state = self._policy.train(self._state)  # in training, the next round runs meanwhile
            self._plans.append(plan)
        if self.played.steps is not None:  # after the last round, the largest step that may be taken
            self.played.steps[t] = (self._state.alpha if coming is None else self._state.step)[..., 0]

    def _ran(self, plan: Plan, moment: Moment, batch: int) -> Array:
        """The shares to run: among the present workers, and in whole samples unless the scenario has fractions."""
        if not moment.present.all():
            costs = None if plan.costs is None else Only(plan.costs, moment.present)
            shares = among_present(self._cluster, moment.present, plan.shares)
            plan = dataclasses.replace(plan, shares=shares, costs=costs)
        if self._scenario.fractional and plan.piece_plan is None:
            return plan.shares
        return _whole(plan, self._cluster, moment.present, batch) / batch

    def _in_pieces(
        self, piece_plan: PiecePlan, moment: Moment, shares: Array, batch: int
    ) -> tuple[Array, Array, Array, PieceTimes]:
        """(shares run, seconds, seconds beyond the samples, times of its pieces) of a round whose work moves."""
        loads = np.rint(shares * batch).astype(np.int64)
        piece = self._scenario.piece_seconds  # the real cost of a piece, which the policy only estimates
        missed = self._scenario.give_up_seconds
        ran = play(
            piece_plan, loads, moment.slope, moment.overhead, piece, moment.knee, moment.here, missed=missed
        )
        # The cost of the first piece is in the round's overhead, for this policy as for the others.
        further = np.maximum(ran.pieces - 1, 0) * piece + ran.idle
        seconds: Array = ran.seconds - np.where(ran.pieces > 0, piece, 0.0)
        times = PieceTimes(np.full_like(seconds, piece), ran.expected, ran.strayed, ran.pace)
        return ran.loads / batch, np.where(moment.here, seconds, np.nan), further, times

    def _record(self, t: int, moment: Moment, shares: Array, seconds: Array) -> None:
        latency = _latency(self._scenario, moment, seconds)
        here, played = moment.here, self.played
        busy = np.nansum(seconds, axis=-1)
        overhead = np.where(here, moment.overhead, 0.0).sum(-1)
        played.latency[t] = latency
        played.overhead[:] += overhead
        played.compute[:] += busy - overhead
        played.wait[:] += here.sum(-1) * latency - busy
        played.shares[t] = shares.mean(0)
        played.first_shares[t] = np.where(here[0], shares[0], np.nan)
        played.first_seconds[t] = seconds[0]
