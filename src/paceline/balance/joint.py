"""``joint``: shares, and how many gradients to wait for, chosen together by what an update gains per second.

An update from S samples lowers the loss, at the best rate for it, in proportion to S / (S + s); s is the gradient's
noise scale: its variance from a single sample over its squared norm (DBW's eqs. (7) to (9) and (16) at that rate, as
in ``dbw:worth=noise``, for gradients of different numbers of samples). For each k, the candidates are the shares of
``level``, and, for k < n, those with which each worker ends by the common level with probability k / n, given how its
recent seconds deviated from the expected ones. Each pair of k and shares is simulated with these recent seconds, and
the best is chosen. The unknown seconds of an interrupted worker are set to the mean of its recent longer ones.

Without a noise scale, as in engines that cannot leave gradients out, and in the first rounds, it plans as ``level``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from paceline.balance.level import Level, LevelState
from paceline.balance.members import bounds
from paceline.balance.protocol import Policy
from paceline.costs import Linear
from paceline.forecast.portable_math import log
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import water_level

RECENT, FEWEST = 32, 4  # rounds whose deviations are kept, and the fewest with which they are used
REPLICAS = 4
TRIED = 16  # the most values of k that are tried
WORTH = 1.02  # factor by which another choice must gain more than waiting for all


class JointState(NamedTuple):
    level: LevelState
    strays: Array  # logarithms of seconds over expected ones, newest last, NaN if there were fewer; (..., n, RECENT)


@dataclass(frozen=True)
class Joint(Policy[JointState]):
    """Shares and the number of gradients to wait for, chosen together; `level` if no gradient may be lost.

    Args:
        cluster: The workers and their limits.
        mode: What late workers do, see ``sync.MODES``; the parameter server sets it itself.
    """

    cluster: Cluster
    mode: Literal["push-wait", "push-interrupt", "pull"] = "push-wait"
    needs_noise: ClassVar[bool] = True

    def init(self) -> tuple[Plan, JointState]:
        shape = self.cluster.shape
        plan, level = Level(self.cluster).init()
        return plan, JointState(level, np.full((*shape, RECENT), np.nan))

    def step(self, state: JointState, round: Round) -> tuple[Plan, JointState]:
        before = Linear(state.level.expected, state.level.overhead)
        plan, level = Level(self.cluster).step(state.level, round)
        state = JointState(level, _strays(state, before, round, self.mode == "push-interrupt"))
        here = np.flatnonzero(round.present) if not self.cluster.realizations else np.zeros(0, int)
        known = np.isfinite(state.strays[here]).sum(-1).min(initial=RECENT)
        noise_scale = np.nan if round.gradients is None else round.gradients.noise_scale
        if len(here) < 2 or known < FEWEST or np.isnan(noise_scale):
            return plan, state
        strays = state.strays[here][:, RECENT - known :]
        costs = Linear(level.expected[here], level.overhead[here])
        limits = bounds(self.cluster, round.present)
        least, most = (np.broadcast_to(each, round.shares.shape)[here] for each in limits)
        batch, n = self.cluster.global_batch, len(here)
        # Each replica combines the workers' deviations of different rounds.
        turned = [[np.roll(mine, r * i) for i, mine in enumerate(strays)] for r in range(REPLICAS)]
        factors = np.exp(np.array(turned)).transpose(2, 0, 1)
        best, quorum, shares = 0.0, n, plan.shares[here]
        for k in np.unique(np.linspace(n, 1, min(n, TRIED)).round().astype(int))[::-1]:
            divisions = [plan.shares[here] * batch]
            if k < n:
                slower = np.exp(np.quantile(strays, k / n, axis=-1))
                aimed = Linear(costs.seconds_per_sample * slower, costs.overhead * slower)
                divisions.append(water_level(aimed, batch, least * batch, most * batch).loads)
            for loads in divisions:
                seconds = costs.seconds(loads) * factors
                gain = gain_a_second(seconds, loads, int(k), noise_scale, self.mode == "push-interrupt")
                if gain > best * (WORTH if quorum == n else 1.0):
                    best, quorum, shares = gain, int(k), loads / batch
        if quorum == n:
            return plan, state
        planned = np.zeros_like(plan.shares)
        planned[here] = shares
        return Plan(planned, quorum=quorum), state


def gain_a_second(seconds: Array, loads: Array, k: int, noise_scale: float, interrupts: bool) -> float:
    """What updates that wait for k gradients gain per second.

    seconds: of each worker's successive tasks, (tasks, replicas, n). loads: samples of a task, (n,).
    interrupts: late workers begin again at once; otherwise they finish their task first.
    """
    ready, now = np.zeros(seconds.shape[1:]), np.zeros(seconds.shape[1])
    begun, gain, skipped = now, 0.0, len(seconds) // 4
    for task, took in enumerate(seconds):
        done = ready + took
        first = np.argpartition(done, k - 1, axis=-1)[:, :k]
        update = np.take_along_axis(done, first[:, k - 1 :], -1)
        if task >= skipped:
            samples = loads[first].sum(-1)
            gain += float((samples / (samples + noise_scale)).mean())
        else:
            begun = update[:, 0]
        if interrupts:
            ready = np.broadcast_to(update, ready.shape)
        else:
            ready = np.where(done <= update, update, np.where(ready < update, done, ready))
        now = update[:, 0]
    return gain / float((now - begun).mean())


def _strays(state: JointState, expected: Linear, round: Round, interrupts: bool) -> Array:
    """The strays, with this round's added; for a worker that was interrupted when the others had ended, the mean of
    its longer ones."""
    ran = round.present & (round.loads > 0)
    late = np.zeros_like(ran) if round.gradients is None else ran & round.gradients.late
    ended = np.where(ran & ~late, round.seconds, -np.inf).max(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        stray = log(np.where(late, ended, round.seconds) / expected.seconds(round.loads))
    later = state.strays > stray[..., None]
    usual = np.where(later, state.strays, 0.0).sum(-1) / np.maximum(later.sum(-1), 1)
    stray = np.where(late & later.any(-1), usual, stray)
    pushed = np.concatenate([state.strays[..., 1:], stray[..., None]], axis=-1)
    keep = ran & (interrupts | ~late) & np.isfinite(stray)  # without interrupts the late one still runs
    return np.where(keep[..., None], pushed, state.strays)
