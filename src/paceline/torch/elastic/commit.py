"""What travels beside the gradients, in one sum over all members: what each ran of the round, and its measurements.

Who gets the gradients gets this, too, and so all that commit a round know the same of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError, WorkerError
from paceline.torch.claims import Claims
from paceline.torch.elastic.recovery import Span
from paceline.torch.measuring import exchange, piece_reports
from paceline.torch.measuring.exchange import Row, Rows
from paceline.torch.measuring.meter import Meter, Summed, fields, with_loss
from paceline.torch.plan import Piece

WHOLE = 1 << 40  # the samples' sums are modulo this, so that floats hold them however many ranks add to them
# samples: that the rank ran; parts: what they add up to, see ``Deal.parts``, if samples cost differently
ROW = np.dtype([*fields(1), ("samples", "f8"), ("parts", "f8", (3,))])
ROW_WITH_PIECES = np.dtype([*fields(1), ("pieces", piece_reports.ROW)])


class CommitRecord(NamedTuple):
    """What a round came to, the same on all members that commit it. rows: of shape (places,); present: who took part,
    (places,)."""

    switch: bool  # the members change after this round
    counted: float | None  # what the losses are means over, if that is not the samples
    present: NDArray[np.bool_]
    used: NDArray[np.bool_]  # which parameters have a gradient, (parameters,)
    rows: Rows


def write(
    *,
    switch: bool,
    ran: Iterable[Span],
    first: int,
    counted: float | None,
    used: Sequence[bool],
    row: Rows,
    place: int,
    places: int,
) -> torch.Tensor:
    """One member's part of the sum. first: of the round's samples. row: its measurements, shape ()."""
    each = [_sums(start - first, size) for start, size in ran]
    mine = np.zeros(1, _layout(places, row.dtype, len(used)))
    mine["switch"], mine["counted"], mine["given"] = switch, counted or 0.0, counted is not None
    mine["sums"] = [sum(numbers) % WHOLE for numbers in zip((0, 0, 0), *each, strict=True)]
    mine["present"][0, place], mine["rows"][0, place], mine["used"] = 1.0, row, used
    return torch.from_numpy(mine.view("f8"))


def read(
    total: NDArray[np.float64], places: int, dtype: np.dtype[np.void], size: int, step: int
) -> CommitRecord:
    """The sum over all members, of a round of ``size`` samples.

    Raises WorkerError if a sample is missing in the round's gradient, or counts twice: that must never be."""
    parameters = total.size - _layout(places, dtype, 0).itemsize // 8
    found = total.view(_layout(places, dtype, parameters))[0]
    have, want = [int(number) for number in found["sums"]], _sums(0, size)
    if have[0] != size or any((had - number) % WHOLE for had, number in zip(have, want, strict=True)):
        raise WorkerError(
            f"round {step}: {have[0]} samples are in its gradient (sums {have[1]} and {have[2]}), "
            f"expected each of {size} once: the run ends here, before it trains from a wrong gradient. A rank may "
            "have left its loop alone and begun another epoch; if none has, this is a fault of Paceline"
        )
    if found["given"] not in (0, found["present"].sum()):
        raise PacelineError(
            f"round {step}: some ranks gave pace.backward() a count, others none; expected it on all or none"
        )
    counted = float(found["counted"]) if found["given"] else None
    present, used = found["present"] > 0, found["used"] > 0
    return CommitRecord(bool(found["switch"]), counted, present, used, found["rows"].copy())


def _layout(places: int, row: np.dtype[np.void], parameters: int) -> np.dtype[np.void]:
    """All of it, as floats: sums of the samples' numbers, and what ``CommitRecord`` has."""
    head = [("switch", "f8"), ("sums", "f8", (3,)), ("counted", "f8"), ("given", "f8")]
    return np.dtype(
        [*head, ("present", "f8", (places,)), ("rows", row, (places,)), ("used", "f8", (parameters,))]
    )


def _sums(start: int, size: int) -> tuple[int, int, int]:
    """How many numbers there are from ``start`` on, their sum, and the sum of their squares."""
    before, all_ = ((n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6) for n in (start, start + size))
    return size, all_[0] - before[0], all_[1] - before[1]


class Carried:
    """The way of what is told that has travelled with the gradients: it is there already."""

    rows: Rows  # of the newest complete round, (places,)

    def send(self, step: int, row: Row) -> None:
        """Nothing is left to be sent."""

    def receive(self, step: int, lost: exchange.Lost = exchange.nobody) -> Rows:
        """All ranks' rows."""
        return self.rows

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nobody is waited for."""


class ElasticMeter(Meter):
    """For each round ``start``, then ``add_loss``, ``add_count`` and ``ran`` for each piece, ``row`` as often as the
    gradients are to be summed, and ``complete`` when they are.

    pieces: work may move within rounds, and ``claims`` is set, this rank's part in that.
    """

    intervals = False  # a row travels with each round's gradients

    def __init__(self, readings: bool, pieces: bool) -> None:
        self._carried = Carried()
        super().__init__(torch.device("cpu"), readings, pieces, way=self._carried)
        self.claims: Claims | None = None
        self._step = -1  # the running round
        self._row = ROW_WITH_PIECES if pieces else ROW
        self._samples, self._parts = 0, np.zeros(3)
        self._began = self._before = self._held_up = 0.0
        self._told: Summed = None
        self._count: float | None = None

    @property
    def dtype(self) -> np.dtype[np.void]:
        """Of a row."""
        return self._row

    @property
    def counted(self) -> float | None:
        """What this rank's losses of the round are means over, if that is not the samples."""
        return self._count

    def start(self, step: int, carry: float) -> None:
        self._step, self.stopped, self._before, self._held_up = step, False, carry, 0.0
        self._told, self._count = None, None
        self._samples, self._parts = 0, np.zeros(3)
        self._began = time.perf_counter()

    def add_loss(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        self._told = with_loss(self._told, loss, factor)

    def add_count(self, count: float) -> None:
        self._count = (self._count or 0.0) + count

    def ran(self, piece: Piece) -> None:
        """This rank has run a piece of the round."""
        if self.claims is not None:
            self.claims.done(piece, last=True)
        self._samples += piece.samples
        if piece.parts is not None and piece.samples:
            self._parts = self._parts + piece.parts

    def waited(self, seconds: float) -> None:
        """So much of the round was spent waiting for other ranks."""
        self._held_up += seconds
        if self.claims is not None:
            self.claims.waited(seconds)

    def row(self, mended: bool) -> Rows:
        """What this rank tells of the running round, which is mended or not; shape ()."""
        claims = self.claims
        numbers = [self._samples, *self._parts.tolist()] if claims is None else claims.report(as_one=mended)
        own = self._row.itemsize // 8 - len(numbers)
        row = np.array([np.nan] * own + numbers).view(self._row).reshape(())
        row["digest"], row["first"], row["rounds"], row["overhead"] = (
            *(self.digest(), self._step, 1),
            self._before,
        )
        row["deciding"] = self.deciding
        row["seconds"] = time.perf_counter() - self._began - self._held_up + self._before
        row["told"] = self._told is not None
        row["count"] = np.nan if self._count is None else self._count
        if self._told is not None:
            row["loss"] = float(self._told)
        if self._readings:
            row["cpu"], row["memory"] = self._readings.take()
        return row

    def complete(self, step: int, rows: Rows, present: np.ndarray) -> None:
        """The round's gradients are there, and with them all ranks' rows, (places,); who took part, (places,)."""
        one = rows[int(np.argmax(present))]
        values = (("seconds", np.nan), ("loss", 0.0), ("overhead", 0.0), ("told", 0.0), ("deciding", 0.0))
        for name, value in values:
            rows[name][~present] = value
        for name in ("cpu", "memory"):
            rows[name][~present] = np.nan
        rows["count"][~present] = np.nan if np.isnan(one["count"][0]) else 0.0
        for name in ("first", "rounds", "digest"):
            rows[name][~present] = one[name]
        if self._row is ROW_WITH_PIECES:
            cost = rows["pieces"]["cost"]
            cost[~present] = cost[present].mean()
        self._carried.rows, self._newest, self.told = rows, None, True
        self._sequence, self.stopped = step, True

    def stop(self, pieces: Callable[[], list[float]] | None = None) -> None:
        """Nothing: ``complete`` ends the round."""

    def drop(self, step: int) -> None:
        """Nothing: a round that is not complete has been told to nobody."""
