"""A forecast that trains beside the training it serves: a daemon thread at low priority.

    with Background(create("narx"), shape=(n,)) as forecast:
        for each round:
            predicted = forecast.step(Reading(speed, cpu, memory))

Which prediction is newest then depends on the clock, and so may differ from rank to rank. One rank therefore
runs the forecast and sends n numbers to the others with the exchange of measurements. Had every rank computed
its own, all would have to wait for theirs (``wait=True``) and run on equal processors: matrix products round
differently on unlike ones, and training magnifies the last bit.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from types import TracebackType
from typing import Any, Self

import numpy as np

from paceline.errors import PacelineError
from paceline.forecast.protocol import AnyForecast, Reading
from paceline.rounds import Array

NICE = 10  # of 19: the thread yields to whatever else wants the processor


class Background:
    """Steps a forecast in a daemon thread; hands out the newest prediction that is finished.

    wait: finish each round's own prediction first: then equal to the forecast itself, and deterministic.
        Without it a prediction is at most one round late: ``step`` waits for the round before only.
    nice: the thread's priority, 0 to 19, where the system has priorities for threads (Linux).
    """

    def __init__(
        self, forecast: AnyForecast, shape: tuple[int, ...], *, wait: bool = False, nice: int = NICE
    ) -> None:
        if not 0 <= nice <= 19:
            raise PacelineError(f"nice={nice}: expected 0 (ordinary) to 19 (only when nobody else runs)")
        self._forecast = forecast
        self._state = forecast.init(shape)
        self._newest: Array = np.full(shape, np.nan)
        self._wait = wait
        self._nice = nice
        self._open = 0  # readings handed over whose predictions were not taken back yet
        self._readings: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[Array, Any] | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="paceline-forecast", daemon=True)
        self._thread.start()

    def step(self, reading: Reading) -> Array:
        """Hand over what is known before the next round; gives predicted speeds, shape (..., n).

        One round old at worst; NaN until the first is finished. An error of the forecast is raised here.
        """
        while self._open:
            self._take(self._results.get())
        # the caller may reuse its arrays
        kept = [None if x is None else np.array(x) for x in reading[1:]]
        self._readings.put(Reading(np.array(reading.speed), *kept))
        self._open += 1
        if self._wait:
            self._take(self._results.get())
        else:
            with contextlib.suppress(queue.Empty):
                self._take(self._results.get_nowait())
        return self._newest

    @property
    def state(self) -> Any:
        """The forecast's state after every reading so far, to save; waits for the thread."""
        while self._open:
            self._take(self._results.get())
        return self._state

    def close(self) -> None:
        """End the thread when it has finished what it was given; a second call does nothing."""
        self._readings.put(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self, result: tuple[Array, Any] | BaseException) -> None:
        self._open -= 1
        if isinstance(result, BaseException):
            raise result
        self._newest, self._state = result

    def _run(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            # on Linux this is the thread's own priority; elsewhere a thread has none
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        state = self._state
        while (reading := self._readings.get()) is not None:
            try:
                predicted, state = self._forecast.step(state, reading)
                self._results.put((predicted, state))
            except BaseException as error:  # handed to the caller, who is in another thread
                self._results.put(error)
