"""Claims within a round: a rank claims its next piece when it has finished one.

If worker processes load the samples, a rank claims a piece while the one before it runs: when that one begins, or
in the backward pass of a round's first piece, which shows how fast the rank is in this round. A rank that claimed
earlier might commit itself to more than suits its speed. Without worker processes, claiming ahead gains next to
nothing: a claim takes two round trips to the counter, some tenths of a millisecond, or microseconds on one machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from paceline.errors import WorkerError
from paceline.pieces.rule import claim, portion
from paceline.torch import peers, piece_reports
from paceline.torch.counter import MOST_SPEED, SPEED_UNITS, Counter, counter
from paceline.torch.liveness.calls import Calls
from paceline.torch.plan import Claim, Division, Piece, Source, claimed
from paceline.torch.terms import Terms

# Limit of the speed that a rank reports, in expected speeds of all ranks: a plan made from a stall may be that wrong.
FASTEST = 16.0
FORWARD = 1 / 3  # portion of a piece's time before its backward pass begins, until it is measured
RECENT = 0.2  # weight of the newest measurement of that portion, and of the newest waits for claims
GROWTH = 2  # size limit of a piece that worker processes load, as a multiple of the piece that runs meanwhile


class Claims:
    """This rank's part in the rounds that are run in pieces.

    unit: pieces are multiples of this many samples. largest: samples that fit into memory at once; most: samples
    that this rank may take in a round. chunk: samples of every micro-step, 0 if micro-steps differ. shared: counts
    the claims; by default the counter that suits the process group.

    The amount of a piece is its samples, or their cost if samples cost differently (``Piece.amount``).
    Call ``open`` for each round; ``begin``, ``halfway`` and ``done`` for each piece; ``take`` between two pieces; and
    ``report`` at the round's end.
    """

    def __init__(
        self,
        device: torch.device,
        unit: int,
        largest: int | None,
        most: int,
        chunk: int = 0,
        shared: Counter | None = None,
    ) -> None:
        self._counter = counter() if shared is None else shared
        self._rank = peers.rank()
        self._device, self._unit, self._most = device, unit, most
        self._largest, self._chunk = most if largest is None else largest, chunk
        self._calls, self._timeout = Calls("claims"), peers.timeout()
        # Claim when a piece begins, not when it ends, since claimed samples take long to load.
        self._early = False
        self._notify: Callable[[Claim], object] | None = None  # called with each claim
        self._answer: Claim | None = None
        self._cost, self._wait, self._forward = piece_reports.FIRST_COST, 0.0, FORWARD
        self._opened = -1  # rounds opened; one that was left is counted again when it is run again
        self.open(0.0)

    @classmethod
    def of(cls, device: torch.device, terms: Terms, shared: Counter | None) -> Claims:
        """The claims of this rank in a run of these terms. Collective, unless there is a counter."""
        most, chunk = int(terms.most[peers.rank()]), terms.chunk
        if terms.merge is not None and terms.micro_batch:
            chunk = terms.micro_batch  # each micro-batch is a step
        return cls(device, terms.unit, None if chunk else terms.micro_batch, most, chunk, shared)

    def ahead(self, notify: Callable[[Claim], object] | None, early: bool) -> None:
        """Call ``notify`` with each claim from now on. early: claim while the piece before it runs."""
        self._notify, self._early = notify, early

    def open(self, began: float, workers: int | None = None) -> None:
        """Begin a round at ``began``, without pieces. workers: ranks that run it; by default all."""
        self._workers = peers.ranks() if workers is None else workers
        self._asked = False  # a claim was made ahead of ``take``
        self._opened += 1
        self._reported: int | None = None  # the newest speed that this rank has reported in this round
        self._began = self._mark = began
        self._half = self._waited = 0.0
        self._sizes: list[int] = []
        self._amounts: list[float] = []
        self._seconds: list[float] = []
        self._waits: list[float] = []
        self._parts = np.zeros(3)

    def begin(self, piece: Piece) -> None:
        """A piece begins: claim the next one, if processes load samples. In a round's first, ``halfway`` does so."""
        if self._early and piece.division is not None and self._sizes:
            self._ask(piece.division, piece)

    def halfway(self, piece: Piece) -> None:
        """The backward pass of a piece begins: in a round's first, claim the next one if processes load samples."""
        if self._early and piece.division is not None and not self._sizes:
            self._synchronize()
            self._half = time.perf_counter()
            self._ask(piece.division, piece, max(self._forward, 0.05))

    def done(self, piece: Piece, last: bool = False) -> None:
        """Record the seconds of a piece that has ended. last: of its round, so that no claim waits for it."""
        if not last:
            self._synchronize()
        now = time.perf_counter()
        took = now - self._mark
        if self._half:
            forward = (self._half - self._mark - self._waited) / max(took - self._waited, 1e-9)
            self._forward += RECENT * (min(max(forward, 0.0), 1.0) - self._forward)
        self._sizes.append(piece.samples)
        self._amounts.append(piece.amount)
        if piece.parts is not None:
            self._parts = self._parts + piece.parts
        self._seconds.append(took)
        self._waits.append(self._waited)
        self._mark, self._half, self._waited = now, 0.0, 0.0

    def micro_steps(self, source: Source, piece: Piece) -> Iterator[tuple[Any, Piece]]:
        """The micro-steps of this rank's claims before ``piece``, if it is the round's last planned one."""
        if piece.division is None or not piece.last:
            return
        assert source.claimed is not None
        while (taken := self.take(piece.division)) is not None:
            at, left = taken.start, len(taken.sizes)
            for batch, size, parts in zip(source.claimed(taken), taken.sizes, taken.parts, strict=True):
                left -= 1
                yield batch, piece._replace(samples=size, parts=parts, last=False, claims=not left, start=at)
                at += size

    def take(self, division: Division) -> Claim | None:
        """Claim and return this rank's next piece; None if nothing is left for it."""
        began = time.perf_counter()
        if not self._asked:
            self._ask(division)
        self._asked = False
        self.waited(time.perf_counter() - began)
        return self._answer

    def waited(self, seconds: float) -> None:
        """The next piece began this much later than it could have."""
        self._waited += seconds

    def report(self, as_one: bool = False) -> list[float]:
        """This rank's report on the round's pieces to the other ranks: the numbers of a ``piece_reports.ROW``.

        as_one: report one piece, since the round was irregular and its pieces predict nothing about the next."""
        pure, parts = [a - b for a, b in zip(self._seconds, self._waits, strict=True)], self._parts.tolist()
        if as_one:
            sizes, amounts = [sum(self._sizes)], [sum(self._amounts)]
            return piece_reports.report(sizes, [sum(pure)], self._cost, amounts, parts)
        self._cost = piece_reports.cost(self._amounts, pure, self._cost)
        waits = self._waits[1:-1]  # neither the first nor the last piece is claimed
        if waits:
            self._wait += RECENT * (sum(waits) / len(waits) - self._wait)
        cost = self._cost + self._wait
        return piece_reports.report(self._sizes, self._seconds, cost, self._amounts, parts)

    def close(self) -> None:
        self._calls.close()
        self._counter.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        """On a GPU (not yet run on one), wait for it: the size of the next claim depends on the time of this one."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _ask(self, *how: Any) -> None:
        """Make a claim, see ``_claim``. Waits for the answer as long as the process group waits."""
        try:
            if self._counter.quick:
                self._answer = self._claim(*how)
            else:
                self._answer = self._calls.within(self._timeout, self._claim, *how)
        except TimeoutError:
            raise WorkerError(
                f"{self._counter.keeper}, where work is claimed, has not answered rank {self._rank} for "
                f"{self._timeout:.0f} s, as long as the process group waits; it may be stopped or cut off: end the "
                "run and continue from the last checkpoint"
            ) from None
        self._asked = True
        if self._answer is not None and self._notify is not None:
            self._notify(self._answer)

    def _claim(self, division: Division, running: Piece | None = None, part: float = 0.0) -> Claim | None:
        """The next claim, made while a ``running`` piece, if any, is done to this ``part``."""
        behind, amount = (0, 0.0) if running is None else (running.samples, running.amount)
        samples, done = sum(self._sizes) + behind, sum(self._amounts) + part * amount
        busy = self._mark - self._began - sum(self._waits)
        most = GROWTH * amount or math.inf  # the claim must be loaded by the time that the running piece ends
        if part:
            busy += time.perf_counter() - self._mark - self._waited
        busy -= self._cost * (len(self._sizes) + part)
        rank, piece_plan, costs = self._rank, division.piece_plan, division.costs
        room = self._most - samples - int(division.kept[rank])
        if costs is None:
            room = int(min(self._largest, room, max(most, self._unit)))
        room = room // self._unit * self._unit
        if room <= 0 and self._reported is not None:
            return None
        expected, together = float(piece_plan.speeds[rank]), float(piece_plan.speeds.sum())
        measured = done > 0 and busy > 0
        speed, known = done / busy if measured else expected, together > 0
        reported, before = 0, self._reported or 0
        if measured and known:
            reported = int(self._reported is None)
            fastest = min(FASTEST, (MOST_SPEED - 1) / self._workers)
            self._reported = round(min((speed - expected) / together, fastest) * SPEED_UNITS)
        count = self._counter.add(self._opened, reported=reported, speed=(self._reported or 0) - before)
        left = division.pool - count.samples
        if left <= 0 or room <= 0:
            return None
        reserved = division.kept if division.reserved is None else division.reserved
        known_now: dict[str, Any] = {
            "reported": count.reported == self._workers,
            "left": left if costs is None else costs.left(count.samples),
            "batch": division.batch if costs is None else division.whole,
            "held": sum(self._amounts) + amount + reserved[rank],
            "speed": speed,
            "together": together * max(1.0 + count.speed / SPEED_UNITS, 1e-6),
            "workers": self._workers,
        }
        if costs is None:
            wanted = claim(piece_plan, rank, most=room, unit=self._unit, **known_now)
        else:
            due = min(float(portion(piece_plan, rank, **known_now)), most)
            wanted = costs.samples(count.samples, due, room)
        start = self._counter.add(self._opened, wanted).samples
        if start >= division.pool:
            return None
        size = min(wanted, division.pool - start)
        return claimed(division, start, size, self._chunk, self._largest)
