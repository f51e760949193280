"""A round whose samples go to free workers: the pieces that a server hands out, gets back, and counts as done.

The rule is that of ``balance.factoring``. A worker runs the first portion of its plan at once and then claims pieces
of the samples that all have left; at its end it delivers the gradient of all that it ran. The samples of a lost
worker go back to the others in the same round, so that the round's gradient always covers the whole batch.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from paceline.pieces.rule import against_the_first, claim, divide, piece_cost
from paceline.rounds import Array, Indices, PiecePlan, PieceRecord

SOON = 3e-3  # seconds before a piece is expected to end at which the next one is claimed: a round trip


class WorkerRound(NamedTuple):
    """The work of one worker in a round.

    taken: its samples. seconds: from its beginning, the wait for others excluded; overhead: the part of them that
    its pieces cost beyond their samples; piece: that cost of one. sizes, times: samples and seconds of each piece.
    """

    taken: Indices
    seconds: float
    overhead: float
    piece: float
    sizes: list[int]
    times: list[float]

    def figures(self) -> tuple[float, float, float, float]:
        """The entries of this worker in ``rounds.PieceTimes``."""
        return (self.piece, *against_the_first(self.sizes, self.times, self.piece))


@dataclass
class _Hand:
    """The pieces of one worker in the round."""

    mark: float  # when its newest piece began, or will begin after those before
    out: deque[Indices] = field(default_factory=deque)  # sent, not reported
    ran: list[Indices] = field(default_factory=list)  # reported, not delivered
    asked: bool = False  # whether it was asked to deliver
    done: list[Indices] = field(default_factory=list)  # delivered
    sizes: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def holds(self) -> list[Indices]:
        return [*self.done, *self.ran, *self.out]


class SharedRound:
    """One round. Times are seconds of the caller's clock; a call's ``worker`` must have begun.

    piece_plan: how the plan runs in pieces. costs: measured seconds that a piece costs each worker beyond its
        samples; ``end`` updates them in place.
    """

    def __init__(self, piece_plan: PiecePlan, costs: Array) -> None:
        self._piece_plan, self._costs = piece_plan, costs
        self._hands: dict[int, _Hand] = {}
        self._left: deque[Indices] = deque()
        self.left = 0  # samples not handed out
        self._planned = self._first = 0

    def begin(self, worker: int, samples: Indices, now: float) -> Indices | None:
        """The worker takes part with the samples planned for it; returns the piece that it runs at once."""
        loads = np.zeros(len(self._costs), np.int64)
        loads[worker] = len(samples)
        first = int(divide(self._piece_plan, loads)[0][worker])
        self._hands[worker] = _Hand(now)
        self._planned, self._first = self._planned + len(samples), self._first + first
        self._put_back([samples[first:]])
        return self._hand_out(worker, samples[:first]) if first else self.claim(worker, now)

    def claim(self, worker: int, now: float) -> Indices | None:
        """The worker's next piece, None if nothing is left."""
        if not self.left:
            return None
        hand, piece_plan = self._hands[worker], self._piece_plan
        if not hand.out:
            hand.mark = now
        count = claim(
            piece_plan,
            worker,
            reported=all(each.sizes for each in self._hands.values()),
            left=self.left,
            batch=self._planned,
            held=sum(map(len, hand.holds())),
            speed=self._speed(worker),
            together=sum(map(self._speed, range(len(self._costs)))),
            workers=len(self._hands),
            most=self.left,
        )
        return self._hand_out(worker, self._take(count))

    def reported(self, worker: int, now: float) -> None:
        """The worker has finished the oldest of the pieces sent to it."""
        hand = self._hands[worker]
        piece = hand.out.popleft()
        hand.ran.append(piece)
        hand.sizes.append(len(piece))
        hand.times.append(now - hand.mark)
        hand.mark = now

    def expected(self, worker: int) -> float | None:
        """When the worker's only piece will be finished, so that the next should be claimed; None if that is
        unknown, or another piece waits already."""
        hand = self._hands[worker]
        speed = self._speed(worker)
        if len(hand.out) != 1 or not self.left or not speed > 0:
            return None
        return hand.mark + float(self._costs[worker]) + len(hand.out[0]) / speed - SOON

    def idle(self, worker: int) -> bool:
        """Whether the worker has nothing to run."""
        return not self._hands[worker].out

    def awaited(self, worker: int) -> tuple[float, int]:
        """(the time of the worker's last report, the samples that were sent to it and are not delivered)."""
        hand = self._hands[worker]
        return hand.mark, sum(len(piece) for piece in (*hand.out, *hand.ran))

    def to_deliver(self, worker: int) -> Indices | None:
        """The samples whose gradient the worker should deliver after its last piece; None if samples are left to
        claim, or if it has none, or was asked already."""
        hand = self._hands[worker]
        if self.left or hand.asked or not (hand.ran or hand.out):
            return None
        hand.asked = True
        return np.concatenate([*hand.ran, *hand.out])

    def delivered(self, worker: int, samples: Indices, now: float) -> None:
        """The gradient of these samples has arrived, which also reports all their pieces."""
        hand = self._hands[worker]
        while hand.out and sum(map(len, hand.ran)) < len(samples):
            self.reported(worker, now)
        moved = 0
        while moved < len(samples):  # the worker may have begun more pieces since it was asked
            moved += len(hand.ran[0])
            hand.done.append(hand.ran.pop(0))
        hand.asked = False

    def lose(self, worker: int) -> None:
        """The worker is gone: all its samples of the round, delivered or not, go back to the others."""
        hand = self._hands.pop(worker, None)
        if hand is not None:
            self._put_back(hand.holds())

    def workers(self) -> list[int]:
        """The workers that take part, sorted."""
        return sorted(self._hands)

    def complete(self) -> bool:
        """Whether the gradients of all samples have arrived."""
        return not self.left and not any(hand.out or hand.ran for hand in self._hands.values())

    def end(self) -> dict[int, WorkerRound]:
        """The work of each worker, once the round is complete; updates the costs of pieces."""
        ran = {}
        for worker, hand in self._hands.items():
            cost = self._costs[worker] = piece_cost(hand.sizes, hand.times, float(self._costs[worker]))
            taken = np.concatenate(hand.done) if hand.done else np.zeros(0, np.int64)
            overhead = max(len(hand.sizes) - 1, 0) * cost
            ran[worker] = WorkerRound(taken, sum(hand.times), overhead, cost, hand.sizes, hand.times)
        return ran

    def record(self, ran: dict[int, WorkerRound]) -> PieceRecord:
        """The round's entry in the run's record."""
        n = len(self._costs)
        return PieceRecord(
            1.0 if self._first == self._planned else self._first / self._planned,
            float(np.mean([each.piece for each in ran.values()])),
            [ran[worker].sizes if worker in ran else [] for worker in range(n)],
            [[round(t, 6) for t in ran[worker].times] if worker in ran else [] for worker in range(n)],
        )

    def _speed(self, worker: int) -> float:
        """Samples per second in this round, as planned until a piece is finished; 0 for an absent worker."""
        hand = self._hands.get(worker)
        if hand is None:
            return 0.0
        busy = sum(hand.times) - float(self._costs[worker]) * len(hand.times)
        return sum(hand.sizes) / busy if busy > 0 else float(self._piece_plan.speeds[worker])

    def _put_back(self, pieces: list[Indices]) -> None:
        self._left.extend(piece for piece in pieces if len(piece))
        self.left += sum(map(len, pieces))

    def _take(self, count: int) -> Indices:
        parts: list[Indices] = []
        self.left -= count
        while count:
            piece = self._left.popleft()
            if len(piece) > count:
                self._left.appendleft(piece[count:])
                piece = piece[:count]
            parts.append(piece)
            count -= len(piece)
        return np.concatenate(parts)

    def _hand_out(self, worker: int, piece: Indices) -> Indices:
        self._hands[worker].out.append(piece)
        return piece
