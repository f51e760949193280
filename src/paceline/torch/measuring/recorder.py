"""Records rounds, on rank 0: those of ``Pace``, and the steps of any DistributedDataParallel script, so that
``paceline whatif`` can estimate the time that it lost.

    recorder = Recorder(ddp, "runs/mine")
    for images, labels in loader:
        recorder.start(len(images))
        loss_of(ddp(images), labels).backward()
        optimizer.step()
        ...
    recorder.close()

The training is not changed: nothing is balanced, and no rank waits for the record.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from paceline import runs
from paceline.errors import PacelineError
from paceline.rounds import RoundResult
from paceline.torch import peers
from paceline.torch.measuring import exchange, measure

ROW = np.dtype([("step", "f8"), ("seconds", "f8"), ("load", "f8")])  # of a rank and a step


class Recorder:
    """Records each step's seconds of computation on every rank, without the wait for others, and the loads.

    model: the DistributedDataParallel module (or a plain one in a single process).
    run_dir: a new directory for the record; rank 0 writes it.
    config: further facts for the record, such as ``policy="my own"``.

    Construct and call it in the same way on all ranks. Raises PacelineError if the directory cannot be made.
    """

    def __init__(self, model: torch.nn.Module, run_dir: str | Path, **config: Any) -> None:
        self._model = model
        parameters = [p for p in model.parameters() if p.requires_grad]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._record: runs.Recorder | None = None
        wrong = ""
        if peers.rank() == 0:
            facts = {"engine": "torch", "policy": "recorded", "workers": peers.ranks()}
            try:
                self._record = runs.Recorder.create(run_dir, facts | config)
            except PacelineError as error:
                wrong = str(error)
        wrong = peers.gather(wrong)[0]  # all ranks raise, so that none goes on alone
        if wrong:
            raise PacelineError(wrong)
        self._watch = measure.stopwatch(device)
        self._exchange = exchange.connect(ROW)
        self._hook = torch.autograd.graph.register_multi_grad_hook(parameters, self._gradients_ready)
        self._steps = 0
        self._first = 0.0
        self._began: dict[int, float] = {}
        self._mark: Any = None  # of the running step
        self._readings: dict[int, Any] = {}
        self._loads: dict[int, int] = {}
        self._walls: dict[int, float] = {}
        self._closed = False

    def start(self, samples: int) -> None:
        """A step begins with this many samples on this rank, before their forward pass."""
        now = time.perf_counter()
        if self._steps:
            self._end(self._steps - 1, now)
        self._began[self._steps], self._loads[self._steps] = now, int(samples)
        self._mark = self._watch.start()
        self._steps += 1

    def close(self) -> None:
        """End the last step and the record. Safe to call twice; call it before the process group ends."""
        if self._closed:
            return
        self._closed = True
        if self._steps:
            last = self._steps - 1
            self._end(last, time.perf_counter())
            self._write(last)
            for late in range(1, self._watch.lag + 1):
                self._send(last + late)
                self._write(last + late)
        self._hook.remove()
        self._watch.close()
        self._exchange.close()
        if self._record is not None:
            self._record.finish()
            self._record.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._record is not None:
            self._record.close()  # without the last step, since the other ranks may be gone

    def _gradients_ready(self, _: object) -> None:
        accumulating = not getattr(self._model, "require_backward_grad_sync", True)
        if not accumulating and self._steps and self._steps - 1 not in self._readings:
            self._readings[self._steps - 1] = self._watch.stop(self._mark)

    def _end(self, step: int, now: float) -> None:
        if step not in self._readings:  # some parameters got no gradient
            self._readings[step] = self._watch.stop(self._mark)
        self._walls[step] = now - self._began[step]
        self._send(step)
        if step:  # a step later the rows of all ranks are certain to be there
            self._write(step - 1)

    def _send(self, step: int) -> None:
        ready = step - self._watch.lag
        row = np.full((), np.nan, ROW)
        if ready >= 0:
            row["step"], row["seconds"] = ready, self._watch.seconds(self._readings.pop(ready))
            row["load"] = self._loads.pop(ready)
        self._exchange.send(step, row)

    def _write(self, sent: int) -> None:
        rows = self._exchange.receive(sent)
        if np.isnan(rows["step"][0]):
            return
        step = int(rows["step"][0])
        wall, began = self._walls.pop(step), self._began.pop(step)
        if step == 0:
            self._first = began
        if self._record is None:
            return
        self._record.round(
            round=step,
            epoch=0,
            time=began + wall - self._first,
            seconds=wall,
            batch=int(rows["load"].sum()),
            loads=rows["load"],
            compute=rows["seconds"],
        )


class RoundRecorder:
    """Writes each RoundResult of ``Pace`` as a line of the record."""

    def __init__(self, recorder: runs.Recorder) -> None:
        self.recorder = recorder
        self._start: float | None = None

    def round(self, result: RoundResult, events: Sequence[Any] = ()) -> None:
        """Append one finished round. events: what happened in it, in types that JSON has."""
        if self._start is None:
            self._start = result.ended - result.seconds
        self.recorder.round(
            round=result.step,
            epoch=result.epoch,
            time=result.ended - self._start,
            seconds=result.seconds,
            batch=result.batch,
            loads=result.loads.tolist(),
            compute=result.compute,
            overhead=result.overhead,
            shares=result.shares,
            loss=result.loss,
            **({} if result.within is None else result.within._asdict()),
            **({"parts": result.parts} if result.parts is not None else {}),
            **{
                name: value.tolist()
                for name in ("ran_out", "links", "dropped_loads")
                if (value := getattr(result, name)) is not None
            },
            **({"events": list(events)} if events else {}),
        )

    def close(self, **extras: Any) -> dict[str, Any]:
        """Write the summary and close; returns the summary."""
        summary = self.recorder.finish(**extras)
        self.recorder.close()
        return summary


def record_run(run_dir: str | Path, *, policy: str, workers: int, global_batch: int) -> RoundRecorder:
    """Start the record of a run of a user's own script."""
    config = {"engine": "torch", "policy": policy, "workers": workers, "global_batch": global_batch}
    return RoundRecorder(runs.Recorder.create(run_dir, config))
