"""What travels beside the gradients, in one sum over all members: what each ran of the round, and its measurements.

Who gets the gradients gets this, too, and so all that finish a round know the same of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.orphans import Span
from paceline.torch.measuring.exchange import Rows

HEAD = 6  # numbers before those of each place and each parameter
WHOLE = (
    1 << 40
)  # the samples' sums are taken modulo this, so that floats hold them however many ranks add to them


class Note(NamedTuple):
    """What a round came to, the same on all members. rows: of shape (places,); present: who took part, (places,)."""

    switch: bool  # the members change after this round
    counted: float | None  # what the losses are means over, where that is not the samples
    present: NDArray[np.bool_]
    used: NDArray[np.bool_]  # which parameters have a gradient, (parameters,)
    rows: Rows


def write(
    *,
    switch: bool,
    ran: Iterable[Span],
    first: int,
    counted: float | None,
    used: Iterable[bool],
    row: Rows,
    place: int,
    places: int,
) -> torch.Tensor:
    """One member's part of the sum. first: of the round's samples. row: its measurements, shape ()."""
    each = [_sums(start - first, size) for start, size in ran]
    sums = [sum(numbers) % WHOLE for numbers in zip((0, 0, 0), *each, strict=True)]
    width = row.dtype.itemsize // 8
    mask, rows = np.zeros(places), np.zeros((places, width))
    mask[place], rows[place] = 1.0, np.frombuffer(row.tobytes())
    head = np.array([switch, *sums, counted or 0.0, counted is not None], float)
    return torch.from_numpy(np.concatenate([head, mask, rows.ravel(), np.array(list(used), float)]))


def read(total: NDArray[np.float64], places: int, dtype: np.dtype[np.void], size: int, step: int) -> Note:
    """The sum over all members, of a round of ``size`` samples.

    Raises WorkerError where a sample is missing in the round's gradient, or counts twice: that must never be."""
    switch, count, sums, squares, counted, given = total[:HEAD]
    expected = _sums(0, size)
    if count != size or any(
        (have - want) % WHOLE for have, want in zip((sums, squares), expected[1:], strict=True)
    ):
        raise WorkerError(
            f"round {step}: {count:.0f} samples are in its gradient (sums {sums:.0f} and {squares:.0f}), "
            f"expected each of {size} once: the run ends here, before it trains from a wrong gradient. A rank may "
            "have left its loop alone and begun another epoch; if none has, this is a fault of Paceline"
        )
    if given not in (0, total[HEAD : HEAD + places].sum()):
        raise PacelineError(
            f"round {step}: some ranks gave pace.backward() a count, others none; expected it on all or none"
        )
    mask, rest = total[HEAD : HEAD + places], total[HEAD + places :]
    width = dtype.itemsize // 8
    rows = np.frombuffer(rest[: places * width].tobytes(), dtype).copy()
    return Note(bool(switch), float(counted) if given else None, mask > 0, rest[places * width :] > 0, rows)


def _sums(start: int, size: int) -> tuple[int, int, int]:
    """How many numbers there are from ``start`` on, their sum, and the sum of their squares."""

    def squares(below: int) -> int:
        return (below - 1) * below * (2 * below - 1) // 6

    return size, size * (2 * start + size - 1) // 2, squares(start + size) - squares(start)
