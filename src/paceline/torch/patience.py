"""Says which ranks keep the others waiting, long before a collective's own timeout.

A frozen rank can't be told from a slow one but by a deadline; this one follows what rounds have been taking.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

TIMES = 10.0  # the longest of the recent rounds, and
LEAST_SECONDS = 20.0  # at least, before a rank is missed
RECENT = 20

Missed = Callable[[int, list[int], float], None]


def warn(step: int, ranks: list[int], seconds: float) -> None:
    """Name the ranks in a warning."""
    warnings.warn(sentence(step, ranks, seconds), RuntimeWarning, stacklevel=2)


def sentence(step: int, ranks: list[int], seconds: float) -> str:
    """Who is missed, and since when."""
    who = "rank " + ", ".join(str(r) for r in ranks)
    return (
        f"{who} has not ended its part of round {step} {seconds:.0f} s after this rank did; it may be frozen or "
        "cut off: if it stays so, end the run and go on from the last checkpoint"
    )


class Patience:
    """Watches this rank's wait for the others at the end of a round, from a thread that sleeps meanwhile.

    missing: the ranks that have not ended their part of a round. missed: called once a round when the deadline has
    passed, from that thread, with the round, these ranks and the seconds waited.
    """

    def __init__(
        self, missing: Callable[[], list[int]], missed: Missed, least: float = LEAST_SECONDS
    ) -> None:
        self._missing, self._missed, self._least = missing, missed, least
        self._rounds: deque[float] = deque(maxlen=RECENT)
        self._changed = threading.Condition()
        self._waiting: tuple[int, float] | None = None
        self._ended = False
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """This rank has done its part of the round."""
        if not self._rounds:
            return  # how long a round takes isn't known yet
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="patience", daemon=True)
            self._thread.start()
        self._waiting = step, max(self._least, TIMES * max(self._rounds))
        with self._changed:
            self._changed.notify()

    def end(self, seconds: float) -> None:
        """The round is over, after so many seconds."""
        self._waiting = None
        self._rounds.append(seconds)

    def drop(self) -> None:
        """The round was left unfinished."""
        self._waiting = None

    def close(self) -> None:
        """No more rounds."""
        self._waiting, self._ended = None, True
        with self._changed:
            self._changed.notify()

    def _watch(self) -> None:
        while not self._ended:
            with self._changed:
                waiting = self._waiting
                # Woken for the next round, or not in time: nobody needs to wake it at a round's end.
                woken = self._changed.wait(None if waiting is None else waiting[1])
            if woken or waiting is None or self._waiting != waiting:
                continue
            self._waiting = None
            ranks = self._missing()
            if ranks:
                self._missed(waiting[0], ranks, waiting[1])
