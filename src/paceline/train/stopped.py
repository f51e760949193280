"""Workers on this machine that are stopped, as by SIGSTOP: seen from outside, at any moment of their lives."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from paceline.errors import WorkerError
from paceline.torch.liveness.detector import FailureDetector

EVERY = 1.5  # seconds between two looks, at most: more of them count for no more


class Stopped:
    """Looks at processes again and again. pids: by rank. patience: seconds that one may be stopped."""

    def __init__(self, pids: Mapping[int, int], patience: float) -> None:
        self._processes = {rank: _process(pid) for rank, pid in pids.items()}
        self._detector = FailureDetector(patience, EVERY)

    def look(self, advice: str) -> None:
        """Raises WorkerError, with ``advice`` at its end, for a worker that has been stopped for too long."""
        now = time.monotonic()
        signs = {rank: None if _stands(process) else now for rank, process in self._processes.items()}
        for rank, seconds in self._detector.silent(now, signs).items():
            raise WorkerError(f"worker {rank} has been stopped, as by SIGSTOP, for {seconds:.0f} s; {advice}")


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
