"""``joint``: shares, and how many gradients to wait for, chosen together by what an update gains per second.

An update from S samples lowers the loss, at the best rate for it, in proportion to S / (S + s), where s is the
gradient's noise scale: its variance from a single sample over its squared norm (DBW's eqs. (7) to (9) and (16) at
that rate, as ``dbw:worth=noise`` has them, for gradients of unlike samples). For each k, the shares are those of
``level``, or those with which each worker ends by the common level with probability k / n, as far as its seconds have
strayed from what was expected lately; who waits for all has ``level``'s. Each pair is played forward on these
seconds, and the best is taken. What a worker that was interrupted would have taken is set to what it usually takes
beyond that moment.

Engines that cannot leave gradients out do not tell the noise scale. There, and at first, it is ``level``.
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

RECENT, FEWEST = 32, 4  # rounds that strays are kept of, and from which on they are believed
REPLICAS = 4
TRIED = 16  # numbers of gradients, at most
WORTH = 1.02  # of what waiting for all gains: anything else has to promise more


class JointState(NamedTuple):
    level: LevelState
    strays: Array  # logarithms of seconds over expected ones, newest last, NaN if there were fewer; (..., n, RECENT)


@dataclass(frozen=True)
class Joint(Policy[JointState]):
    """Shares and the number of gradients to wait for, chosen together; `level` where no gradient may be lost.

    mode: what late workers do, as a parameter server has it; it sets this itself.
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
        state = JointState(level, _told(state, before, round, self.mode == "push-interrupt"))
        here = np.flatnonzero(round.present) if not self.cluster.realizations else np.zeros(0, int)
        known = np.isfinite(state.strays[here]).sum(-1).min(initial=RECENT)
        if (
            len(here) < 2
            or known < FEWEST
            or round.gradients is None
            or np.isnan(round.gradients.noise_scale)
        ):
            return plan, state
        strays = state.strays[here][:, RECENT - known :]
        costs = Linear(level.expected[here], level.overhead[here])
        least, most = (
            np.broadcast_to(each, round.shares.shape)[here] for each in bounds(self.cluster, round.present)
        )
        batch, n = self.cluster.global_batch, len(here)
        # Each worker's strays are put beside others' of other rounds, too.
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
                gain = gain_a_second(
                    seconds, loads, int(k), round.gradients.noise_scale, self.mode == "push-interrupt"
                )
                if gain > best * (WORTH if quorum == n else 1.0):
                    best, quorum, shares = gain, int(k), loads / batch
        if quorum == n:
            return plan, state
        planned = np.zeros_like(plan.shares)
        planned[here] = shares
        return Plan(planned, quorum=quorum), state


def gain_a_second(seconds: Array, loads: Array, k: int, noise_scale: float, interrupts: bool) -> float:
    """What updates that wait for k gradients gain per second.

    seconds: of each worker's tasks, one after the other, (tasks, replicas, n). loads: samples of them, (n,).
    interrupts: late workers begin again at once; else they end what they do first.
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


def _told(state: JointState, expected: Linear, round: Round, interrupts: bool) -> Array:
    """The strays with this round's: what a worker that was interrupted when the others had ended would have taken is
    what it usually takes beyond that."""
    ran = round.present & (round.loads > 0)
    late = np.zeros_like(ran) if round.gradients is None else ran & round.gradients.late
    ended = np.where(ran & ~late, round.seconds, -np.inf).max(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        stray = log(np.where(late, ended, round.seconds) / expected.seconds(round.loads))
    later = state.strays > stray[..., None]
    usual = np.where(later, state.strays, 0.0).sum(-1) / np.maximum(later.sum(-1), 1)
    stray = np.where(late & later.any(-1), usual, stray)
    pushed = np.concatenate([state.strays[..., 1:], stray[..., None]], axis=-1)
    keep = ran & (interrupts | ~late) & np.isfinite(stray)  # else the late one has yet to end
    return np.where(keep[..., None], pushed, state.strays)
