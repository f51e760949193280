"""Measures this rank's rounds and tells the other ranks, without holding up the step.

For each round, in this order: ``start`` before its first micro-batch is loaded, ``add_loss`` for each
micro-batch, ``stop`` when its last gradient is ready (sends), ``collect`` after the optimizer step (receives).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.few import total
from paceline.torch.liveness.patience import named
from paceline.torch.measuring import exchange, measure, piece_reports
from paceline.torch.measuring.exchange import Exchange, Rows

FIELDS = [
    ("step", "f8"),  # the round that this tells of; NaN where no reading is there yet
    ("digest", "f8"),  # of the plan in force
    ("seconds", "f8"),
    ("overhead", "f8"),  # seconds of the optimizer step before it, measured apart
    ("loss", "f8"),  # summed over the rank's samples; NaN where it did not hand in its loss
    ("count", "f8"),  # what that is a sum over, where that is something other than samples; else NaN
    ("told", "f8"),  # 1 where the rank handed in its loss, else 0
    ("cpu", "f8"),  # portion of the machine's processors that others left, NaN where not asked for
    ("memory", "f8"),  # portion that is free
]
ROW = np.dtype(FIELDS)  # what a rank reports of a round
ROW_WITH_PIECES = np.dtype([*FIELDS, ("pieces", piece_reports.ROW)])  # where work may move within it

Loss = tuple[torch.Tensor | float, float]
"""Of a piece: the number, or where it is on a device, and what makes a sum of it."""


class Meter:
    """This rank's stopwatch, and the exchange with the others.

    readings: also report CPU and memory of the machine, for forecasts that use them.
    pieces: each round's ``stop`` also hands in what became of its pieces.
    waited: seconds that this rank has spent waiting for others within rounds, so far in all; not its own.
    way: how what is told travels, by default the one that suits the ranks.
    """

    def __init__(
        self,
        device: torch.device,
        readings: bool = False,
        pieces: bool = False,
        waited: Callable[[], float] | None = None,
        way: Exchange | None = None,
    ) -> None:
        self.lost = exchange.nobody  # tells of a rank that need not be waited for any more
        self._watch = measure.stopwatch(device)
        self._waited = waited or (lambda: 0.0)
        self._row = ROW_WITH_PIECES if pieces else ROW
        self._packed = struct.Struct(f"={self._row.itemsize // 8}d")
        self._exchange = exchange.connect(self._row) if way is None else way
        self._readings = measure.Readings() if readings else None
        self._carry: dict[int, float] = {}
        self._waits: dict[int, float] = {}
        self._losses: dict[int, list[Loss]] = {}
        self._counts: dict[int, float] = {}
        self._pieces: dict[int, list[float]] = {}
        self._sent = -1  # newest round announced
        self._running = -1
        self._newest: tuple[int, Rows] | None = None  # what was received, and with which announcement
        self._sequence = -1  # of announcements: one for each round begun, and one where a flush asks for it

    @property
    def lag(self) -> int:
        """Rounds by which a measurement comes in late."""
        return self._watch.lag

    def start(self, step: int, carry: float) -> None:
        """Round ``step`` begins; ``carry`` seconds of it were spent before, on the optimizer."""
        self._running = step
        self._losses.pop(step, None)
        self._counts.pop(step, None)
        self._sequence += 1
        self._carry[step] = carry
        self._waits[step] = self._waited()
        self._watch.start(step)

    def add_loss(self, step: int, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Count this micro-batch's loss, times what makes a sum of it, towards the round's."""
        self._losses.setdefault(step, []).append((taken_down(loss), factor))

    def add_count(self, step: int, count: float) -> None:
        """This micro-batch's summed loss is over so many tokens, nodes or the like."""
        self._counts[step] = self._counts.get(step, 0.0) + count

    def stopped(self, step: int) -> bool:
        """True when the round's last gradient has been seen."""
        return self._sent >= step

    def stop(self, step: int, digest: int, pieces: Callable[[], list[float]] | None = None) -> None:
        """The last gradient of round ``step`` is ready: announce what is known. Later calls do nothing.

        pieces: gives the numbers of this rank's ``piece_reports.ROW``."""
        if self.stopped(step) or step != self._running:
            return
        self._watch.stop(step)
        self._waits[step] = self._waited() - self._waits[step]
        if pieces is not None:
            self._pieces[step] = pieces()
        self._sent = step
        self._announce(step - self._watch.lag, digest)

    def drop(self, step: int) -> None:
        """Round ``step`` was left unfinished, and may be run again."""
        self._sent = min(self._sent, step - 1)

    def flush(self, digest: int) -> Rows | None:
        """The newest round's reading, where the device's would only come with the next round's. Collective."""
        if not self._watch.lag or self._sent not in self._carry:
            return None
        self._sequence += 1
        self._announce(self._sent, digest)
        return self.collect(self._sent)

    def collect(self, step: int) -> Rows | None:
        """All ranks' reports that came with round ``step``, (n,) of ROW; None when there is no finished round yet."""
        rows = self._received()
        digests = rows["digest"].tolist()
        if digests.count(digests[0]) != len(digests):
            digests = rows["digest"]
            odd = np.flatnonzero(digests != np.median(digests))
            names = ", ".join(str(r) for r in (odd if odd.size else np.flatnonzero(digests != digests[0])))
            raise PacelineError(
                f"rank {names} decided another plan than the other ranks at round {step}; expected the same plan "
                "everywhere: check that all ranks run the same version and options"
            )
        return None if math.isnan(rows["step"][0]) else rows

    def publish(self, made: Any) -> None:
        """Leave for the other ranks what this one has made of the newest reports, unless they come in late."""
        if not self.lag:
            self._exchange.publish(self._sequence, made)

    def published(self) -> Any:
        """What another rank makes of the newest reports; None where this one should make it, and ``publish`` it."""
        return None if self.lag else self._exchange.published(self._sequence)

    def counted_by_all(self, step: int) -> float | None:
        """What the losses of all ranks in round ``step`` are means over, together; call after ``stop``.

        None where a measurement comes in late, so that nobody knows yet. Raises PacelineError where some ranks told
        of a count and others did not.
        """
        if self.lag:
            return None
        rows = self._received()
        counts = rows["count"].tolist()
        check_counts(step, counts)
        return total(counts)

    def close(self) -> None:
        self._exchange.close()

    def abandon(self) -> None:
        """``close`` after a failure: nobody is waited for."""
        self._exchange.abandon()

    def _received(self) -> Rows:
        """What came with the newest announcement."""
        if self._newest is None or self._newest[0] != self._sequence:
            self._newest = self._sequence, self._exchange.receive(self._sequence, self.lost)
        return self._newest[1]

    def _announce(self, step: int, digest: int) -> None:
        self._exchange.send(self._sequence, self._report(step, digest))

    def _report(self, step: int, digest: int) -> bytes:
        numbers = [math.nan] * (self._packed.size // 8)
        numbers[1] = digest
        if step in self._carry:  # else the device's first reading comes a round later
            carry = self._carry.pop(step)
            losses = self._losses.pop(step, None)
            cpu, memory = self._readings.take() if self._readings else (math.nan, math.nan)
            numbers[: len(FIELDS)] = (
                step,
                digest,
                self._watch.seconds(step) - self._waits.pop(step) + carry,
                carry,
                math.nan if losses is None else summed(losses),
                self._counts.pop(step, math.nan),
                losses is not None,
                cpu,
                memory,
            )
            if (pieces := self._pieces.pop(step, None)) is not None:
                numbers[len(FIELDS) :] = pieces
        return self._packed.pack(*numbers)


def check_counts(step: int, counts: list[float]) -> None:
    """Raises PacelineError where some ranks gave a count in a round and others, whose count is NaN, did not."""
    without = [rank for rank, count in enumerate(counts) if math.isnan(count)]
    if 0 < len(without) < len(counts):
        given = [rank for rank in range(len(counts)) if rank not in without]
        raise PacelineError(
            f"round {step}: {named(given)} gave a count with the loss, and {named(without)} did not; expected count= "
            "on all ranks or on none"
        )


def taken_down(loss: torch.Tensor) -> torch.Tensor | float:
    """A loss to be read later; its number at once where nobody need wait for it."""
    return float(loss.item()) if loss.is_cpu and loss.numel() == 1 else loss.detach()


def summed(losses: list[Loss]) -> float:
    """Of a round's pieces, in float64. What counts for nothing is left out: a mean over nothing is NaN."""
    counted = [(loss, factor) for loss, factor in losses if factor]
    if not counted:
        return 0.0
    known = sum(loss * factor for loss, factor in counted if isinstance(loss, float))
    on_device = [loss.double() * factor for loss, factor in counted if isinstance(loss, torch.Tensor)]
    return known + float(torch.stack(on_device).sum()) if on_device else known  # one wait for all
