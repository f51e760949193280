"""Puts a training run's rounds on record; rank 0 holds the pen."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from paceline.runs import Recorder
from paceline.torch.measuring.open_rounds import RoundResult


class RoundRecorder:
    """Writes each RoundResult as a line of the record."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._start: float | None = None

    def round(self, result: RoundResult) -> None:
        """Append one finished round."""
        now = time.perf_counter()
        if self._start is None:
            self._start = now - result.seconds
        self.recorder.round(
            round=result.step,
            epoch=result.epoch,
            time=now - self._start,
            seconds=result.seconds,
            batch=result.batch,
            loads=result.loads.tolist(),
            compute=result.compute,
            overhead=result.overhead,
            shares=result.shares,
            loss=result.loss,
            **_pieces(result),
        )

    def close(self, **extras: Any) -> dict[str, Any]:
        """Write the summary and close; returns the summary."""
        summary = self.recorder.finish(**extras)
        self.recorder.close()
        return summary


def _pieces(result: RoundResult) -> dict[str, Any]:
    if result.within is None:
        return {}
    at_once, cost, pieces, seconds = result.within
    return {"pieces": pieces, "piece_seconds": seconds, "at_once": at_once, "piece_cost": cost}


def record_run(run_dir: str | Path, *, policy: str, workers: int, global_batch: int) -> RoundRecorder:
    """Start the record of a run that a user's own script makes."""
    config = {"engine": "torch", "policy": policy, "workers": workers, "global_batch": global_batch}
    return RoundRecorder(Recorder.create(run_dir, config))
