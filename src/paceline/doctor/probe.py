"""Watches a DistributedDataParallel module from its own hooks: what each rank loads, computes and waits for.

A step ends with the optimizer's step. From there on a rank's time is its own (loading, forward and backward
passes) until its last gradient is ready, and the others' (the all-reduce, and the wait for whoever is not there
yet) until its backward pass returns. Nothing is exchanged while the ranks train: each leaves its numbers in the
process group's store a few times in all, and rank 0 looks whether they have come, without waiting for them.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from paceline import runs
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.runs import Run
from paceline.torch import measure

WARM_UP = 2  # steps that are left out: allocations, DDP's first buckets
FIRST_REPORT = 10  # steps after which the ranks report first; then after twice as many, and so on
LAST_WAIT = 10.0  # seconds that rank 0 waits for the last report of the others
FIELDS = 5  # a step's wall seconds, own seconds, computing seconds, all-reduce seconds, samples

Done = Callable[[Run], None]


class Probe:
    """Watches ``steps`` optimizer steps of one model; on rank 0, ``done`` is called with the record at the end.

    model: a DistributedDataParallel module of at least two ranks; another one raises PacelineError.
    run_dir: where rank 0 leaves the record; None for a temporary place.
    """

    def __init__(
        self, model: Any, steps: int, run_dir: str | os.PathLike[str] | None, done: Done | None = None
    ) -> None:
        if not isinstance(model, DistributedDataParallel):
            raise PacelineError(
                f"{type(model).__name__}: expected a DistributedDataParallel module; wrap the model and watch the "
                "wrapped one"
            )
        group = model.process_group
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        if self.ranks < 2:
            raise PacelineError("1 rank: expected at least 2, as one alone waits for nobody; start more")
        if steps <= WARM_UP:
            raise PacelineError(f"steps={steps}: expected at least {WARM_UP + 1}")
        parameters = [p for p in model.parameters() if p.requires_grad]
        self._model, self._steps, self._done = model, int(steps), done
        self._ours = {id(p) for p in parameters}
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._record: runs.Recorder | None = None
        if self.rank == 0:
            self._record = self._create(run_dir)
        store = dist.distributed_c10d._get_default_store()  # the rendezvous, which every rank can reach
        self._store = dist.PrefixStore(f"paceline-doctor/{dist.get_global_rank(group, 0)}", store)
        device = parameters[0].device if parameters else torch.device("cpu")
        self._own, self._computing, self._reducing = (measure.stopwatch(device) for _ in range(3))
        self._step = 0
        self._ended = time.perf_counter()
        self._rows: Array = np.full((self._steps, FIELDS), np.nan)
        self._forward = self._ready = False  # in this step: passed forward; last gradient there
        self._samples = 0
        self._written = WARM_UP
        self._pending: list[int] = []  # reports that rank 0 still expects, as numbers of steps
        self._next_report = min(FIRST_REPORT, self._steps)
        self._own.start(0)
        self._handles = [
            model.register_forward_pre_hook(self._on_forward, with_kwargs=True),
            torch.autograd.graph.register_multi_grad_hook(parameters, self._on_gradients),
            register_optimizer_step_post_hook(self._on_optimizer),
        ]

    def detach(self) -> None:
        """Stop watching; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._record is not None:
            self._record.close()
        if self._temporary is not None:
            self._temporary.cleanup()
            self._temporary = None

    def _create(self, run_dir: str | os.PathLike[str] | None) -> runs.Recorder:
        if run_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="paceline-doctor-")
            run_dir = Path(self._temporary.name) / "run"
        facts = {"engine": "torch", "policy": "equal", "workers": self.ranks, "first_step": WARM_UP}
        return runs.Recorder.create(run_dir, facts)

    def _on_forward(self, _: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not (self._model.training and torch.is_grad_enabled()):
            return
        if not self._forward:
            self._forward = True
            self._computing.start(self._step)
        self._samples += _samples((arguments, named))

    def _on_gradients(self, _: object) -> None:
        if not self._model.require_backward_grad_sync or not self._forward or self._ready:
            return
        self._ready = True
        for watch in (self._own, self._computing):
            watch.stop(self._step)
        self._reducing.start(self._step)
        # DDP waits for its all-reduce in a callback that it queues after this one; so comes ours behind it.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(self._on_reduced))

    def _on_reduced(self) -> None:
        if self._ready and not self._reducing.stopped(self._step):
            self._reducing.stop(self._step)

    def _on_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if not self._ready or id(optimizer.param_groups[0]["params"][0]) not in self._ours:
            return
        self._on_reduced()
        now = time.perf_counter()
        self._rows[self._step, [0, 4]] = now - self._ended, self._samples
        self._ended = now
        self._step += 1
        known = self._step - self._own.lag
        if known > 0:
            self._read(known - 1)
        self._forward = self._ready = False
        self._samples = 0
        if self._step == self._steps:
            for step in range(max(known, 0), self._steps):
                self._read(step)
        if self._step >= self._next_report:
            self._report(min(max(known, 0), self._step) if self._step < self._steps else self._steps)
            self._next_report = min(2 * self._next_report, self._steps)
        if self._pending:
            self._collect(last=self._step == self._steps)
        if self._step == self._steps:
            self._finish()
        else:
            self._own.start(self._step)

    def _read(self, step: int) -> None:
        for column, watch in enumerate((self._own, self._computing, self._reducing), 1):
            self._rows[step, column] = watch.seconds(step)

    def _report(self, steps: int) -> None:
        self._store.set(f"{self._next_report}/{self.rank}", self._rows[:steps].tobytes())  # type: ignore[arg-type]  # bytes are what it keeps
        if self.rank == 0:
            self._pending.append(self._next_report)

    def _collect(self, last: bool) -> None:
        """On rank 0: write what all ranks have reported; wait for it at the end only."""
        at = self._pending[-1]
        keys = [f"{at}/{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + (LAST_WAIT if last else 0.0)
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                return  # a rank that is that late has left; what it reported before stands
            time.sleep(0.005)
        rows = [np.frombuffer(self._store.get(key)).reshape(-1, FIELDS) for key in keys]
        self._pending = []
        self._write(np.stack([row[: min(map(len, rows))] for row in rows], axis=1))

    def _write(self, rows: Array) -> None:
        """Append the rounds that are new; rows: (T, n, fields)."""
        assert self._record is not None
        clock = np.cumsum(rows[:, 0, 0])
        for step in range(self._written, len(rows)):
            wall, own, computing, reducing, samples = rows[step].T
            self._record.round(
                round=step - WARM_UP,
                epoch=0,
                time=float(clock[step] - clock[WARM_UP - 1]),
                seconds=float(wall[0]),
                batch=int(samples.sum()),
                loads=samples,
                compute=own,
                loading=np.maximum(own - computing, 0.0),
                reducing=reducing,
            )
        self._written = max(self._written, len(rows))

    def _finish(self) -> None:
        record, done = self._record, self._done
        try:
            if record is not None:
                record.finish()
                if done is not None:
                    done(runs.read(record.run_dir))
        except Exception as error:  # a watcher never ends the training
            said = str(error) if isinstance(error, PacelineError) else repr(error)
            print(f"paceline doctor could not tell what it found: {said}", flush=True)
        finally:
            self.detach()


def _samples(given: Any) -> int:
    """The first dimension of the first tensor in a forward pass's arguments; 0 where there is none."""
    if isinstance(given, torch.Tensor):
        return int(given.shape[0]) if given.ndim else 0
    parts = given.values() if isinstance(given, Mapping) else given if isinstance(given, list | tuple) else ()
    return next((found for found in map(_samples, parts) if found), 0)
