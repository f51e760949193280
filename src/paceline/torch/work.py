"""This rank's part of the running round: timed, claimed if work moves, cut short if late micro-batches are dropped,
and committed when its gradients are there."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from paceline.backup import dropcompute
from paceline.torch import peers, waits
from paceline.torch.claims import Claims
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.measuring.meter import Meter, OpenRound
from paceline.torch.plan import Claim, Piece, Source
from paceline.torch.terms import Terms

WARM_UP = 20  # rounds in which nothing is dropped, before a threshold is found
RECENT = 32  # micro-steps whose median predicts the seconds of the next one
Traced = tuple[list[float], float]  # a round: the ends of its micro-steps, and its own seconds


class Drops:
    """Decides which micro-step is a rank's last in a round, if it drops those not begun by a threshold (DropCompute,
    arXiv 2306.10598, Alg. 1).

    The last one sums the gradients over the ranks, so it has to be known before it begins: it is the one that is
    expected to be running at the threshold. A rank that is held up in an earlier one runs another micro-step.

    tau: the threshold, in seconds since the round's beginning, with the loading of samples; NaN if it is found from
    the rounds of the warm-up. meter: that of this rank; it is notified of each micro-step.
    """

    def __init__(self, tau: float, meter: Meter) -> None:
        self.tau = tau
        self.cut = -1  # the newest round whose further micro-steps were dropped
        self._meter = meter
        self._took: deque[float] = deque(maxlen=RECENT)  # seconds of the newest micro-steps
        self._running: OpenRound | None = None
        self._ends: list[float] = []  # ends of the running round's micro-steps
        self._traced: list[Traced] = []  # rounds of the warm-up

    def begins(self, piece: Piece) -> Piece:
        """The piece of a micro-step that is about to begin, marked last if all later ones are dropped. Collective in
        the first micro-step of the round after the warm-up."""
        running = self._meter.running
        if piece.first:
            self._round_is_over()
            self._running, self._ends = running, []
        now = waits.now() - running.mark
        if not piece.first:
            self._ended(now)
        self._meter.ran(piece)
        expected = statistics.median(self._took) if self._took else 0.0
        if not piece.last and now + expected >= self.tau:
            self.cut = piece.step
            return piece._replace(last=True)
        return piece

    def _ended(self, at: float) -> None:
        self._took.append(at - (self._ends[-1] if self._ends else 0.0))
        self._ends.append(at)

    def _round_is_over(self) -> None:
        before = self._running
        if before is None or not before.ended:  # there was none, or it was left
            return
        self._ended(before.reading)
        if math.isnan(self.tau):
            self._traced.append((self._ends, before.ended - before.began))
            if len(self._traced) == WARM_UP:
                self.tau = found(peers.gather(self._traced))
                self._traced = []


def found(traces: list[list[Traced]]) -> float:
    """The threshold for the rounds of all ranks (Alg. 2)."""
    most = max(len(ends) for trace in traces for ends, _ in trace)
    ends = np.full((len(traces[0]), len(traces), most), np.nan)
    for rank, trace in enumerate(traces):
        for number, (each, _) in enumerate(trace):
            ends[number, rank, : len(each)] = each
    rounds = np.array([[seconds for _, seconds in trace] for trace in traces]).min(axis=0)
    exchange = float(np.median(rounds - np.nanmax(ends, axis=(1, 2))))
    return dropcompute.threshold(ends, max(exchange, 0.0))


class Work:
    """This rank's part of rounds. Call ``begins`` for a round; for each piece ``halfway`` in its backward pass, then
    ``over`` if it is not the round's last. If rows travel with the gradients, ``commit`` after each backward pass.

    Constructing it is collective, unless the reducer has its own counter.
    """

    def __init__(self, device: torch.device, reducer: Reducer, terms: Terms) -> None:
        self.reducer, self._own_steps = reducer, terms.merge is not None
        self.claims: Claims | None = None
        if terms.moves_work:
            most, cell = int(terms.most[peers.rank()]), terms.cell
            if terms.merge is not None and terms.micro_batch:
                cell = terms.micro_batch  # each micro-batch is a step
            largest = None if cell else terms.micro_batch
            self.claims = Claims(device, terms.unit, largest, most, cell, reducer.counter)
        drops = terms.drop is not None
        self.meter = Meter(device, reducer, terms.balancer.needs_readings, terms.moves_work, drops)
        self.drops = None if terms.drop is None else Drops(terms.drop, self.meter)
        self.meter.digest = lambda: terms.balancer.digest
        self.meter.report = self._report

    def begins(self, workers: int | None) -> None:
        """A round begins, and its clock has started. workers: ranks that take part, by default all."""
        if self.claims is not None:
            self.claims.workers = peers.ranks() if workers is None else workers
            self.claims.open(time.perf_counter())  # planning is not part of the first piece's time

    def claimed(self, source: Source, piece: Piece) -> Iterator[tuple[Any, Piece]]:
        """The micro-steps of this rank's claims before ``piece``, if it is the round's last planned one."""
        if piece.division is None or not piece.last or self.claims is None:
            return
        while (claimed := self.claims.take(piece.division)) is not None:
            at, left = claimed.start, len(claimed.sizes)
            for batch, size, parts in zip(source.claimed(claimed), claimed.sizes, claimed.parts, strict=True):
                left -= 1
                yield batch, piece._replace(samples=size, parts=parts, last=False, claims=not left, start=at)
                at += size

    def claims_ahead(self, notify: Callable[[Claim], object] | None, early: bool) -> None:
        """Call ``notify`` with each claim from now on. early: claim while the piece before it runs."""
        if self.claims is not None:
            self.claims.claimed, self.claims.early = notify, early

    def waited(self, seconds: float) -> None:
        """The next piece was held up by this much, since it had only just been claimed."""
        if self.claims is not None:
            self.claims.waited(seconds)

    def halfway(self, piece: Piece) -> None:
        """The backward pass of a piece begins; the next piece may be claimed and loaded meanwhile."""
        if self.claims is not None and not (piece.last or self.meter.light):
            self.claims.halfway(piece)

    def over(self, piece: Piece) -> None:
        """The micro-step of a piece is over; it is not this rank's last in the round."""
        if self.claims is not None and not (self.meter.light or self.reducer.travels):
            self.claims.done(piece)

    def commit(self, piece: Piece) -> Piece:
        """The backward pass of a piece has ended, and rows travel with the gradients: sum them if it is the round's
        last. Returns the piece, marked last only if the round is complete on all ranks."""
        reducer, meter, claims = self.reducer, self.meter, self.claims
        reducer.ran(piece)
        if claims is not None:
            claims.done(piece, last=True)
        meter.ran(piece)
        if not (piece.last or reducer.retrying):
            return piece
        while not (reducer.retrying and reducer.claim()):
            began, own = time.perf_counter(), waits.now()
            row = meter.row(None if claims is None else claims.report(as_one=reducer.retrying))
            if reducer.commit(piece.step, row, None if self._own_steps else meter.counted):
                meter.committed()
                return piece._replace(last=True)
            meter.waited(waits.now() - own)
            self.waited(time.perf_counter() - began)
        return piece._replace(last=False)

    def _report(self, piece: Piece) -> list[float] | None:
        """The report on a round's pieces, made when the last gradient of its last piece is there."""
        if self.claims is None:
            return None
        self.claims.done(piece, last=True)
        return self.claims.report()

    def close(self, failed: bool) -> None:
        """End; no rounds may follow. failed: do not wait for other ranks."""
        self.reducer.close(failed)
        self.meter.close()
        if self.claims is not None:
            self.claims.close()
