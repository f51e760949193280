"""``dolbie``: distributed online load balancing with a step that cannot overshoot (DOLBIE, with a master).

Each round, every worker except the straggler moves part of the way towards the share that it could have run
within the straggler's time (eq. 5); the straggler gives up what they took (eq. 6). The step is small enough
never to take more than the straggler has (eq. 7).

Without a master (Algorithm 2), every worker decides for itself from the numbers that each worker announces: the
paper's two, and the step that its own share allows, which the floor needs.

For two workers eq. (7) is 1 whatever the share (and 0/0 for none), and with a step of 1 the shares alternate.
So two workers count as three: the third one never has any work. The step then shrinks with the straggler's share.

In a round, each worker calls ``announce`` to all others, and ``decide`` once all announcements have arrived; the
straggler calls ``settle`` once all others have sent it their new shares. Only the straggler receives the others'
shares. ``play_round`` delivers the messages within one process and counts them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.balance.members import (
    among_present,
    bounds,
    carried,
    fill_unknown,
    measured_slopes,
    remembered,
    slowest,
)
from paceline.balance.protocol import Policy
from paceline.costs import Cost, Linear
from paceline.errors import PacelineError, number, short, whole
from paceline.rounds import Array, Cluster, Plan, Round
from paceline.shares import proportional

FLOOR = 1e-3  # of an equal share: a straggler with less no longer shrinks the step


class DolbieState(NamedTuple):
    shares: Array  # x_t, (..., n): fractions, not the whole samples that ran
    alpha: Array  # the largest step of the next round, alpha_t, (..., 1)
    step: Array  # the step of the last round, (..., 1); NaN before
    seconds_per_sample: Array  # (..., n), as last measured; NaN before


@dataclass(frozen=True)
class Dolbie(Policy[DolbieState]):
    """Shares move towards what the straggler's time allows (DOLBIE, eqs. (5), (6), section IV-B, Algorithm 1).

    Args:
        cluster: The workers and their limits.
        alpha: The first step alpha_1. By default eq. (7) of the initial shares; a larger one is cut to that, since
            the paper's proof of feasibility starts there. Two workers have the step of three.
        monotone: Steps never grow, as printed. False computes each step again, min(alpha_1, eq. (7)) of the round's
            straggler, so that steps do not fall to 0.
        tight: In place of eq. (7), the exact limit x_s / sum (x'_i - x_i), of which (7) is the worst case.
        floor: Part of an equal share below which a straggler no longer shrinks the step of later rounds. With 0, as
            printed, a straggler that gives away its whole share ends all movement.
        start: The first partition x_1, as one number for each worker with "/" between them ("3/1/1"), of any sum.
            Shares are in proportion to them, within the workers' limits. By default all shares are equal.
    """

    cluster: Cluster
    alpha: float | None = None
    monotone: bool = True
    tight: bool = False
    floor: float = FLOOR
    start: str = ""

    def __post_init__(self) -> None:
        if self.alpha is not None:
            number("policy 'dolbie': alpha", self.alpha, "0 < alpha <= 1", lambda alpha: 0 < alpha <= 1)
        number("policy 'dolbie': floor", self.floor, "0 <= floor <= 1", lambda floor: 0 <= floor <= 1)
        self._first()

    def init(self) -> tuple[Plan, DolbieState]:
        shares = np.array(np.broadcast_to(self._first(), self.cluster.shape))
        alpha = np.full((*self.cluster.realizations, 1), self._first_alpha())
        unknown = np.full_like(shares, np.nan)
        return Plan(shares), DolbieState(shares, alpha, unknown[..., :1], unknown)

    def step(self, state: DolbieState, round: Round) -> tuple[Plan, DolbieState]:
        cluster, present = self.cluster, round.present
        least, most = bounds(cluster, present)
        within = among_present if cluster.limited else carried
        shares = within(cluster, present, state.shares)
        slope = measured_slopes(round, state.seconds_per_sample)
        cost = round.costs or Linear(fill_unknown(slope), round.overhead)

        seconds = np.where(present, round.seconds, -np.inf)
        straggler = slowest(seconds)
        level = np.take_along_axis(seconds, straggler, -1)
        gain = possible_gain(cost, level, shares, most, round.batch, straggler)
        demand = gain.sum(-1, keepdims=True)
        held = np.take_along_axis(shares, straggler, -1)
        spare = held - np.take_along_axis(np.broadcast_to(least, shares.shape), straggler, -1)
        with np.errstate(divide="ignore", invalid="ignore"):
            exact = np.where(demand > 0, spare / demand, 1.0)

        members = present.sum(-1, keepdims=True)
        safe = feasible_step(held, members)
        if self.tight:  # for two workers the exact limit is 1 or more, whatever they hold
            safe = np.where(members > 2, 1.0, safe)
        alpha = state.alpha
        if not self.monotone:
            alpha = np.minimum(self._first_alpha(), exact if self.tight else self._limit(held, members))
        # With limits, a floor, or after a worker has left, alpha may exceed what this straggler has.
        used = np.clip(np.minimum(alpha, np.minimum(exact, safe)), 0.0, 1.0)
        gain *= used
        gain += shares
        rest = held + (1.0 - gain.sum(-1, keepdims=True))
        np.put_along_axis(gain, straggler, np.maximum(rest, 0.0), -1)
        if self.monotone:
            least_step = self._limit(np.zeros_like(rest), members)
            limit = np.maximum(used, least_step) if self.tight else self._limit(rest, members)
            alpha = np.minimum(alpha, limit)
        return Plan(gain), DolbieState(remembered(present, gain, state.shares), alpha, used, slope)

    def _first(self) -> Array:
        """x_1, shape (n,)."""
        cluster = self.cluster
        weights = _weights(self.start, cluster.workers) if self.start else np.ones(cluster.workers)
        return proportional(weights, cluster.least_shares, cluster.most_shares)

    def _first_alpha(self) -> float:
        if self.tight:
            return 1.0 if self.alpha is None else self.alpha
        shares = self._first()
        safe = float(self._limit(shares[shares > 0].min(), np.asarray(self.cluster.workers)))
        return safe if self.alpha is None else min(self.alpha, safe)

    def _limit(self, share: Array, members: NDArray[np.int64]) -> Array:
        """The step at which the straggler keeps a share even if all others could take everything."""
        return feasible_step(np.maximum(share, self.floor / self.cluster.workers), members)


def _weights(start: str, workers: int) -> Array:
    """The numbers of ``start``. Raises PacelineError if they are no partition of this many workers."""
    try:
        weights = np.array([float(part) for part in start.split("/")])
    except (AttributeError, ValueError):
        weights = np.zeros(0)
    if not (len(weights) == workers and np.all(weights >= 0) and 0 < weights.sum() < np.inf):
        raise PacelineError(
            f"policy 'dolbie': start={short(start)}: expected {workers} numbers with '/' between them, one for each "
            "worker, none below 0 and not all 0"
        )
    return weights


def feasible_step(share: Array | float, members: NDArray[np.int64] | int) -> Array:
    """x / (N - 2 + x), the step that is always feasible; two workers count as three (DOLBIE, eq. (7))."""
    share = np.asarray(share, float)
    return share / (np.maximum(members - 2, 1) + share)


def possible_gain(
    cost: Cost, level: Array, shares: Array, most: Array, batch: float, straggler: NDArray[np.int64]
) -> Array:
    """x'_i - x_i: what each could add in the straggler's time; 0 for itself (DOLBIE, eq. (4), section VI-A)."""
    gain = cost.load_at(level) / batch
    np.minimum(gain, most, out=gain)
    gain -= shares
    np.fmax(gain, 0.0, out=gain)  # an absent worker's overhead is unknown, NaN: it gains nothing
    # If its cost is flat, the straggler could take more too; but by the rule it has to give.
    np.put_along_axis(gain, straggler, 0.0, -1)
    return gain


class Peer(NamedTuple):
    """The state of one worker."""

    rank: int
    share: float  # x_i
    alpha: float  # its own limit on the step, alpha-bar_i
    workers: int  # N
    floor: float  # as the policy's: a part of an equal share


class Announcement(NamedTuple):
    """A message to all: the seconds of the sender's round, its alpha-bar (DOLBIE, Alg. 2, line 4), and the step that
    its share allows if it is the straggler. The last one is less than alpha-bar only below the floor."""

    sender: int
    seconds: float
    alpha: float
    safe: float


class NewShare(NamedTuple):
    """A message to the straggler: the sender's new share."""

    sender: int
    receiver: int
    share: float


class Traffic(NamedTuple):
    """The messages of a round, each to one receiver, and the numbers in them (DOLBIE, section IV-C)."""

    messages: int
    numbers: int


def with_master(workers: int) -> Traffic:
    """The messages of a round of Algorithm 1: each worker sends its seconds, and receives the level, the step and
    whether it is the straggler; all but the straggler send their new shares, and the straggler receives its own."""
    return Traffic(3 * workers, workers + 3 * workers + (workers - 1) + 1)


def start_peers(
    workers: int, alpha: float | None = None, floor: float = FLOOR, start: str = ""
) -> list[Peer]:
    """Workers with their first shares, and the step of eq. (7) or a given smaller one.

    floor, start: as the policy's.
    """
    whole("workers", workers)
    shares = proportional(_weights(start, workers) if start else np.ones(workers))
    safe = float(feasible_step(max(shares[shares > 0].min(), floor / workers), workers))
    alpha = safe if alpha is None else min(alpha, safe)
    return [Peer(rank, share, alpha, workers, floor) for rank, share in enumerate(shares.tolist())]


def announce(peer: Peer, seconds: float) -> Announcement:
    return Announcement(peer.rank, seconds, peer.alpha, float(feasible_step(peer.share, peer.workers)))


def decide(peer: Peer, possible: float, announced: list[Announcement]) -> tuple[Peer, NewShare | None]:
    """A worker's next share and its message to the straggler; the straggler itself waits for ``settle``.

    announced: by all workers, its own announcement too. possible: the share that this worker could run
        within the longest of their times, x~ of eq. (4), by its own cost. DOLBIE, Alg. 2, lines 5 to 10.
    """
    straggler = announced_straggler(announced)
    if peer.rank == straggler:
        return peer, None
    safe = next(a.safe for a in announced if a.sender == straggler)
    alpha = min(safe, *(a.alpha for a in announced))
    share = peer.share - alpha * (peer.share - max(min(possible, 1.0), peer.share))
    return peer._replace(share=share), NewShare(peer.rank, straggler, share)


def settle(peer: Peer, received: list[NewShare]) -> Peer:
    """The straggler's next share, and the step it allows from now on (DOLBIE, eq. (8), Alg. 2, lines 11 to 13)."""
    share = max(1.0 - sum(h.share for h in sorted(received)), 0.0)
    limit = feasible_step(max(share, peer.floor / peer.workers), peer.workers)
    return peer._replace(share=share, alpha=min(peer.alpha, float(limit)))


def announced_straggler(announced: list[Announcement]) -> int:
    """The rank that announced the most seconds; the lowest of equals."""
    return min(announced, key=lambda a: (-a.seconds, a.sender)).sender


def play_round(peers: list[Peer], costs: Cost, batch: int) -> tuple[list[Peer], Traffic]:
    """One round of all workers, in one process (DOLBIE, Alg. 2, lines 1 to 3). costs: of shape (n,)."""
    seconds = costs.seconds(np.array([p.share for p in peers]) * batch)
    announced = [announce(p, float(s)) for p, s in zip(peers, seconds, strict=True)]
    level = np.array([max(a.seconds for a in announced)])
    possible = costs.load_at(level) / batch  # each entry is computed by its own worker
    decided = [decide(p, float(x), announced) for p, x in zip(peers, possible, strict=True)]
    handovers = [message for _, message in decided if message is not None]
    straggler = announced_straggler(announced)
    after = [settle(p, handovers) if p.rank == straggler else p for p, _ in decided]
    n = len(peers)
    sent = n * (n - 1)
    return after, Traffic(sent + len(handovers), 3 * sent + len(handovers))
