"""``wlbs``: a first division by the sizes of the machines, then pairwise adjustment (WLBS, of Zhu et al. 2022).

Every few rounds the quickest worker takes over so much from the slowest that both take equally long:
whole micro-batches within an epoch (small adjustment), single samples at its end (major adjustment). Both go by the
rounds since the last adjustment of either kind. The paper leaves the amounts open; these equalise the pair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.members import among_present, carried, even, slowest
from paceline.balance.protocol import Policy
from paceline.errors import number, whole
from paceline.rounds import Array, Cluster, Machines, Plan, Round


class Cycle(NamedTuple):
    """Sums of the measurements since the last adjustment of either kind, (..., n), and its age in rounds, ()."""

    seconds: Array
    loads: Array
    reports: Array
    age: NDArray[np.int64]


class WlbsState(NamedTuple):
    loads: Array  # samples of a full batch, (..., n)
    cycle: Cycle
    epoch: NDArray[np.int64]  # rounds since the last major adjustment, ()


@dataclass(frozen=True)
class Wlbs(Policy[WlbsState]):
    """WLBS: a start by CPU count, cores and memory, then the quickest takes over work of the slowest, pair by pair.

    Args:
        cluster: The workers and their limits.
        micro: Samples in a micro-batch; a small adjustment moves whole ones; 0 takes a sixteenth of an equal share.
        period: Rounds between small adjustments.
        epoch: Rounds between major ones; 0 makes none.
        theta: Spread of the workers' mean times, as a part of their mean, at which adjusting stops.
    """

    cluster: Cluster
    micro: int = 0
    period: int = 5
    epoch: int = 50
    theta: float = 0.05
    needs_machines: ClassVar[bool] = True

    def __post_init__(self) -> None:
        whole("policy 'wlbs': micro", self.micro, 0, self.cluster.global_batch)
        whole("policy 'wlbs': period", self.period)
        whole("policy 'wlbs': epoch", self.epoch, 0)
        number("policy 'wlbs': theta", self.theta, "0 or more", lambda theta: theta >= 0)

    def init(self) -> tuple[Plan, WlbsState]:
        cluster = self.cluster
        shares = even(cluster)
        if cluster.machines is not None:
            everybody = np.ones(cluster.workers, bool)
            wanted = among_present(cluster, everybody, initial_weights(cluster.machines))
            loads = largest_remainder(wanted * cluster.global_batch, self._micro)
            # Whole micro-batches may exceed a limit; the excess goes to the others.
            shares = np.broadcast_to(among_present(cluster, everybody, loads), cluster.shape)
        loads = shares * cluster.global_batch
        return Plan(np.array(shares)), WlbsState(loads, _begun(cluster), np.asarray(0))

    def step(self, state: WlbsState, round: Round) -> tuple[Plan, WlbsState]:
        cycle, epoch = _measured(state.cycle, round, round.fresh), state.epoch + 1
        loads, major = state.loads, bool(self.epoch) and epoch >= self.epoch
        if major or cycle.age >= self.period:
            # A worker that is present and had no round in this cycle counts by its newest one.
            silent = (cycle.reports == 0) & np.isfinite(round.seconds)
            loads = self._adjusted(loads, _measured(cycle, round, silent), 1 if major else self._micro)
            cycle, epoch = _begun(self.cluster), np.where(major, 0, epoch)
        shares = loads / self.cluster.global_batch
        return Plan(carried(self.cluster, round.present, shares)), WlbsState(loads, cycle, epoch)

    @property
    def _micro(self) -> int:
        sixteenth = self.cluster.global_batch / (16 * self.cluster.workers)
        return self.micro or max(1, int(sixteenth + 0.5))

    def _adjusted(self, loads: Array, cycle: Cycle, unit: int) -> Array:
        """Moves so many whole units that the worst and the best take equally long (WLBS, section 3.2 (adjustments),
        section 3.2 (stop), section 3.2 (dead node))."""
        reported = cycle.reports > 0
        seconds = np.where(reported, cycle.seconds / np.maximum(cycle.reports, 1), np.nan)
        with np.errstate(invalid="ignore", divide="ignore"):
            rates = np.where(cycle.loads > 0, cycle.loads / cycle.seconds, np.nan)
            # Of the present load: a round may have been short, or begun before the last adjustment.
            seconds = np.where(rates > 0, loads / rates, seconds)
        best = slowest(np.where(reported, -seconds, -np.inf))
        dead = ~reported & (loads > self.cluster.least) & reported.any(-1, keepdims=True)
        # A worker that did not report for a whole cycle is the worst, and gives up its whole load.
        worst = slowest(np.where(reported, seconds, np.where(dead, np.inf, -np.inf)))
        low = np.broadcast_to(self.cluster.least, loads.shape)
        high = np.broadcast_to(self.cluster.most, loads.shape)

        (t_i, t_j), (w_i, w_j) = _pair(seconds, best, worst), _pair(loads, best, worst)
        r_i, r_j = _pair(np.where(rates > 0, rates, _mean(rates)), best, worst)
        with np.errstate(invalid="ignore", divide="ignore"):
            amount = np.floor((w_j * r_i - w_i * r_j) / (r_i + r_j) / unit + 0.5) * unit
            uneven = t_j - t_i > self.theta * _mean(seconds)
        gone = np.take_along_axis(dead, worst, -1)
        amount = np.where(gone, np.inf, np.where(uneven, np.nan_to_num(amount), 0.0))
        room = np.minimum(w_j - _pair(low, best, worst)[1], _pair(high, best, worst)[0] - w_i)
        cut = np.where(gone, room, np.floor(room / unit) * unit)
        amount = np.where(best == worst, 0.0, np.clip(np.minimum(amount, cut), 0.0, None))
        moved = np.array(loads)
        np.put_along_axis(moved, worst, w_j - amount, -1)
        np.put_along_axis(moved, best, w_i + np.where(best == worst, 0.0, amount), -1)
        return moved


def initial_weights(machines: Machines) -> Array:
    """Mean portions of the CPUs, cores and memory; shape (n,), sum 1 (WLBS, section 3.2 (first division))."""
    portions = [np.asarray(part, float) for part in (machines.cpus, machines.cores, machines.memory)]
    return np.mean([part / part.sum() for part in portions], axis=0)


def largest_remainder(loads: Array, unit: int) -> Array:
    """Loads (n,) in whole units, the rest to the largest remainders; what is less than a unit to the largest load."""
    units = np.floor(loads / unit + 1e-9)
    spare = int(np.floor(loads.sum() / unit + 1e-9) - units.sum())
    order = np.argsort(units - loads / unit, kind="stable")
    units[order[:spare]] += 1
    whole = units * unit
    whole[np.argmax(whole)] += loads.sum() - whole.sum()
    return whole


def _begun(cluster: Cluster) -> Cycle:
    nothing = np.zeros(cluster.shape)
    return Cycle(nothing, nothing, nothing, np.asarray(0))


def _measured(cycle: Cycle, round: Round, ran: NDArray[np.bool_]) -> Cycle:
    """The sums with the seconds of those that ``ran``, and one round more."""
    return Cycle(
        cycle.seconds + np.where(ran, round.seconds, 0.0),
        cycle.loads + np.where(ran, round.loads, 0.0),
        cycle.reports + ran,
        cycle.age + 1,
    )


def _pair(values: Array, best: NDArray[np.int64], worst: NDArray[np.int64]) -> tuple[Array, Array]:
    return np.take_along_axis(values, best, -1), np.take_along_axis(values, worst, -1)


def _mean(values: Array) -> Array:
    """Mean over the workers that have a value; 1 if none has."""
    known = np.isfinite(values)
    count = known.sum(-1, keepdims=True)
    mean = np.where(known, values, 0.0).sum(-1, keepdims=True) / np.maximum(count, 1)
    return np.where(count > 0, mean, 1.0)
