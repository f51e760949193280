"""DOLBIE without a master (Algorithm 2): every worker decides for itself from two numbers that each announces.

A round, for each worker: ``announce`` to all others, ``decide`` once all announcements are in, and, for the
straggler, ``settle`` once all others have told it their new shares. Nobody but the straggler learns another's
share. ``play_round`` delivers the messages within one process and counts them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.balance.dolbie import feasible_step
from paceline.costs import Cost
from paceline.errors import PacelineError


class Peer(NamedTuple):
    """What one worker keeps."""

    rank: int
    share: float  # x_i
    alpha: float  # its own limit on the step, alpha-bar_i


class Announcement(NamedTuple):
    """To everybody: how long the round took me, and the step I allow (two numbers)."""

    sender: int
    seconds: float
    alpha: float


class Handover(NamedTuple):
    """To the straggler: my new share (one number)."""

    sender: int
    receiver: int
    share: float


class Traffic(NamedTuple):
    """Messages of a round, each to one receiver, and the numbers in them."""

    messages: int
    numbers: int


def start(workers: int, alpha: float | None = None) -> list[Peer]:
    """Equal shares, and the step of eq. (7) or a given smaller one."""
    if workers < 1:
        raise PacelineError(f"workers={workers}: expected at least 1 worker")
    safe = float(feasible_step(1 / workers, workers))
    return [Peer(rank, 1 / workers, safe if alpha is None else min(alpha, safe)) for rank in range(workers)]


def announce(peer: Peer, seconds: float) -> Announcement:
    return Announcement(peer.rank, seconds, peer.alpha)


def decide(peer: Peer, possible: float, heard: list[Announcement]) -> tuple[Peer, Handover | None]:
    """A worker's next share and what it tells the straggler; the straggler itself waits for ``settle``.

    heard: the announcements of all workers, its own too. possible: the share that this worker could carry
        within the longest of their times, x~ of eq. (4), by its own cost.
    """
    straggler = slowest(heard)
    if peer.rank == straggler:
        return peer, None
    alpha = min(a.alpha for a in heard)
    share = peer.share - alpha * (peer.share - max(min(possible, 1.0), peer.share))
    return peer._replace(share=share), Handover(peer.rank, straggler, share)


def settle(peer: Peer, received: list[Handover]) -> Peer:
    """The straggler's next share, and the smaller step it allows from now on (eq. 8)."""
    share = max(1.0 - sum(h.share for h in sorted(received)), 0.0)
    return peer._replace(share=share, alpha=min(peer.alpha, float(feasible_step(share, len(received) + 1))))


def slowest(heard: list[Announcement]) -> int:
    return min(heard, key=lambda a: (-a.seconds, a.sender)).sender


def play_round(peers: list[Peer], costs: Cost, batch: int) -> tuple[list[Peer], Traffic]:
    """One round of all workers, in one process. costs: of shape (n,)."""
    seconds = costs.seconds(np.array([p.share for p in peers]) * batch)
    heard = [announce(p, float(s)) for p, s in zip(peers, seconds, strict=True)]
    level = np.array([max(a.seconds for a in heard)])
    possible = costs.load_at(level) / batch  # each entry is computed by its own worker
    decided = [decide(p, float(x), heard) for p, x in zip(peers, possible, strict=True)]
    handovers = [message for _, message in decided if message is not None]
    straggler = slowest(heard)
    after = [settle(p, handovers) if p.rank == straggler else p for p, _ in decided]
    n = len(peers)
    announced = n * (n - 1)
    return after, Traffic(announced + len(handovers), 2 * announced + len(handovers))
