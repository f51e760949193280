"""The engine of ``paceline train --engine ray``, with the same data, models, record and report as under torchrun."""

from __future__ import annotations

import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.learners.images import Images
from paceline.paramserver.engine import Update
from paceline.paramserver.samples import Epochs
from paceline.ray.server import Server
from paceline.ray.worker import Gradient, Program
from paceline.rounds import Vector
from paceline.runs import Recorder, events
from paceline.torch.options import min_samples_of
from paceline.train import slowdown
from paceline.train.checkpoint import Checkpoints
from paceline.train.checks import server as server_options
from paceline.train.config import TrainConfig

CHECKPOINT = "server.npz"
# Fields of an update that are recorded under their own names.
SAME = ("seconds", "batch", "shares", "loss", "quorum", "present", "rate", "staleness", "dropped_samples")


def run(
    config: TrainConfig, run_dir: Path, on_event: Callable[[dict[str, Any]], None], resume: bool = False
) -> dict[str, Any]:
    """Train on Ray; returns the summary.

    Raises PacelineError for an error in the input, WorkerError if a server actor or all workers died.
    """
    data = datasets.load(config.data)
    learner = Images(data, config.model, config.seed, standardize=False)
    samples = len(data.x_train)
    epochs = config.epochs if config.steps is None else -(-config.steps * config.global_batch // samples) + 1
    options = server_options(config, min_samples_of(learner.model))
    pool = Epochs(samples, epochs, config.seed, options.pairs())
    kept = _checkpoints(run_dir)
    state = _go_on(kept, pool) if resume else None
    if kept.note:
        on_event({"type": "note", "text": kept.note})
    keep = (0 if state is None else int(state["version"])) if resume else None
    facts = config.as_dict() | {"engine": "ray"}
    delay = slowdown.create(config, lambda: [_seconds_per_sample(config, learner, samples)] * config.workers)
    program = images_program(config, data)
    with Server(program, options, pool, address=config.address, delay=delay, state=state) as server:
        recorder = Recorder.create(run_dir, facts, resume=keep)
        try:
            if delay is not None and delay.words:
                on_event({"type": "note", "text": delay.words})
            log = _Log(config, kept, recorder, server, pool, on_event)
            server.on_update = log
            first = server.updates
            on_event({"type": "start", "rounds": log.rounds, "first": first, "policy": config.policy})
            values = server.run(updates=config.steps)
            log.save()
            on_event({"type": "test"})
            _, accuracy = learner.test(values, server.buffers)
            lost = {"dropped": log.dropped, "dropped_samples": log.dropped_samples}  # unused gradients
            return recorder.finish(test_accuracy=accuracy, run_dir=str(run_dir), **lost)
        finally:
            recorder.close()


def images_program(config: TrainConfig, data: datasets.Data) -> Program:
    """The workers' program: the configuration's model and data."""
    model, seed = config.model, config.seed

    def program(worker: int) -> tuple[Vector, Gradient]:
        import torch

        torch.set_num_threads(1)
        learner = Images(data, model, seed, standardize=False)
        gradient: Any = functools.partial(learner.gradient)
        gradient.buffers = learner.buffers  # the server also keeps the model's buffers
        return learner.start(), gradient

    return program


class _Log:
    """Records and shows each update, and saves checkpoints."""

    def __init__(
        self,
        config: TrainConfig,
        kept: Checkpoints,
        recorder: Recorder,
        server: Any,
        pool: Epochs,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config, self._kept, self._recorder = config, kept, recorder
        self._server, self._pool, self._on_event = server, pool, on_event
        self._used = int(pool.uses.sum())
        self._saved = server.updates
        self.dropped: dict[str, int] = {}
        self.dropped_samples = 0
        self._costs = events.Costs()
        self.rounds = config.rounds(pool.samples)

    def __call__(self, update: Update) -> None:
        present = np.zeros(self._config.workers, bool)
        present[list(self._server.present())] = True
        there = present | (update.loads > 0)
        loads = [int(load) if here else None for load, here in zip(update.loads, there, strict=True)]
        epoch = min(self._used // self._pool.samples, self._pool.epochs - 1)
        self._used += update.batch
        for what, count in update.dropped.items():
            self.dropped[what] = self.dropped.get(what, 0) + count
        self.dropped_samples += update.dropped_samples
        compute = np.where((update.loads == 0) & there, 0.0, update.compute)
        costs = self._costs.of(update.seconds, update.changed)
        happened: dict[str, Any] = {"events": costs} if costs else {}
        self._recorder.round(
            round=update.step,
            epoch=epoch,
            time=update.ended,
            loads=loads,
            compute=compute,
            dropped=dict(update.dropped),
            **{name: getattr(update, name) for name in SAME},
            **(update.within._asdict() if update.within is not None else {}),
            **happened,
        )
        left = self._pool.epochs * self._pool.samples - self._used
        ahead = -(-left // max(update.batch, 1))
        self.rounds = self._config.steps or update.version + ahead
        ends = max(self.rounds, update.version)
        self._on_event({"type": "round", "round": update.step, "rounds": ends, "result": update})
        if update.version - self._saved >= self._config.checkpoint_every:
            self.save()

    def save(self) -> None:
        """Write a checkpoint, after all its updates are on record."""
        self._recorder.sync()
        self._saved = self._server.updates
        state = self._server.state() | self._pool.state_dict()
        buffer = io.BytesIO()
        np.savez(buffer, **{name: value for name, value in state.items() if value is not None})
        self._kept.save(buffer.getvalue())


def done(config: TrainConfig, run_dir: Path, samples: int) -> tuple[int, bool] | None:
    """The number of updates in a run's checkpoint, and whether these are all; None if there is no checkpoint."""
    arrays = _checkpoints(run_dir).load()
    if arrays is None:
        return None
    updates = arrays["version"]
    if config.steps is not None:
        return updates, updates >= config.steps
    return updates, int(arrays["uses"].sum()) >= config.epochs * samples


def _checkpoints(run_dir: Path) -> Checkpoints:
    return Checkpoints(run_dir / CHECKPOINT, _decode)


def _go_on(kept: Checkpoints, pool: Epochs) -> dict[str, Any] | None:
    """The server's state, after restoring the pool's; None if there is no checkpoint."""
    arrays = kept.load()
    if arrays is None:
        return None
    if len(arrays["uses"]) != pool.samples:
        raise PacelineError(
            f"{kept.newest} is for a training set of {len(arrays['uses'])} samples, the data has {pool.samples}; "
            "expected the data that the run began with"
        )
    pool.load_state_dict(arrays)
    return {name: arrays.get(name) for name in ("values", "velocity", "version", "buffers")}


def _decode(content: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    for name, kind, dimensions in (("version", "iu", 0), ("uses", "iu", 1), ("values", "f", 1)):
        array = arrays.get(name)
        if array is None or array.dtype.kind not in kind or array.ndim != dimensions:
            raise PacelineError(f"expected {name} in it, as the parameter server writes it")
    for name in ("version", "uses"):
        if (arrays[name] < 0).any():
            raise PacelineError(f"{name} is below 0; expected counts")
    return arrays | {"version": int(arrays["version"])}


def _seconds_per_sample(config: TrainConfig, learner: Images, samples: int) -> float:
    values, equal = learner.start(), min(samples, max(1, config.global_batch // config.workers))
    return slowdown.seconds_per_sample(lambda count: learner.gradient(values, np.arange(count)), equal)
