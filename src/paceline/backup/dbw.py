"""``dbw`` and ``blind``: as many gradients as lower the loss most a second (Xu, Neglia, Sebastianelli 2021).

k_t = argmax G_k / T_k, eq. (18), with the estimates of ``gain`` and ``arrival_times``; one more than before where
the loss has risen, eq. (19); all where no k promises a gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from paceline.backup import arrival_times, gain, worker_times
from paceline.backup.arrival_times import TimesState
from paceline.backup.gain import GainState
from paceline.backup.protocol import Backup, Iteration
from paceline.backup.worker_times import TripsState
from paceline.errors import PacelineError
from paceline.rounds import Array

RECENT = 12  # round trips of each worker that "workers" looks back on


class DbwState(NamedTuple):
    gain: GainState
    times: TimesState
    trips: TripsState


@dataclass(frozen=True)
class Dbw(Backup[DbwState]):
    """As many gradients as promise the largest decrease of the loss per second.

    depth: D, iterations that estimates are averaged over.
    beta: a loss that grew by this factor asks for one gradient more.
    times: "constrained" solves eq. (17); "naive" takes the plain means; "workers" models each worker's own
        round trips, for clusters whose workers differ.
    memory: what a time sample still counts for after each iteration, for "constrained" and "naive".
    worth: "smoothness" is eq. (16), whose L comes from differences of noisy losses; "noise" does without the
        losses: N / (1 + V / (k N)), what an update from k gradients gains at the best rate for it.
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
        if self.depth < 1 or not self.beta >= 1 or not 0 < self.memory <= 1:
            raise PacelineError(
                f"{type(self).__name__.lower()}: depth={self.depth}, beta={self.beta:g}, memory={self.memory:g}: "
                "expected depth >= 1, beta >= 1 and 0 < memory <= 1"
            )

    def init(self) -> tuple[int, DbwState]:
        n = self.workers
        return n, DbwState(gain.start(self.depth), arrival_times.start(n), worker_times.start(n, RECENT))

    def step(self, state: DbwState, happened: Iteration) -> tuple[int, DbwState]:
        rose = happened.loss > self.beta * state.gain.loss  # False while there is no loss before
        gains = gain.update(state.gain, happened)
        seconds, times, trips = self._seconds(state, happened)
        state = DbwState(gains, times, trips)

        n = min(self.workers, max(1, happened.present))
        k = np.arange(1, n + 1)
        worth = self._worth(gains, k.astype(float), happened.rate)
        worth = np.where(np.isnan(seconds[:n]), -np.inf, worth)
        if not np.any(worth > 0):
            return n, state
        with np.errstate(divide="ignore"):
            best = int(k[np.argmax(np.where(worth > 0, worth / seconds[:n], -np.inf))])
        if rose:
            best = max(best, happened.quorum + 1)
        return min(best, n), state

    def _worth(self, gains: GainState, k: Array, rate: float) -> Array:
        """What an update from k gradients is worth; NaN (all the workers, then) as long as nothing is known."""
        found = gain.estimate(gains)
        if self.worth == "noise":
            return found.norm2**2 / (found.norm2 + found.variance / k)
        return found.of(k, rate)

    def _seconds(self, state: DbwState, happened: Iteration) -> tuple[Array, TimesState, TripsState]:
        if self.times == "workers":
            trips = worker_times.update(state.trips, happened.timings)
            return worker_times.expected(trips, self.mode), state.times, trips
        times = arrival_times.update(state.times, happened.timings, self.memory)
        if self.times == "naive":
            return arrival_times.naive(times), times, state.trips
        seconds, times = arrival_times.constrained(times)
        return seconds, times, state.trips


@dataclass(frozen=True)
class Blind(Dbw):
    """As many gradients as come in per second, blind to what they are worth (B-DBW: G_k = k)."""

    needs_variance: ClassVar[bool] = False

    def _worth(self, gains: GainState, k: Array, rate: float) -> Array:
        return k
