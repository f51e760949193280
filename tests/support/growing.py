"""Runs that go on while somebody watches: rounds appended as an engine's recorder does."""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np

from paceline.runs import Recorder


def start(run_dir: Any, workers: int = 4, **config: Any) -> Recorder:
    """The record of a run that has no round yet."""
    base = {"policy": "level", "workers": workers, "global_batch": 64 * workers, "engine": "torch"}
    return Recorder.create(run_dir, base | {"model": "mlp", "data": "digits"} | config)


def go_on(recorder: Recorder, first: int, end: int, workers: int = 4, slow: int = 3, **extras: Any) -> None:
    """Rounds ``first`` to ``end`` of an equal split; from round 10 on, worker ``slow`` takes 4 times as long."""
    random = np.random.default_rng(first)
    loads = np.full(workers, 64)
    for t in range(first, end):
        pace = 1e-3 * np.exp(random.normal(0, 0.03, workers))
        if t >= 10 and slow >= 0:
            pace[slow] *= 4
        compute = loads * pace
        recorder.round(
            round=t, epoch=t // 50, time=0.3 * (t + 1), seconds=compute.max() + 2e-3, batch=int(loads.sum()),
            loads=loads, compute=compute, overhead=np.full(workers, 5e-4), shares=loads / loads.sum(),
            loss=2.3 / (1 + t / 50), **extras,
        )  # fmt: skip


if __name__ == "__main__":  # growing.py RUN_DIR FIRST END SECONDS: one round every so many seconds
    run_dir, first, end, every = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    with start(run_dir) as recorder:
        for t in range(first, end):
            go_on(recorder, t, t + 1)
            time.sleep(every)
        recorder.finish()
