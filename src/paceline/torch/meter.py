"""Keeps this rank's rounds and reports them to the other ranks, without holding up the step.

For each round, in this order: ``start`` before its first micro-batch is loaded, ``running.add_loss`` for each
micro-batch, ``stop`` when its last gradient is ready, ``step_ended``. Rounds are reported in intervals: when the
round that is ``due`` ends, one row goes to the other ranks, and ``collect`` gives the rows of all ranks, after the
optimizer step. The row goes before the step, or after it if a further forward pass may add to the loss in between. If
rows travel with the gradients, whose sums may fail, ``row`` takes the place of ``stop``, once for each attempt, and
``committed`` follows.

A round's stopwatch starts when its first micro-batch is requested (loading is work too) and stops when the last
gradient is ready, before this rank waits for those of others. On a GPU (written for, not yet run on one) start and
stop are events on the stream, read a round later, so that nothing on the training path waits for the device.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from contextlib import suppress
from operator import add, attrgetter
from time import monotonic, perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from paceline.errors import PacelineError, WorkerError
from paceline.rounds import Array
from paceline.torch import exchange, peers, timing
from paceline.torch.exchange import Rows
from paceline.torch.members import Members
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.readings import Readings
from paceline.torch.rows import MOST_ROUNDS, SAME, check_counts, check_options, check_same, differ, layout

LATE_SECONDS = 10.0  # until the other ranks must have done what perhaps only this rank has done
NO_LOSS = math.nan  # the loss of a round before one was reported; compared by identity
MEASURED = attrgetter("reading", "carry", "loss", "count")


class OpenRound:
    """A round on this rank, from its first micro-batch until the reports of all ranks are collected. Only its methods
    change it."""

    plan: RoundPlan
    reading: Any = None  # the stopwatch's, once the round's last gradient is ready
    loss: torch.Tensor | float = NO_LOSS  # so far, summed over the rank's samples; on a device a tensor
    model: torch.Tensor | float = math.nan  # ``Reports.model``, if the round is due
    count = math.nan  # what the loss is a sum over, if it is something other than samples
    pieces: list[float] | None = None  # the numbers of its ``piece_reports.ROW``
    samples = 0  # that this rank has run
    parts: Array = np.zeros(3)  # the sum of its samples' parts, see ``Deal.parts``
    learning_rate = math.nan  # of the first optimizer's first group
    ended = 0.0  # ``time.perf_counter`` after its step, 0 before
    stepping = 0.0  # seconds of its step,
    after = 0.0  # and of all steps after it, which count for the next round
    further = (
        False  # a loss was added after the gradients were ready: of another forward pass before the step
    )

    def __init__(self, step: int, epoch: int, began: float, carry: float, mark: Any) -> None:
        self.step, self.epoch, self.began, self.carry, self.mark = step, epoch, began, carry, mark

    @property
    def summed(self) -> float:
        """``time.perf_counter`` when the round's gradients were summed and its step began."""
        return self.ended - self.stepping

    @property
    def seconds(self) -> float:
        """Wall seconds of the round on this rank: like the rank's own work, with the step before it, not its own."""
        return self.carry + self.summed - self.began

    def add_loss(self, loss: torch.Tensor, factor: float = 1.0) -> None:
        """Add a micro-batch's loss. factor: makes a mean loss a sum over its samples."""
        if not factor:  # a mean over nothing, which is NaN
            added: Any = 0.0
        elif loss.is_cpu and not loss.ndim:
            added = loss.item() * factor  # in float64
        else:  # also in float64; the host does not wait for the device
            added = loss.detach().double().sum() * factor
        self.loss = added if self.loss is NO_LOSS else self.loss + added
        if self.reading is not None:
            self.further = True

    def back_to(self, loss: torch.Tensor | float, count: float) -> None:
        """The last pass has failed: what it has added is not the round's."""
        self.loss, self.count = loss, count

    def add_count(self, count: float) -> None:
        """A micro-batch's summed loss is over ``count`` tokens, nodes or the like."""
        self.count = count if math.isnan(self.count) else self.count + count

    def ran(self, piece: Piece) -> None:
        """This rank has run a piece."""
        self.samples += piece.samples
        if piece.parts is not None and piece.samples:
            self.parts = self.parts + piece.parts

    def waited(self, seconds: float) -> None:
        """Other ranks have held up the round for ``seconds``, which do not count for this rank."""
        self.mark += seconds

    def read(self, plan: RoundPlan, reading: Any, pieces: list[float] | None) -> None:
        """The round's plan, the stopwatch's reading, and the numbers of its ``piece_reports.ROW``, if pieces are
        reported."""
        self.plan, self.reading, self.pieces = plan, reading, pieces

    def reports(self, model: torch.Tensor | float) -> None:
        """The round is reported, in which the model has this number."""
        self.model = model

    def steps_at(self, learning_rate: float) -> None:
        """The learning rate of the round's step."""
        self.learning_rate = learning_rate

    def step_ended(self, seconds: float) -> None:
        """The round is over, after a step of ``seconds``."""
        self.stepping = self.after = seconds
        self.ended = perf_counter()

    def stepped_again(self, seconds: float) -> None:
        """Another optimizer has stepped for the round that is over."""
        self.after += seconds


class Stopwatch(Protocol):
    """``start`` returns a mark, ``stop`` makes a reading of it, whose ``seconds`` are known ``lag`` rounds later."""

    lag: int

    def start(self) -> Any: ...

    def stop(self, mark: Any) -> Any: ...

    def seconds(self, reading: Any) -> float: ...

    def close(self) -> None:
        """No more readings."""
        ...


class CpuStopwatch:
    """The host's clock without its waits: a computation on the host ends when its call returns."""

    lag = 0
    seconds = staticmethod(float)

    def __init__(self) -> None:
        self.close = timing.listen(_nothing, _nothing)  # a listener makes ``now`` leave out waits

    def start(self) -> float:
        return perf_counter() - timing.waited

    def stop(self, mark: float) -> float:
        return perf_counter() - timing.waited - mark


class CudaStopwatch:
    """Events on the current stream. The start event comes after the previous round's work, so the wait for its
    all-reduce is left out, and so is the time between the two events around each collective; the reading is taken a
    round later, when the events are complete.

    event: makes a timing event; a test passes its own.
    """

    lag = 1

    def __init__(self, event: Any = None) -> None:
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._around: list[Any] = []  # events at both ends of each wait since the newest start
        self.close = timing.listen(self._wait, self._wait)

    def start(self) -> Any:
        self._around = []
        return self._mark()

    def stop(self, mark: Any) -> Any:
        around, self._around = self._around, []
        return mark, self._mark(), around

    def seconds(self, reading: Any) -> float:
        began, ended, around = reading
        # The host ran a whole round ahead of the device: rare, and then waiting is right.
        if not ended.query():
            ended.synchronize()
        waited = sum(first.elapsed_time(last) for first, last in zip(around[::2], around[1::2], strict=False))
        return float(began.elapsed_time(ended) - waited) / 1e3

    def _mark(self) -> Any:
        mark = self._event()
        mark.record()
        return mark

    def _wait(self, *_: object) -> None:
        self._around.append(self._mark())


def _nothing(*_: object) -> None: ...


def stopwatch(device: torch.device) -> Stopwatch:
    """The stopwatch for the device the model is on."""
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()


class Reports(NamedTuple):
    """What the other parts of the engine add to this rank's reports, each given when it is asked for."""

    digest: Callable[[], int]  # of the plan in force
    rate: Callable[[], float]  # the optimizer's learning rate
    options: Callable[[], float]  # of the optimizers, as one number
    outside: Callable[[], float]  # of parameters of the loss outside of the model, as one number
    differ: Callable[[int], object]  # called with the round if the ranks' such numbers differ
    model: Callable[[], torch.Tensor | float]  # of the model's parameters, as one number
    compare: Callable[[int, list[float]], object]  # called with the round and these numbers if they differ
    left_out: Callable[[], int]  # rounds whose optimizer step was left out on purpose
    described: Callable[[], str]  # the options of this rank's optimizer, for an error
    memory: Callable[[], tuple[float, float]] | None  # ``fits`` and ``ran_out``
    pieces: Callable[[Piece], list[float] | None]  # this rank's ``piece_reports.ROW``
    lost: exchange.Lost  # the error for a lost rank, which is not waited for, or None
    settle: Callable[[], None]  # called before a report while the interval before it is not collected yet


class Meter:
    """This rank's stopwatch, and its reports to the other ranks.

    members: say how rows travel. readings: also report CPU and memory of the machine, for forecasts that use them.
    pieces: work may move within a round, and each row also reports the pieces that the rank ran. drops: late pieces
        are not run, and each row also reports the samples that were.

    Attributes:
        due: The round at whose end the ranks report; the same on all of them.
        light: The rounds before the due one do not report their pieces; so it is always if no work moves.
        reported: The row of an interval is on its way, and not collected yet.
        running: The running ``OpenRound``; between rounds, the newest.
        limits: The ranks report what fits into their memory.
        counts: Some rank has given a count, so every round is announced.
    """

    def __init__(
        self,
        device: torch.device,
        members: Members,
        readings: bool,
        pieces: bool,
        drops: bool,
        reports: Reports,
    ) -> None:
        self._reports, self.limits = reports, reports.memory is not None
        self.due = 0
        self.light, self.reported = not pieces, False
        self._link = math.nan  # seconds of this rank's newest merge
        self._deciding = 0.0  # processor seconds that this rank's newest decision took
        self.drops = drops
        # Each row reports one round; else it may report several.
        self.by_itself = members.carries_rows or drops
        self._watch = stopwatch(device)
        self.lag = self._watch.lag  # rounds by which a measurement is late
        self._pieces, self._layout = pieces, layout(pieces, self.by_itself)
        self._exchange: Any = members.connect(self._layout)
        # Rows are sent beside the gradients, not summed with them.
        self.intervals = self._exchange is not None
        self._readings = Readings() if readings else None
        self.running: Any = None
        self._unreported: list[OpenRound] = []  # stopped, and not collected yet
        self._newest: tuple[int, Rows] | None = None  # number and received rows of an announcement
        self._sequence = -1  # number of the next announcement: one for each round begun, and one for a flush
        self._announced = -1  # number of the newest announcement that was made
        # Whether losses are added after a round's gradients are ready; None before the first round's end.
        self._further: bool | None = None
        self._waits = False  # a row waits for the end of the round's step, since it might have such losses
        self._until = math.inf  # when the wait for other ranks ends, by ``time.monotonic``
        self.counts = False

    def start(self, step: int, epoch: int, began: float) -> None:
        """Round ``step`` begins, at ``began`` by ``time.perf_counter``."""
        self._sequence += 1
        carry = self.running.after if self.running is not None else 0.0
        self.running = OpenRound(step, epoch, began, carry, self._watch.start())

    def loss_now(self, batch: int) -> float:
        """The mean loss over all ranks of the newest round, which has ``batch`` samples. Collective."""
        running = self.running
        own = running.samples if self.drops and math.isnan(running.count) else running.count
        total, count = np.sum(peers.gather((float(running.loss), own)), axis=0)
        return float(total / (batch if math.isnan(count) else count or math.nan))

    def where(self, rounds: int) -> tuple[int, bool]:
        """The round that this rank is in, and whether it has done its part of it. rounds: complete ones, which is the
        answer before a round begins. Called from a thread."""
        running = self.running
        if running is None or running.ended:
            return rounds if running is None else running.step + 1, False
        return running.step, running.reading is not None

    def stop(self, piece: Piece) -> None:
        """The running round's last gradient is ready, with that of this piece: announce the interval if it is due."""
        running = self.running
        reading = self._watch.stop(running.mark)
        running.read(piece.plan, reading, None if self.light else self._reports.pieces(piece))
        self._unreported.append(running)
        counts = self.counts or running.count == running.count  # they are needed before the step
        if running.step >= self.due:
            if self.reported:
                self._reports.settle()
            running.reports(self._reports.model())
            self.reported = True
            self._waits = self._further is not False and not (counts or self.drops)
            if not self._waits:
                self._announce()
        elif counts:
            self._announce()

    def step_ended(self, seconds: float) -> None:
        """The running round is over, after a step of ``seconds``."""
        running = self.running
        running.step_ended(seconds)
        if running.further or self._further is None:
            self._further = running.further
        if self._waits:
            self._announce()

    def row(self, plan: RoundPlan, pieces: list[float] | None) -> Rows:
        """This rank's row of the running round alone, which runs by ``plan``, as it is now; shape ().

        pieces: the numbers of its ``piece_reports.ROW``, if work may move within a round."""
        running = self.running
        running.read(plan, self._watch.stop(running.mark), pieces)
        running.reports(self._reports.model())
        return np.array(self._row([running], True)).view(self._layout)[0]

    @property
    def counted(self) -> float | None:
        """The count that this rank's losses of the running round are means over; None if it is the samples."""
        return None if self.running is None or math.isnan(self.running.count) else self.running.count

    def committed(self, rows: Rows) -> None:
        """The running round's gradients are summed, and the ``rows`` of all ranks, (n,), came with them."""
        self._unreported = [self.running]
        self._newest, self.reported = (self._announced, rows), True

    def merged(self, seconds: float) -> None:
        """The seconds that the newest merge took on this rank, or a round beyond the rank's own."""
        self._link = seconds

    def decided(self, due: int, light: bool) -> None:
        """The ranks report next at the end of round ``due``; ``light``: the rounds before it are not reported."""
        self.due, self.light = due, light or not self._pieces

    def took(self, deciding: float) -> None:
        """The newest decision took this many processor seconds."""
        self._deciding = deciding

    def wait_until(self, moment: float) -> None:
        """From now on wait for other ranks until this moment by ``time.monotonic``."""
        self._until = moment

    def restart(self, rounds: int) -> None:
        """Go on after ``rounds`` complete rounds: earlier ones are not reported any more."""
        self.due, self.light, self.reported, self._waits = rounds, not self._pieces, False, False
        self._unreported.clear()

    def drop(self, step: int) -> None:
        """Round ``step`` was left unfinished, and may be run again."""
        if self.intervals and self._unreported and self._unreported[-1].step == step:
            self._unreported.pop()
            self.reported = self._waits = False
        self.running = None

    def dropped(self, step: int) -> None:
        """Round ``step`` was left after its gradients were summed: check that all ranks have left it. Collective.
        Raises PacelineError or WorkerError if the others went on, since this rank is missing from their next sums."""
        if not self.intervals:
            return
        words = (
            f"round {step} was left on this rank after its backward pass, before pace.step(optimizer), and the other "
            "ranks went on; expected a loop to be left on all ranks in the same round, or on none"
        )
        self._sequence += 1
        row = self._row([], False)
        row[0] = -2.0 - step
        self._send(row)
        if (self._received(self._late(words))["first"] != row[0]).any():
            raise PacelineError(words)

    def report_rest(self) -> None:
        """The loop was left, on all ranks: announce the rounds that are not reported yet. Who collects them learns
        of lost ranks."""
        if self._unreported and not self.reported:
            self._sequence += 1
            self.reported = True
            with suppress(WorkerError):
                self._announce()

    def flush(self) -> tuple[list[OpenRound], Rows | None]:
        """Announce and ``collect`` all rounds not reported yet, on a device also the newest one. Collective."""
        if not self._unreported:
            return [], None
        self._sequence += 1
        self._announce(0)
        return self.collect()

    def collect(self) -> tuple[list[OpenRound], Rows]:
        """The rounds of the interval that was announced, none if there is no reading yet, and all ranks' rows of
        them, (n,)."""
        rows, self.reported = self._received(), False
        same = list(zip(*[rows[name].tolist() for name in SAME], strict=True))
        rounds = int(same[0][0])
        interval, self._unreported = self._unreported[:rounds], self._unreported[rounds:]
        if same.count(same[0]) != len(same):
            check_same(self.due, rows)
            check_options(self.due, rows["options"].tolist(), self._reports.described)
            if differ(rows["outside"].tolist()):
                self._reports.differ(self.due)
        models = rows["model"].tolist()
        if min(models) != max(models):  # so it is with NaN
            self._reports.compare(self.due, models)
        self.counts = self.counts or not np.isnan(rows["count"][:, :rounds]).all()
        return interval, rows

    def counted_by_all(self, step: int) -> float | None:
        """The sum of the ranks' counts, over which their losses in the running round are means; call after ``stop``.

        None if measurements are late (``lag``), so that it is not known yet. Raises PacelineError if some ranks gave
        a count and others did not.
        """
        if self.lag:
            return None
        words = (
            f"round {step}: this rank gave a count with the loss for the first time, and another rank did not; "
            "expected count= on all ranks or on none"
        )
        lost = None if self.counts or self.reported else self._late(words)
        rows = self._received(lost)
        counts = rows["count"][:, len(self._unreported) - 1].tolist()
        check_counts(step, counts)
        return float(rows["samples"].sum() if self.drops and math.isnan(counts[0]) else sum(counts))

    def close(self) -> None:
        """No more rounds."""
        self._watch.close()

    def _late(self, words: str) -> exchange.Lost:
        """Gives the error for a rank that does not announce this round soon: it has not done what this rank did."""
        until = monotonic() + LATE_SECONDS
        return lambda: self._lost() if monotonic() < until else WorkerError(words)

    def _received(self, lost: exchange.Lost | None = None) -> Rows:
        """All ranks' rows of the newest announcement, (n,)."""
        if self._waits:
            self._announce()
        if self._newest is None or self._newest[0] != self._announced:
            self._newest = self._announced, self._exchange.receive(self._announced, lost or self._lost)
        return self._newest[1]

    def _lost(self) -> WorkerError | None:
        return self._reports.lost() if monotonic() < self._until else WorkerError("the wait is over")

    def _announce(self, lag: int | None = None) -> None:
        known = self._unreported[: len(self._unreported) - (self.lag if lag is None else lag)]
        self._send(self._row(known, self.reported))

    def _send(self, row: list[float]) -> None:
        self._announced, self._waits = self._sequence, False
        self._exchange.send(self._sequence, _bytes(row), self._lost)

    def _row(self, known: list[OpenRound], whole: bool) -> list[float]:
        """The numbers of this rank's row, in the order of its fields, for the rounds whose readings are ``known``.
        whole: they are an interval."""
        rounds, unknown, reports = len(known), math.nan, self._reports
        first, epoch = (known[0].step, known[-1].epoch) if known else (-1, -1)
        readings, carries, losses, counts = zip(*map(MEASURED, known), strict=True) if known else ((),) * 4
        blank = [unknown] * ((1 if self.by_itself else MOST_ROUNDS) - rounds)
        row = [
            # A rank that joins would not know how many steps were left out before.
            *(first, rounds, reports.digest(), epoch, reports.left_out() if self.intervals else 0),
            self._deciding,
            *(sum(carries) / rounds if known else unknown, reports.rate(), reports.options()),
            reports.outside(),
            float(known[-1].model) if known else unknown,
            NO_LOSS not in losses if known else unknown,
            *((unknown, 0.0) if reports.memory is None else reports.memory()),
            *(self._readings.take() if self._readings and known and whole else (unknown, unknown)),
            self._link,
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
