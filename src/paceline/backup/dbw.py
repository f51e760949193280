"""``dbw`` and ``blind``: as many gradients as lower the loss most per second (Xu, Neglia, Sebastianelli 2021).

k_t = argmax G_k / T_k, eq. (18), with the gain of an update from k gradients, eqs. (10) to (16), and its time
(``arrival_times``); at least one more than before if the loss has risen, eq. (19); all if no k promises a gain. Of
several k with the same G_k / T_k, the largest is taken: it costs no time.

A single gradient gives no estimate, eq. (10). If the last D - 1 updates were from single gradients, the next one
waits for two at least, so that the means of eqs. (13) to (15) never lose their last estimate.

DBW models arrivals by their place alone, the same for all workers. If some workers are always slow, or the cluster
has just changed, each worker's own recent round trips say more, and are used in a simulation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from paceline.backup import arrival_times
from paceline.backup.arrival_times import TimesState
from paceline.backup.protocol import Backup, Iteration, Timings
from paceline.errors import number, whole
from paceline.rounds import Array

RECENT = 12  # round trips of each worker that times="workers" uses
TIE = 1e-9  # part of the largest gain per second within which gains per second are equal
REPLICAS, SKIPPED, PLAYED = 6, 6, 12  # simulated clusters; iterations that are skipped, and counted


class GainState(NamedTuple):
    """The estimates after the last D updates, newest last, NaN for missing ones (eq. (10) needs two gradients)."""

    variance: Array  # V+, eq. (10)
    norm2: Array  # N+, eq. (11)
    smoothness: Array  # L+, eq. (12)
    loss: float  # F of the last iteration; NaN before the first
    spread: float  # V+ / k of the last iteration, 0 if unknown
    rate: float  # learning rate of the last iteration's update


class Gain(NamedTuple):
    """Averages over the last D iterations; NaN before the first estimate (DBW, eqs. (13) to (15))."""

    variance: float
    norm2: float
    smoothness: float

    def of(self, k: Array, rate: float | Array) -> Array:
        """Expected decrease of the loss by k gradients; shape as k (DBW, eqs. (7) to (9), (16)).

        rate: the learning rate of the update, or one for each k.
        """
        bend = 0.5 * self.smoothness * rate**2
        return (rate - bend) * self.norm2 - bend * self.variance / k


def no_gain(depth: int) -> GainState:
    """The state without estimates. depth: D."""
    nothing = np.full(depth, np.nan)
    return GainState(nothing, nothing, nothing, np.nan, 0.0, np.nan)


def update_gain(state: GainState, happened: Iteration) -> GainState:
    """The state after one more iteration (DBW, eqs. (10) to (12)).

    L+ compares the loss with that of the iteration before, so it is known one iteration later. The decrease and the
    rate are those of the update before.
    """
    k = happened.quorum
    spread = happened.variance / k if np.isfinite(happened.variance) else 0.0
    norm2 = max(happened.norm2 - spread, 0.0) if np.isfinite(happened.variance) else np.nan
    smoothness = np.nan
    before = state.norm2[-1]
    bottom = state.rate**2 * (before + state.spread)
    if np.isfinite(state.loss) and np.isfinite(before) and bottom > 0:
        decrease = state.loss - happened.loss
        smoothness = 2.0 * (state.rate * before - decrease) / bottom
    return GainState(
        _pushed(state.variance, happened.variance),
        _pushed(state.norm2, norm2),
        _pushed(state.smoothness, smoothness),
        happened.loss,
        spread,
        happened.rate,
    )


def estimate(state: GainState) -> Gain:
    """The estimates for the next iteration (DBW, eqs. (13) to (15)).

    The loss is measured on samples, so about half of the single L+ are negative. Their average is cut off at 0
    (with a negative one the gain would fall with k); cutting off each of them would bias it upwards.
    """
    return Gain(_mean(state.variance), _mean(state.norm2), np.maximum(_mean(state.smoothness), 0.0))


def fewest(state: GainState) -> int:
    """The fewest gradients of the next update: two if the last D - 1 updates were from one each, so that at least one
    estimate is left in the means of D (DBW, eqs. (10), (13))."""
    return 2 if np.isnan(state.variance[1:]).all() else 1


def _pushed(values: Array, newest: float) -> Array:
    return np.append(values[1:], newest)


def _mean(values: Array) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else np.nan


class TripsState(NamedTuple):
    """The last M round trips of each worker, newest last, NaN if there were fewer; shape (n, M)."""

    seconds: Array
    steps: int


def no_trips(workers: int, memory: int) -> TripsState:
    """The state without round trips. memory: M."""
    return TripsState(np.full((workers, memory), np.nan), 0)


def update_trips(state: TripsState, timings: Timings) -> TripsState:
    """The state with these round trips added."""
    seconds = state.seconds.copy()
    for worker, trip in zip(timings.worker, timings.trip, strict=True):
        if worker < len(seconds) and np.isfinite(trip):
            seconds[worker, :-1] = seconds[worker, 1:]
            seconds[worker, -1] = trip
    return TripsState(seconds, state.steps + 1)


def expected_seconds(state: TripsState, mode: str) -> Array:
    """Mean seconds of an iteration that waits for k = 1..n gradients, shape (n,), if all iterations wait for k.

    Late workers finish their task before they begin again ("push-wait", "pull"), or begin at once
    ("push-interrupt"). Draws depend on the number of steps alone, so that replicas agree.
    """
    n = len(state.seconds)
    known = ~np.isnan(state.seconds)
    if not known.any():
        return np.zeros(n)
    drawn = _draws(state, known)
    wanted = np.arange(n)[:, None]
    ready = np.zeros((n, REPLICAS, n))  # when each worker can begin: first axis k - 1
    now = np.zeros((n, REPLICAS))
    began = now
    for step in range(SKIPPED + PLAYED):
        if step == SKIPPED:
            began = now
        done = ready + drawn[step]
        now = np.take_along_axis(np.sort(done, axis=-1), wanted[:, :, None].repeat(REPLICAS, 1), -1)[..., 0]
        update_at = now[..., None]
        if mode == "push-interrupt":
            ready = np.broadcast_to(update_at, ready.shape)
        else:
            ready = np.where(done <= update_at, update_at, np.where(ready < update_at, done, ready))
    return (now - began).mean(-1) / PLAYED


def _draws(state: TripsState, known: np.ndarray) -> Array:
    """Round trips drawn from each worker's own, shape (steps, REPLICAS, n); from all for workers without any."""
    rng = np.random.default_rng(state.steps)
    pooled = state.seconds[known]
    columns = []
    for trips, mine in zip(state.seconds, known, strict=True):
        pool = trips[mine] if mine.any() else pooled
        columns.append(pool[rng.integers(len(pool), size=(SKIPPED + PLAYED, REPLICAS))])
    return np.stack(columns, -1)


class DbwState(NamedTuple):
    gain: GainState
    times: TimesState
    trips: TripsState


@dataclass(frozen=True)
class Dbw(Backup[DbwState]):
    """Waits for as many gradients as promise the largest decrease of the loss per second (DBW, eqs. (18), (19)).

    Args:
        workers: Number of workers, n.
        mode: How parameters reach the workers: "push-wait", "push-interrupt" or "pull".
        depth: D, iterations over which estimates are averaged.
        beta: A loss that grew by this factor requires one gradient more.
        times: "constrained" solves eq. (17); "naive" takes the plain means; "workers" models each worker's own round
            trips, for clusters whose workers differ.
        memory: Factor on the weight of a time sample after each iteration, for "constrained" and "naive".
        worth: "smoothness" is eq. (16), whose L comes from differences of noisy losses; "noise" does not use the
            losses: N / (1 + V / (k N)), the gain of an update from k gradients at the best rate for it.
    """

    workers: int
    mode: str = "push-wait"
    depth: int = 5
    beta: float = 1.01
    times: Literal["constrained", "naive", "workers"] = "constrained"
    memory: float = 1.0
    worth: Literal["smoothness", "noise"] = "smoothness"
    needs_variance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        name = type(self).__name__.lower()
        whole(f"{name}: depth", self.depth)
        number(f"{name}: beta", self.beta, "1 or more", lambda beta: beta >= 1)
        number(f"{name}: memory", self.memory, "0 < memory <= 1", lambda memory: 0 < memory <= 1)

    def init(self) -> tuple[int, DbwState]:
        n = self.workers
        return n, DbwState(no_gain(self.depth), arrival_times.start(n), no_trips(n, RECENT))

    def step(self, state: DbwState, happened: Iteration) -> tuple[int, DbwState]:
        rose = happened.loss > self.beta * state.gain.loss  # False while there is no loss before
        gains = update_gain(state.gain, happened)
        seconds, times, trips = self._seconds(state, happened)
        state = DbwState(gains, times, trips)

        n = min(self.workers, max(1, happened.present))
        k = np.arange(1, n + 1)
        rate = happened.rate if happened.rates is None else happened.rates[:n]
        worth = self._worth(gains, k.astype(float), rate)
        worth = np.where(np.isnan(seconds[:n]), -np.inf, worth)
        if not np.any(worth > 0):
            return n, state
        with np.errstate(divide="ignore", invalid="ignore"):
            speed = np.where(worth > 0, worth / seconds[:n], -np.inf)
        best = int(k[speed >= speed.max() * (1 - TIE)][-1])
        if rose and happened.quorum < n:
            best = max(best, happened.quorum + 1)
        if self.needs_variance:
            best = max(best, fewest(gains))
        return min(best, n), state

    def _worth(self, gains: GainState, k: Array, rate: float | Array) -> Array:
        """The gain of an update from k gradients; NaN as long as nothing is known, and then all are waited for."""
        found = estimate(gains)
        if self.worth == "noise":
            return found.norm2**2 / (found.norm2 + found.variance / k)
        return found.of(k, rate)

    def _seconds(self, state: DbwState, happened: Iteration) -> tuple[Array, TimesState, TripsState]:
        if self.times == "workers":
            trips = update_trips(state.trips, happened.timings)
            return expected_seconds(trips, self.mode), state.times, trips
        times = arrival_times.update(state.times, happened.timings, self.memory)
        if self.times == "naive":
            return arrival_times.naive(times), times, state.trips
        return arrival_times.constrained(times), times, state.trips


@dataclass(frozen=True)
class Blind(Dbw):
    """Maximizes the gradients per second, whatever their gain (G_k = k: DBW, baseline B-DBW).

    Its options are those of ``Dbw``.
    """

    needs_variance: ClassVar[bool] = False

    def _worth(self, gains: GainState, k: Array, rate: float | Array) -> Array:
        return k
