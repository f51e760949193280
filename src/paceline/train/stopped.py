"""Workers on this machine that are stopped, as by SIGSTOP: seen from outside, at any moment of their lives."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from paceline.errors import WorkerError

MOST_SECONDS = 5.0  # between two looks that count: a launcher that stood still itself blames nobody for it


class Stopped:
    """Looks at processes again and again. pids: by rank. patience: seconds that one may be stopped."""

    def __init__(self, pids: Mapping[int, int], patience: float) -> None:
        self._processes = {rank: _process(pid) for rank, pid in pids.items()}
        self._patience = patience
        self._seconds = dict.fromkeys(pids, 0.0)
        self._last = time.monotonic()

    def look(self, advice: str) -> None:
        """Raises WorkerError, with ``advice`` at its end, for a worker that has been stopped for too long."""
        now = time.monotonic()
        seconds, self._last = min(now - self._last, MOST_SECONDS), now
        for rank, process in self._processes.items():
            self._seconds[rank] = self._seconds[rank] + seconds if _stands(process) else 0.0
            if self._seconds[rank] >= self._patience:
                raise WorkerError(
                    f"worker {rank} has been stopped, as by SIGSTOP, for {self._seconds[rank]:.0f} s; {advice}"
                )


def _process(pid: int) -> psutil.Process | None:
    try:
        return psutil.Process(pid)
    except psutil.Error:
        return None  # it has ended already, which others see


def _stands(process: psutil.Process | None) -> bool:
    try:
        return process is not None and process.status() == psutil.STATUS_STOPPED
    except psutil.Error:
        return False
