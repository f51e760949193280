"""Late micro-batches of a round are dropped after a threshold: DropCompute (arXiv 2306.10598, Alg. 1)."""

from __future__ import annotations

import math
import statistics
from collections import deque

import numpy as np

from paceline.backup import dropcompute
from paceline.torch import peers, timing
from paceline.torch.meter import Meter, OpenRound
from paceline.torch.plan import Piece

WARM_UP = 20  # rounds in which nothing is dropped, before a threshold is found
RECENT = 32  # micro-steps whose median predicts the seconds of the next one
Traced = tuple[list[float], float]  # a round: the ends of its micro-steps, and its own seconds


class Drops:
    """Decides which micro-step is a rank's last in a round, if it drops those not begun by a threshold.

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
        now = timing.now() - running.mark
        if not piece.first:
            self._ended(now)
        running.ran(piece)
        expected = statistics.median(self._took) if self._took else 0.0
        if not piece.last and now + expected >= self.tau:
            self.cut = piece.step
            return piece._replace(last=True)
        return piece

    def again(self) -> None:
        """An epoch begins: its first round may have the number of one that was cut."""
        self.cut = -1

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
                self.tau = threshold_of(peers.gather(self._traced))
                self._traced = []


def threshold_of(traces: list[list[Traced]]) -> float:
    """The threshold for the rounds of all ranks (Alg. 2)."""
    most = max(len(ends) for trace in traces for ends, _ in trace)
    ends = np.full((len(traces[0]), len(traces), most), np.nan)
    for rank, trace in enumerate(traces):
        for number, (each, _) in enumerate(trace):
            ends[number, rank, : len(each)] = each
    rounds = np.array([[seconds for _, seconds in trace] for trace in traces]).min(axis=0)
    exchange = float(np.median(rounds - np.nanmax(ends, axis=(1, 2))))
    return dropcompute.threshold(ends, max(exchange, 0.0))
