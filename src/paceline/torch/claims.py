"""Claims within a round: a rank asks for its next piece when one is through.

If processes load what is claimed, it is asked for while the piece before it runs: when that begins, or in the
backward pass of a round's first piece, which tells how fast the rank is in this round. Who asked earlier would bind
itself to more than it knows to be right. Otherwise asking ahead gains next to nothing: a claim takes two round trips
to the counter, some tenths of a millisecond, and some microseconds if all ranks are on one machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.errors import WorkerError
from paceline.pieces.rule import claim, portion
from paceline.torch import peers
from paceline.torch.counter import MOST_SPEED, SPEED_UNITS, Counter, counter
from paceline.torch.liveness.calls import Calls
from paceline.torch.measuring import piece_reports
from paceline.torch.plan import Claim, Division, Piece, claimed

# Times the expected speed of all, told by one rank: a plan made from a stall may be that wrong.
FASTEST = 16.0
FORWARD = 1 / 3  # of a piece until its backward pass begins, until measured
RECENT = 0.2  # weight of the newest measurement of that, and of the waits for claims
GROWTH = 2  # times the piece before: what is claimed at most where processes load it meanwhile


class Claims:
    """This rank's part in the rounds that are run in pieces.

    unit: pieces are multiples of this many samples. largest: samples that fit into memory at once; most: that
    this rank may take in a round. cell: samples of every micro-step, 0 if micro-steps differ. shared: counts what
    is claimed; by default what suits the process group. workers: how many ranks take part in the running round.

    How much a piece holds is counted in samples, or by their cost if samples cost differently (``Piece.amount``).
    For each round: ``open``; for each piece ``begin``, ``halfway`` and ``done``; ``take`` between two of them;
    ``report`` at its end.
    """

    def __init__(
        self,
        device: torch.device,
        unit: int,
        largest: int | None,
        most: int,
        cell: int = 0,
        shared: Counter | None = None,
    ) -> None:
        self._counter = counter() if shared is None else shared
        self._rank, self.workers = peers.rank(), peers.ranks()
        self._device, self._unit, self._most = device, unit, most
        self._largest, self._cell = most if largest is None else largest, cell
        self._calls, self._timeout = Calls("claims"), peers.timeout()
        # Claimed samples take long to load: ask when a piece begins, not when it is through.
        self.early = False
        self.claimed: Callable[[Claim], object] | None = None  # told of each claim
        self._answer: Claim | None = None
        self._cost, self._wait, self._forward = piece_reports.FIRST_COST, 0.0, FORWARD
        self._opened = -1  # rounds; one that was left is counted again when it is run again
        self.open(0.0)

    def open(self, began: float) -> None:
        """A round begins."""
        self._asked = False  # ahead of ``take``
        self._opened += 1
        self._told: int | None = None  # the newest speed that the others were told in this round
        self._began = self._mark = began
        self._half = self._waited = 0.0
        self._sizes: list[int] = []
        self._amounts: list[float] = []
        self._seconds: list[float] = []
        self._waits: list[float] = []
        self._parts = np.zeros(3)

    def begin(self, piece: Piece) -> None:
        """A piece begins."""
        if self.early and piece.division is not None and self._sizes:
            self._ask(piece.division, piece)

    def halfway(self, piece: Piece) -> None:
        """The backward pass of a piece begins."""
        if self.early and piece.division is not None and not self._sizes:
            self._synchronize()
            self._half = time.perf_counter()
            self._ask(piece.division, piece, max(self._forward, 0.05))

    def done(self, piece: Piece, last: bool = False) -> None:
        """A piece is through."""
        if not last:
            self._synchronize()
        now = time.perf_counter()
        took = now - self._mark
        if self._half:
            portion = (self._half - self._mark - self._waited) / max(took - self._waited, 1e-9)
            self._forward += RECENT * (min(max(portion, 0.0), 1.0) - self._forward)
        self._sizes.append(piece.samples)
        self._amounts.append(piece.amount)
        if piece.parts is not None:
            self._parts = self._parts + piece.parts
        self._seconds.append(took)
        self._waits.append(self._waited)
        self._mark, self._half, self._waited = now, 0.0, 0.0

    def take(self, division: Division) -> Claim | None:
        """This rank's next piece; None when nothing is left for it."""
        began = time.perf_counter()
        if not self._asked:
            self._ask(division)
        self._asked = False
        self.waited(time.perf_counter() - began)
        return self._answer

    def waited(self, seconds: float) -> None:
        """The next piece's beginning was held up."""
        self._waited += seconds

    def report(self, as_one: bool = False) -> list[float]:
        """What the other ranks should know of the round's pieces: the numbers of a ``piece_reports.ROW``.

        as_one: tell of one piece, where the round did not go as rounds do, and its pieces say nothing of the next."""
        pure, parts = [a - b for a, b in zip(self._seconds, self._waits, strict=True)], self._parts.tolist()
        if as_one:
            sizes, amounts = [sum(self._sizes)], [sum(self._amounts)]
            return piece_reports.report(sizes, [sum(pure)], self._cost, amounts, parts)
        self._cost = piece_reports.cost(self._amounts, pure, self._cost)
        claimed = self._waits[1:-1]  # neither the first nor the last piece is claimed
        if claimed:
            self._wait += RECENT * (sum(claimed) / len(claimed) - self._wait)
        cost = self._cost + self._wait
        return piece_reports.report(self._sizes, self._seconds, cost, self._amounts, parts)

    def close(self) -> None:
        self._calls.close()
        self._counter.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _synchronize(self) -> None:
        """On a GPU (not yet run on one), wait for it: what is claimed next depends on when."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _ask(self, *how: Any) -> None:
        """See ``_claim``; the answer is waited for as long as the process group waits."""
        try:
            if self._counter.quick:
                self._answer = self._claim(*how)
            else:
                self._answer = self._calls.within(self._timeout, self._claim, *how)
        except TimeoutError:
            raise WorkerError(
                f"{self._counter.keeper}, where work is claimed, has not answered rank {self._rank} for "
                f"{self._timeout:.0f} s, as long as the process group waits; it may be stopped or cut off: end the "
                "run and go on from the last checkpoint"
            ) from None
        self._asked = True
        if self._answer is not None and self.claimed is not None:
            self.claimed(self._answer)

    def _claim(self, division: Division, running: Piece | None = None, part: float = 0.0) -> Claim | None:
        """The next claim, behind a ``running`` piece of which this ``part`` is done."""
        behind, amount = (0, 0.0) if running is None else (running.samples, running.amount)
        samples, done = sum(self._sizes) + behind, sum(self._amounts) + part * amount
        busy = self._mark - self._began - sum(self._waits)
        most = GROWTH * amount or math.inf  # what is claimed is to be loaded while the piece before runs
        if part:
            busy += time.perf_counter() - self._mark - self._waited
        busy -= self._cost * (len(self._sizes) + part)
        rank, piece_plan, costs = self._rank, division.piece_plan, division.costs
        room = self._most - samples - int(division.kept[rank])
        if costs is None:
            room = int(min(self._largest, room, max(most, self._unit)))
        room = room // self._unit * self._unit
        if room <= 0 and self._told is not None:
            return None
        expected, together = float(piece_plan.speeds[rank]), float(piece_plan.speeds.sum())
        measured = done > 0 and busy > 0
        speed, known = done / busy if measured else expected, together > 0
        told, before = 0, self._told or 0
        if measured and known:
            told = int(self._told is None)
            fastest = min(FASTEST, (MOST_SPEED - 1) / self.workers)
            self._told = round(min((speed - expected) / together, fastest) * SPEED_UNITS)
        count = self._counter.add(self._opened, told=told, speed=(self._told or 0) - before)
        left = division.pool - count.samples
        if left <= 0 or room <= 0:
            return None
        reserved = division.kept if division.reserved is None else division.reserved
        known_now: dict[str, Any] = {
            "told": count.told == self.workers,
            "left": left if costs is None else costs.left(count.samples),
            "batch": division.batch if costs is None else division.whole,
            "held": sum(self._amounts) + amount + reserved[rank],
            "speed": speed,
            "together": together * max(1.0 + count.speed / SPEED_UNITS, 1e-6),
            "workers": self.workers,
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
        return claimed(division, start, size, self._cell, self._largest)
