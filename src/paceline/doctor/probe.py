"""Watches a DistributedDataParallel module and measures each rank's time, without a change to the training.

The ranks exchange nothing while they train: a few times in all, each writes its numbers to the process group's store,
and rank 0 checks whether they are there, without waiting for them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline import runs
from paceline.attach.places import place
from paceline.doctor.hooks import COUNTS, Hooks, drawn_by_step
from paceline.doctor.phases import Phase
from paceline.doctor.watches import Lines
from paceline.errors import PacelineError, whole
from paceline.rounds import Array
from paceline.runs import Run

WARM_UP = 2  # steps that are not measured, because of allocations and DDP's first buckets
FIRST_REPORT = 10  # steps before the ranks' first report; the interval then doubles after each report
LAST_WAIT = 10.0  # seconds that rank 0 waits for the last report of the others
FIELDS = (
    len(Phase) + len(COUNTS) + 1
)  # numbers of a step: seconds of each phase, counts, samples of its loader

HOSTS = {  # by the module whose code wraps the model: the adapter of paceline.hosts
    "transformers.trainer": "transformers",
    "lightning.pytorch.strategies": "lightning",
    "pytorch_lightning.strategies": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
    "ray.train.torch": "ray_train",
    "accelerate.accelerator": "accelerate",
}

Done = Callable[[Run], None]


class Probe:
    """Watches ``steps`` optimizer steps of one model; at the end, rank 0 calls ``done`` with the record.

    model: a DistributedDataParallel module of at least two ranks; PacelineError is raised for anything else.
    run_dir: the directory in which rank 0 writes the record; None for a temporary one.
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
            raise PacelineError("1 rank: expected at least 2, because a single rank never waits; start more")
        whole("steps", steps, WARM_UP + 1)
        self._steps, self._done = int(steps), done
        self._open = ExitStack()
        self._record: runs.Recorder | None = None
        if self.rank == 0:
            if run_dir is None:
                temporary = tempfile.TemporaryDirectory(prefix="paceline-doctor-")
                run_dir = Path(self._open.enter_context(temporary)) / "run"
            facts = {"engine": "torch", "policy": "equal", "workers": self.ranks, "first_step": WARM_UP}
            self._record = runs.Recorder.create(run_dir, facts)
            self._open.callback(self._record.close)
        store = dist.distributed_c10d._get_default_store()  # the rendezvous, which every rank can reach
        self._store = dist.PrefixStore(f"paceline-doctor/{dist.get_global_rank(group, 0)}", store)
        self._host, self._step = host(sys._getframe(1)), 0
        self._rows: list[list[float]] = []
        self._written = WARM_UP
        self._clock = 0.0  # seconds of the steps written so far
        self._pending: list[int] = []  # step numbers of the reports that rank 0 still expects
        self._next_report = min(FIRST_REPORT, self._steps)
        self._hooks = Hooks(model, self._on_step)
        self._hooks.note("made", place(sys._getframe()))
        self._lines = Lines(lambda: self._hooks.phases.now)

    def detach(self) -> None:
        """Stop watching; safe to call twice."""
        self._hooks.remove()
        self._lines.stop()
        self._open.close()

    def _on_step(self) -> None:
        self._step += 1
        last = self._step == self._steps
        self._rows += self._hooks.steps(all_of_them=last)
        if self._step >= self._next_report:
            self._report()
            self._next_report = min(2 * self._next_report, self._steps)
        if self._pending:
            self._collect(last)
        if last:
            self._finish()

    def _report(self) -> None:
        hooks = self._hooks
        head: dict[str, Any] = {"lines": self._lines.found(), "loader": hooks.loader, "host": self._host}
        head |= {"places": hooks.places, "others": hooks.others, "compares": hooks.compares}
        head |= {"counted": hooks.counted}
        drawn = drawn_by_step(hooks.batches)[: len(self._rows)]
        rows = np.column_stack([np.array(self._rows, float), np.array(drawn, float)])
        content = json.dumps(head).encode() + b"\n" + rows.tobytes()
        self._store.set(f"{self._next_report}/{self.rank}", content)  # type: ignore[arg-type]  # the store keeps bytes
        if self.rank == 0:
            self._pending.append(self._next_report)

    def _collect(self, last: bool) -> None:
        """Write what all ranks have reported, on rank 0; wait for the reports only at the end."""
        at = self._pending[-1]
        keys = [f"{at}/{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + (LAST_WAIT if last else 0.0)
        while not self._store.check(keys):
            if time.monotonic() >= deadline:
                return  # a rank that is so late has ended; its earlier reports are on record
            time.sleep(0.005)
        self._pending = []
        parts = [self._store.get(key).partition(b"\n") for key in keys]
        rows = [np.frombuffer(numbers).reshape(-1, FIELDS) for _, _, numbers in parts]
        self._write(
            np.stack([row[: min(map(len, rows))] for row in rows], axis=1),
            [json.loads(head) for head, _, _ in parts],
        )

    def _write(self, rows: Array, heads: list[dict[str, Any]]) -> None:
        """Append the rounds that are new. rows: shape (T, n, fields). heads: each rank's description of its loop."""
        assert self._record is not None
        # Balancing divides what the loaders draw. If one rank draws for the others, its count is not its own.
        drawn = rows[:, :, -1].min(axis=1) > 0
        for head in heads:
            head["sure"] = bool(drawn[WARM_UP:].mean() > 0.5) or head["counted"]
        for step in range(self._written, len(rows)):
            spent, counts = rows[step, :, : len(Phase)].T, rows[step, :, len(Phase) :].T
            loads = counts[-1] if drawn[step] else counts[0]
            own = spent.sum(axis=0) - spent[Phase.REDUCE]
            wall = float(spent[:, 0].sum())
            self._clock += wall
            self._record.round(
                round=step - WARM_UP,
                epoch=0,
                time=self._clock,
                seconds=max(wall, float(own.max())),
                batch=int(loads.sum()),
                loads=loads,
                compute=own,
                overhead=spent[Phase.FINISH],  # an optimizer's step does not depend on the number of samples
                phases={phase.name: spent[phase] for phase in Phase},
                counts=dict(zip(COUNTS[1:4], counts[1:4], strict=True)),
                parts=counts[[4, 5, 2]].T,
                collecting=counts[6],
                loop=heads if step == len(rows) - 1 else None,
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
            reason = str(error) if isinstance(error, PacelineError) else repr(error)
            print(f"paceline doctor cannot report its findings: {reason}", flush=True)
        finally:
            self.detach()


def host(frame: FrameType | None) -> str:
    """The outermost framework whose code ``frame`` is running in; "" if it is only the script's own."""
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        adapters = (adapter for name, adapter in HOSTS.items() if f"{module}.".startswith(f"{name}."))
        found = next(adapters, found)
        frame = frame.f_back
    return found
