"""Measures this rank's rounds and tells the other ranks, without holding up the step.

For each round, in this order: ``start`` before its first micro-batch is loaded, ``add_loss`` for each micro-batch,
``stop`` when its last gradient is ready. Rounds are told of in intervals: with the end of the round that is ``due``,
one row goes to the other ranks (before the optimizer step), and ``collect`` gives what all of them told (after it).
Where rows travel with the gradients, whose sums may fail, ``row`` takes the place of ``stop``, as often as they are
tried, and ``committed`` follows.
"""

from __future__ import annotations

import math
import struct
import time
from collections.abc import Callable
from operator import add, attrgetter
from typing import Any

import numpy as np
import torch

from paceline.errors import PacelineError, WorkerError
from paceline.rounds import Array
from paceline.torch import peers
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.liveness.stall import named
from paceline.torch.measuring import exchange, measure, piece_reports
from paceline.torch.measuring.exchange import Rows
from paceline.torch.plan import Piece, RoundPlan

MOST_ROUNDS = 64  # of an interval
LATE_SECONDS = 10.0  # for others to do, too, what this rank alone may have done
RATES_DIFFER = 1e-6  # unlike processors may round a schedule's cosine otherwise


def fields(rounds: int) -> list[Any]:
    """What a rank reports of an interval of at most so many rounds, in the order of ``Meter._row``."""
    return [
        ("first", "f8"),  # round of the interval
        ("rounds", "f8"),  # in it; 0 if no reading is there yet
        ("digest", "f8"),  # of the plan in force
        ("epoch", "f8"),  # of the newest round; -1 if no reading is there yet
        ("left", "f8"),  # rounds until now whose optimizer step was left out on purpose
        ("deciding", "f8"),  # processor seconds that the newest decision took
        ("overhead", "f8"),  # seconds of the optimizer step before each round, measured apart; their mean
        ("rate", "f8"),  # learning rate of its optimizer; NaN before the first step
        ("told", "f8"),  # 1 if the rank handed in its losses, else 0
        ("fits", "f8"),  # samples that the rank's memory has room for, NaN if that is unknown
        ("ran_out", "f8"),  # passes that it had no room for, until now
        ("cpu", "f8"),  # portion of the machine's processors that others left, NaN if it is not asked for
        ("memory", "f8"),  # portion that is free
        ("link", "f8"),  # seconds of its newest merge, or of a round beyond its own part; NaN if unknown
        ("seconds", "f8", (rounds,)),  # of each round
        ("loss", "f8", (rounds,)),  # summed over the rank's samples; NaN if it did not hand in its loss
        # What that is a sum over, if that is something other than samples; else NaN.
        ("count", "f8", (rounds,)),
    ]


def layout(pieces: bool, by_itself: bool = False) -> np.dtype[np.void]:
    """A rank's row. pieces: work may move within a round. by_itself: it is of one round, in which others may run what
    a rank that is lost was to run, or nobody what a late one was."""
    if pieces:
        tail: list[Any] = [("pieces", piece_reports.ROW)]
    else:
        tail = [("samples", "f8"), ("parts", "f8", (3,))] if by_itself else []
    return np.dtype([*fields(1 if by_itself else MOST_ROUNDS), *tail])


UNTOLD = math.nan  # the loss of a round, before one was handed in
MEASURED = attrgetter("reading", "carry", "loss", "count")
SAME = ["rounds", "first", "digest", "epoch", "left", "rate"]  # on all ranks


class OpenRound:
    """A round on this rank, from its first micro-batch to what all ranks have told of it."""

    plan: RoundPlan
    reading: Any = None  # the stopwatch's, once the round's last gradient is there
    loss: torch.Tensor | float = UNTOLD  # so far, summed over the rank's samples; on a device it is there
    count = math.nan  # what that is a sum over, if it is something other than samples
    pieces: list[float] | None = None  # the numbers of its ``piece_reports.ROW``
    samples = 0  # that this rank has run
    parts: Array = np.zeros(3)  # what they add up to, see ``Deal.parts``
    learning_rate = math.nan  # of the first optimizer's first group
    ended = 0.0  # ``time.perf_counter`` after its step, 0 before

    def __init__(self, step: int, epoch: int, began: float, carry: float, mark: Any) -> None:
        self.step, self.epoch, self.began, self.carry, self.mark = step, epoch, began, carry, mark


class Meter:
    """This rank's stopwatch, and what it tells the others.

    reducer: by which rows travel. readings: also report CPU and memory of the machine, for forecasts that use them.
    pieces: work may move within a round, and each row also tells what became of its pieces. drops: what is late is
        not run, and each row also tells what was.
    """

    def __init__(
        self,
        device: torch.device,
        reducer: Reducer,
        readings: bool = False,
        pieces: bool = False,
        drops: bool = False,
    ) -> None:
        self.lost = exchange.nobody  # tells of a rank that need not be waited for any more
        # The numbers of this rank's ``piece_reports.ROW`` once the last piece of a round is through.
        self.report: Callable[[Piece], list[float] | None] = lambda piece: None
        self.digest: Callable[[], int] = int  # of the plan in force
        # Called before a round is told of while the interval before it was not taken in yet.
        self.settle: Callable[[], None] = lambda: None
        self.rate: Callable[[], float] = lambda: math.nan  # of the optimizer
        self.left_out = 0  # rounds whose optimizer step was left out on purpose
        self.memory: Callable[[], tuple[float, float]] | None = None  # gives ``fits`` and ``ran_out``
        self.due = 0  # the round with whose end the ranks tell; the same on all of them
        self.light = False  # the rounds until then have no pieces to tell of
        self.told = False  # the row of an interval is on its way, and not collected yet
        self.stopped = True  # the running round's last gradient has been seen
        self.link = math.nan  # seconds of this rank's newest merge
        self.deciding = 0.0  # processor seconds that this rank's newest decision took
        self.intervals = not reducer.travels  # several rounds may be told of at once
        self.drops = drops
        self.by_itself = reducer.travels or drops  # is each round told of; else several may be at once
        self._watch = measure.stopwatch(device)
        self.lag = self._watch.lag  # rounds by which a measurement comes in late
        self._pieces, self._reducer = pieces, reducer
        self._layout = layout(pieces, self.by_itself)
        if not reducer.travels:
            reducer.way = exchange.connect(self._layout)
        self._readings = measure.Readings() if readings else None
        self.running: Any = None  # an ``OpenRound``, or the newest, between rounds
        self._untold: list[OpenRound] = []  # stopped, and not collected yet
        self._newest: tuple[int, Rows] | None = None  # what was received, and with which announcement
        self._sequence = -1  # of announcements: one for each round begun, and one if a flush asks for it
        self._announced = -1  # the newest that was made
        self.counts = False  # some rank has given a count: every round is announced

    def start(self, step: int, epoch: int, began: float, carry: float) -> None:
        """Round ``step`` begins, at ``began`` by ``time.perf_counter``; ``carry`` seconds of it were spent before, on
        the optimizer."""
        self._sequence += 1
        self.stopped = False
        self.running = OpenRound(step, epoch, began, carry, self._watch.start())

    def add_loss(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Count this micro-batch's loss, times what makes a sum of it, towards the running round's."""
        running = self.running
        if not factor:  # a mean over nothing, which is NaN
            added: Any = 0.0
        elif loss.is_cpu and not loss.ndim:
            added = loss.item() * factor  # in float64
        else:  # likewise; nobody waits for a device
            added = loss.detach().double().sum() * factor
        before = running.loss
        running.loss = added if before is UNTOLD else before + added

    def add_count(self, count: float) -> None:
        """This micro-batch's summed loss is over so many tokens, nodes or the like."""
        before = self.running.count
        self.running.count = count if math.isnan(before) else before + count

    def loss_now(self, batch: int) -> float:
        """The mean loss of the newest round, of so many samples, over all ranks. Collective."""
        running = self.running
        own = running.samples if self.drops and math.isnan(running.count) else running.count
        total, count = np.sum(peers.gather((float(running.loss), own)), axis=0)
        return float(total / (batch if math.isnan(count) else count or math.nan))

    def where(self, rounds: int) -> tuple[int, bool]:
        """The round that this rank is in after so many ``rounds``, and whether it has done its part. Called from a
        thread."""
        running = self.running
        if running is None or running.ended:
            return rounds if running is None else running.step + 1, False
        return running.step, running.reading is not None

    def stop(self, piece: Piece) -> None:
        """The last gradient of the running round is there, with that of this piece: announce what is known, if that
        is due. Later calls do nothing."""
        if self.stopped:
            return
        self.stopped, running = True, self.running
        running.reading = self._watch.stop(running.mark)
        if self._pieces and not self.light:
            running.pieces = self.report(piece)
        if self.told:
            self.settle()
        self._untold.append(running)
        if running.step >= self.due:
            self.told = True
            self._announce()
        elif self.counts or running.count == running.count:
            self._announce()

    def ran(self, piece: Piece) -> None:
        """This rank has run a piece of the running round."""
        running = self.running
        running.samples += piece.samples
        if piece.parts is not None and piece.samples:
            running.parts = running.parts + piece.parts

    def row(self, pieces: list[float] | None) -> Rows:
        """What this rank tells of the running round alone, as it stands; shape ().

        pieces: the numbers of its ``piece_reports.ROW``, if work may move within a round."""
        running = self.running
        running.reading, running.pieces = self._watch.stop(running.mark), pieces
        return np.array(self._row([running], True)).view(self._layout)[0]

    @property
    def counted(self) -> float | None:
        """What this rank's losses of the running round are means over, if that is not the samples."""
        return None if self.running is None or math.isnan(self.running.count) else self.running.count

    def waited(self, seconds: float) -> None:
        """The running round was held up by other ranks for so long."""
        self.running.mark += seconds

    def committed(self) -> None:
        """The running round's gradients are there, and all ranks' rows with them."""
        self._untold = [self.running]
        self._newest, self.told, self.stopped = None, True, True

    def restart(self, rounds: int) -> None:
        """Go on after so many rounds: nothing of those before them is told any more."""
        self.due, self.light, self.told = rounds, False, False
        self._untold.clear()

    def drop(self, step: int) -> None:
        """Round ``step`` was left unfinished, and may be run again."""
        if self.intervals and self._untold and self._untold[-1].step == step:
            self._untold.pop()
            self.told = False
        self.running, self.stopped = None, True

    def dropped(self, step: int) -> None:
        """Round ``step`` was left when its gradients were summed: see that all ranks have left it. Collective. Raises
        PacelineError or WorkerError otherwise: the others go on, and their next sums are no business of this rank."""
        if not self.intervals:
            return
        words = (
            f"round {step} was left on this rank after its backward pass, before pace.step(optimizer), and the other "
            "ranks went on; expected a loop to be left on all ranks in the same round, or on none"
        )
        self._sequence += 1
        self._announced = self._sequence
        row = self._row([], False)
        row[0] = -2.0 - step
        self._reducer.commit(self._sequence, _bytes(row))
        if (self._received(self._late(words))["first"] != row[0]).any():
            raise PacelineError(words)

    def tell(self) -> None:
        """The loop was left, on all ranks: announce what has not been told yet. Returns at once."""
        if self._untold and not self.told:
            self._sequence += 1
            self.told = True
            self._announce()

    def flush(self) -> tuple[list[OpenRound], Rows | None]:
        """As ``collect``, of what has not been told yet, on a device with the newest round's. Collective."""
        if not self._untold:
            return [], None
        self._sequence += 1
        self._announce(0)
        return self.collect()

    def collect(self) -> tuple[list[OpenRound], Rows]:
        """The rounds of the interval that was announced, none if no reading is there yet, and what all ranks tell of
        them, (n,)."""
        rows, self.told = self._received(), False
        same = list(zip(*[rows[name].tolist() for name in SAME], strict=True))
        rounds = int(same[0][0])
        told, self._untold = self._untold[:rounds], self._untold[rounds:]
        if same.count(same[0]) != len(same):
            check_same(self.due, rows)
        self.counts = self.counts or not np.isnan(rows["count"][:, :rounds]).all()
        return told, rows

    def counted_by_all(self, step: int) -> float | None:
        """What the losses of all ranks in the running round are means over, together; call after ``stop``.

        None if a measurement comes in late, so that nobody knows yet. Raises PacelineError if some ranks told
        of a count and others did not.
        """
        if self.lag:
            return None
        words = (
            f"round {step}: this rank gave a count with the loss for the first time, and another rank did not; "
            "expected count= on all ranks or on none"
        )
        lost = None if self.counts or self.told else self._late(words)
        rows = self._received(lost)
        counts = rows["count"][:, len(self._untold) - 1].tolist()
        check_counts(step, counts)
        return float(rows["samples"].sum() if self.drops and math.isnan(counts[0]) else sum(counts))

    def close(self) -> None:
        """No more rounds."""
        self._watch.close()

    def _late(self, words: str) -> exchange.Lost:
        """Who is not heard of soon has not done what this rank did, since no other rank announces this round."""
        until = time.monotonic() + LATE_SECONDS
        return lambda: self.lost() if time.monotonic() < until else WorkerError(words)

    def _received(self, lost: exchange.Lost | None = None) -> Rows:
        """What came with the newest announcement."""
        if self._newest is None or self._newest[0] != self._announced:
            self._newest = self._announced, self._reducer.rows(self._announced, lost or self.lost)
        return self._newest[1]

    def _announce(self, lag: int | None = None) -> None:
        known = self._untold[: len(self._untold) - (self.lag if lag is None else lag)]
        self._announced = self._sequence
        self._reducer.commit(self._sequence, _bytes(self._row(known, self.told)))

    def _row(self, known: list[OpenRound], whole: bool) -> list[float]:
        """What this rank tells of the rounds that are ``known``, which are an interval if ``whole``: the numbers of a
        row, in the order of its fields."""
        rounds, unknown = len(known), math.nan
        first, epoch = (known[0].step, known[-1].epoch) if known else (-1, -1)
        readings, carries, losses, counts = zip(*map(MEASURED, known), strict=True) if known else ((),) * 4
        blank = [unknown] * ((1 if self.by_itself else MOST_ROUNDS) - rounds)
        row = [
            *(first, rounds, self.digest(), epoch, self.left_out, self.deciding),
            *(sum(carries) / rounds if known else unknown, self.rate()),
            UNTOLD not in losses if known else unknown,
            *((unknown, 0.0) if self.memory is None else self.memory()),
            *(self._readings.take() if self._readings and known and whole else (unknown, unknown)),
            self.link,
            *(*map(add, map(self._watch.seconds, readings), carries), *blank),
            *(*map(float, losses), *blank),
            *(*counts, *blank),
        ]
        if known and self._pieces and known[-1].pieces is not None:
            row += known[-1].pieces
        elif known and self.by_itself and not self._pieces:
            row += known[-1].samples, *known[-1].parts.tolist()
        return row + [unknown] * (self._layout.itemsize // 8 - len(row))


def _bytes(row: list[float]) -> bytes:
    return struct.pack(f"{len(row)}d", *row)


def check_same(step: int, rows: Rows) -> None:
    """Raises PacelineError if the ranks, which tell in ``rows``, (n,), of rounds up to ``step``, do not agree."""
    for name, wrong in (
        ("digest", "decided another plan than the other ranks"),
        ("first", "tells of other rounds than the other ranks"),
        ("rounds", "tells of another number of rounds than the other ranks"),
        ("epoch", "is in another epoch than the other ranks"),
        ("left", "has left out another number of optimizer steps than the other ranks"),
    ):
        told = rows[name]
        if (told != told[0]).any():
            odd = np.flatnonzero(told != np.median(told))
            ranks = odd if odd.size else np.flatnonzero(told != told[0])
            raise PacelineError(
                f"rank {', '.join(map(str, ranks))} {wrong} before round {step + 1}; expected the same "
                "everywhere: check that all ranks run the same version and options, and the same rounds"
            )
    check_rates(step, rows["rate"].tolist())


def check_counts(step: int, counts: list[float]) -> None:
    """Raises PacelineError if some ranks gave a count in a round and others, whose count is NaN, did not."""
    without = [rank for rank, count in enumerate(counts) if math.isnan(count)]
    if 0 < len(without) < len(counts):
        given = [rank for rank in range(len(counts)) if rank not in without]
        raise PacelineError(
            f"round {step}: {named(given)} gave a count with the loss, and {named(without)} did not; expected count= "
            "on all ranks or on none"
        )


def check_rates(step: int, rates: list[float]) -> None:
    """Raises PacelineError if the ranks' learning rates differ by more than rounding; NaN for one that is unknown."""
    known = sorted((rate, rank) for rank, rate in enumerate(rates) if not math.isnan(rate))
    if known and known[-1][0] - known[0][0] > RATES_DIFFER * abs(known[-1][0]):
        (low, rank), (high, other) = known[0], known[-1]
        raise PacelineError(
            f"the learning rate of rank {rank} is {low:g} in round {step} and that of rank {other} {high:g}, so that "
            "their parameters would part; expected the same on every rank: a schedule that goes by samples, tokens "
            "or losses has to count those of all ranks, not a rank's own"
        )
