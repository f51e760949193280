"""Claims within a round: where the counter is quick, a rank asks for its next piece when one is through.

Else claims are made ahead: shortly before a piece ends, a thread asks for the next one. When the backward pass of a
piece begins, a rank knows how fast it is in this round and when the piece will end. It asks just so early that the
round trips to the counter hide behind the rest: who asked earlier would bind itself to more than it knows to be right
(with whole backward passes ahead, more is lost to that than the round trips cost).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import torch

from paceline.errors import WorkerError
from paceline.pieces.rule import claim, portion
from paceline.torch import peers
from paceline.torch.counter import MOST_SPEED, SPEED_UNITS, Counter, counter
from paceline.torch.liveness.calls import Calls
from paceline.torch.measuring import piece_reports
from paceline.torch.plan import Claim, Division, Piece, claimed

_log = logging.getLogger(__name__)
# Times the expected speed of all, told by one rank: a plan made from a stall may be that wrong.
FASTEST = 16.0
FORWARD = 1 / 3  # of a piece until its backward pass begins, until measured
RECENT = 0.2  # weight of the newest measurement of that, of the waits for claims, and of how long these take
TRIPS = 3e-4  # seconds that a claim takes, until measured
GROWTH = 2  # times the piece before: what is claimed at most where processes load it meanwhile
MARGIN = 0.1  # of a piece that is left when the next is asked for, and twice the time that a claim takes
FORGET_SECONDS = 5.0  # for a claim to return that nobody wants any more


class _Before(NamedTuple):
    """Where a rank stands when it asks: a piece that began, of ``running`` and expected to take ``whole`` seconds;
    how much was ``done`` before it in ``busy`` seconds, all as amounts; and its samples with these."""

    began: float
    running: float
    whole: float
    done: float
    busy: float
    samples: int


class Claims:
    """This rank's part in the rounds that are run in pieces.

    unit: pieces are multiples of this many samples. largest: samples that fit into memory at once; most: that
    this rank may take in a round. cell: samples of every micro-step, 0 if micro-steps differ. shared: counts what
    is claimed; by default what suits the process group. workers: how many ranks take part, which may change from
    round to round.

    How much a piece holds is counted in samples, or by their cost if samples cost differently (``Piece.amount``).
    For each round: ``open``; for each piece ``begin``, ``halfway`` and ``done``; ``take`` between two of them;
    ``report`` at its end. ``halfway`` may be left out: then ``take`` asks, and waits.
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
        self._asker = Calls("claims")
        self._timeout = peers.timeout()
        self._answer: Future[Claim | None] | None = None
        self._behind = torch.cuda.Event() if device.type == "cuda" else None  # the newest forward pass
        self._asking: Piece | None = None  # behind which something is to be asked for when that is through
        self.early = (
            False  # claimed samples take long to load: ask when a piece begins, not at its backward pass
        )
        self.claimed: Callable[[Claim], object] | None = None  # told of each claim, in the thread
        self._cost, self._wait, self._forward, self._trips = piece_reports.FIRST_COST, 0.0, FORWARD, TRIPS
        self._through = threading.Event()  # the piece is, behind which something is asked for
        self._opened = 0  # rounds; one that was left is counted again when it is run again
        self._told: int | None = None  # the newest speed that the others were told in this round
        self._began = self._mark = self._half = self._waited = 0.0
        self._sizes: list[int] = []
        self._amounts: list[float] = []
        self._parts = np.zeros(3)
        self._seconds: list[float] = []
        self._waits: list[float] = []

    def open(self, began: float) -> None:
        """A round begins."""
        self.forget()
        self._opened += 1
        self._told = None
        self._began = self._mark = began
        self._half = self._waited = 0.0
        self._sizes, self._amounts, self._seconds, self._waits = [], [], [], []
        self._parts = np.zeros(3)

    def begin(self, piece: Piece) -> None:
        """A piece begins."""
        if self.early and piece.division is not None and self._sizes:
            self._ask(piece.division, piece, math.inf)

    def halfway(self, piece: Piece) -> None:
        """The backward pass of a piece begins."""
        if piece.division is None or self._answer is not None or (self._counter.quick and not self.early):
            return
        if self._behind is not None:
            self._behind.record(torch.cuda.current_stream(self._device))
            self._asking = piece
            return
        self._ask_in_time(piece)

    def done(self, piece: Piece, last: bool = False) -> None:
        """A piece is through; on a GPU (not yet run on one), wait for it: what is claimed next depends on when."""
        if self._behind is not None and not last:
            if self._asking is not None:
                self._behind.synchronize()
                self._ask_in_time(self._asking)
                self._asking = None
            torch.cuda.current_stream(self._device).synchronize()
        if self._answer is not None:
            self._through.set()
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
        try:
            if self._answer is None and self._counter.quick:
                self._through.clear()
                taken = self._asked(division, self._before(None, math.inf), 0.0)
            else:
                taken = self._answered(division)
        except TimeoutError:
            raise WorkerError(
                f"{self._counter.keeper}, where work is claimed, has not answered rank {self._rank} for "
                f"{self._timeout:.0f} s, as long as the process group waits; it may be stopped or cut off: end the "
                "run and go on from the last checkpoint"
            ) from None
        self.waited(time.perf_counter() - began)
        return taken

    def waited(self, seconds: float) -> None:
        """The next piece's beginning was held up."""
        self._waited += seconds

    def report(self, as_one: bool = False) -> list[float]:
        """What the other ranks should know of the round's pieces: the numbers of a ``piece_reports.ROW``.

        as_one: tell of one piece, where the round did not go as rounds do, and its pieces say nothing of the next."""
        if as_one:
            sizes, seconds, amounts = (
                [sum(self._sizes)],
                [sum(self._seconds) - sum(self._waits)],
                [sum(self._amounts)],
            )
            return piece_reports.report(sizes, seconds, self._cost, amounts, self._parts.tolist())
        pure = [seconds - wait for seconds, wait in zip(self._seconds, self._waits, strict=True)]
        self._cost = piece_reports.cost(self._amounts, pure, self._cost)
        claimed = self._waits[1:-1]  # neither the first nor the last piece is claimed
        if claimed:
            self._wait += RECENT * (sum(claimed) / len(claimed) - self._wait)
        cost = self._cost + self._wait
        return piece_reports.report(self._sizes, self._seconds, cost, self._amounts, self._parts.tolist())

    def close(self) -> None:
        self.forget()
        self._asker.close()
        self._counter.close()

    # -- within ----------------------------------------------------------------------------------------------

    def _ask_in_time(self, piece: Piece) -> None:
        """Ask behind a piece whose backward pass begins now."""
        assert piece.division is not None
        self._half = time.perf_counter()
        so_far = self._half - self._mark - self._waited
        whole = so_far / max(self._forward, 0.05)
        self._ask(piece.division, piece, whole, 0.0 if self.early else whole * (1 - MARGIN) - 2 * self._trips)

    def _ask(
        self, division: Division, running: Piece | None = None, whole: float = math.inf, wait: float = 0.0
    ) -> None:
        """Ask for what comes after the ``running`` piece that takes ``whole`` seconds, when ``wait`` of them are over
        or it is through."""
        self._through.clear()
        self._answer = self._asker.submit(self._asked, division, self._before(running, whole), wait)

    def _answered(self, division: Division) -> Claim | None:
        """What was asked for, or is asked for now. Raises TimeoutError."""
        if self._answer is None:
            self._ask(division)
        assert self._answer is not None
        taken, self._answer = self._answer.result(self._timeout), None
        return taken

    def _before(self, running: Piece | None, whole: float) -> _Before:
        """Where this rank stands, with a ``running`` piece that takes ``whole`` seconds."""
        return _Before(
            self._mark + self._waited,
            0 if running is None else running.amount,
            whole,
            sum(self._amounts),
            self._mark - self._began - sum(self._waits) - self._cost * len(self._sizes),
            sum(self._sizes) + (0 if running is None else running.samples),
        )

    def _asked(self, division: Division, before: _Before, wait: float) -> Claim | None:
        """In the thread, if there is need of it: the next claim."""
        pause = before.began + wait - time.perf_counter()
        through = self._through.wait(pause) if pause > 0 else self._through.is_set()
        now = time.perf_counter()
        running = now - before.began
        done = 1.0 if through else min(running / before.whole, 1.0)
        busy = before.busy + (running - self._cost * done if done else 0.0)
        # What is claimed is to be loaded while a piece runs that may be much smaller.
        most = GROWTH * before.running if self.early and before.running else math.inf
        ran = before.done + done * before.running
        taken = self._claim(division, before.samples, before.done + before.running, ran, busy, most)
        self._trips += RECENT * (min(time.perf_counter() - now, 10 * self._trips) - self._trips)
        if taken is not None and self.claimed is not None:
            self.claimed(taken)
        return taken

    def _claim(
        self, division: Division, samples: int, held: float, done: float, busy: float, most: float
    ) -> Claim | None:
        """The next claim, of ``most`` at most, of a rank that holds so many samples, and ran ``done`` in ``busy``
        seconds; held, done and most are amounts."""
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
            "held": held + reserved[rank],
            "speed": speed,
            "together": together * max(1.0 + count.speed / SPEED_UNITS, 1e-6),
            "workers": self.workers,
        }
        if costs is None:
            wanted = claim(piece_plan, rank, most=room, unit=self._unit, **known_now)
        else:
            wanted = costs.samples(
                count.samples, min(float(portion(piece_plan, rank, **known_now)), most), room
            )
        start = self._counter.add(self._opened, wanted).samples
        if start >= division.pool:
            return None
        size = min(wanted, division.pool - start)
        return claimed(division, start, size, self._cell, self._largest)

    def forget(self) -> None:
        """Nothing is asked for any more; a loop that was left within its round may still."""
        if self._answer is not None:
            self._through.set()
            try:
                self._answer.result(FORGET_SECONDS)
            except Exception as error:  # also of a rank 0 that does not answer
                _log.info("a claim that nobody waits for any more failed: %r", error)
        self._answer, self._asking = None, None
