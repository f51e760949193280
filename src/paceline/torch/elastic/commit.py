"""The commit of a round: one more sum over all members, beside the gradients, of what each ran and measured.

A member that gets the gradients gets this sum, too, so all members that commit a round have the same record of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.recovery import Running
from paceline.torch.exchange import Rows

WHOLE = 1 << 40  # the samples' sums are modulo this, so that floats hold them exactly for any number of ranks


class CommitRecord(NamedTuple):
    """The record of a committed round, the same on all members that commit it.

    present: whether each place took part, (places,). rows: the measurements, (places,); absent places ran nothing."""

    switch: bool  # the members change after this round
    counted: float | None  # the count that the losses are means over, if that is not the samples
    present: NDArray[np.bool_]
    used: NDArray[np.bool_]  # which parameters have a gradient, (parameters,)
    rows: Rows


def write(
    running: Running,
    switch: bool,
    counted: float | None,
    used: Sequence[bool],
    row: Rows,
    place: int,
    places: int,
) -> torch.Tensor:
    """One member's part of the sum. row: its measurements, shape ()."""
    each = [_sums(start - running.first, size) for start, size in running.ran]
    mine = np.zeros(1, _layout(places, row.dtype, len(used)))
    mine["switch"], mine["counted"], mine["given"] = switch, counted or 0.0, counted is not None
    mine["sums"] = [sum(numbers) % WHOLE for numbers in zip((0, 0, 0), *each, strict=True)]
    mine["present"][0, place], mine["rows"][0, place], mine["used"] = 1.0, row, used
    return torch.from_numpy(mine.view("f8"))


def read(
    total: NDArray[np.float64], places: int, dtype: np.dtype[np.void], size: int, step: int
) -> CommitRecord:
    """Read the sum over all members, for a round of ``size`` samples.

    Raises WorkerError if a sample is missing in the round's gradient, or counts twice, which must never happen."""
    parameters = total.size - _layout(places, dtype, 0).itemsize // 8
    found = total.view(_layout(places, dtype, parameters))[0]
    have, want = [int(number) for number in found["sums"]], _sums(0, size)
    if have[0] != size or any((had - number) % WHOLE for had, number in zip(have, want, strict=True)):
        raise WorkerError(
            f"round {step}: {have[0]} samples are in its gradient (sums {have[1]} and {have[2]}); expected each of "
            f"{size} once: a rank may have left its loop alone, or this is a bug in Paceline"
        )
    if found["given"] not in (0, found["present"].sum()):
        raise PacelineError(
            f"round {step}: some ranks gave pace.backward() a count, others none; expected it on all or none"
        )
    counted = float(found["counted"]) if found["given"] else None
    present, used, rows = found["present"] > 0, found["used"] > 0, found["rows"].copy()
    _fill(rows, present)
    return CommitRecord(bool(found["switch"]), counted, present, used, rows)


def _fill(rows: Rows, present: NDArray[np.bool_]) -> None:
    """Fill the rows of absent places with the values of a rank that ran nothing."""
    absent, one = ~present, rows[int(np.argmax(present))]
    for name in ("loss", "overhead", "has_loss", "deciding"):
        rows[name][absent] = 0.0
    for name in ("seconds", "cpu", "memory", "fits", "link", "rate", "options", "model"):
        rows[name][absent] = np.nan
    rows["count"][absent] = np.nan if np.isnan(one["count"][0]) else 0.0
    for name in ("first", "rounds", "digest", "epoch", "left"):
        rows[name][absent] = one[name]
    if "pieces" in (rows.dtype.names or ()):
        cost = rows["pieces"]["cost"]
        cost[absent] = cost[present].mean()


def _layout(places: int, row: np.dtype[np.void], parameters: int) -> np.dtype[np.void]:
    """The dtype of the sum, all float64: sums of the samples' numbers, and the fields of ``CommitRecord``."""
    head = [("switch", "f8"), ("sums", "f8", (3,)), ("counted", "f8"), ("given", "f8")]
    return np.dtype(
        [*head, ("present", "f8", (places,)), ("rows", row, (places,)), ("used", "f8", (parameters,))]
    )


def _sums(start: int, size: int) -> tuple[int, int, int]:
    """For the ``size`` numbers from ``start`` on: how many they are, their sum, and the sum of their squares."""
    before, all_ = ((n * (n - 1) // 2, (n - 1) * n * (2 * n - 1) // 6) for n in (start, start + size))
    return size, all_[0] - before[0], all_[1] - before[1]
