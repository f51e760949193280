"""What each worker of ``paceline train`` runs: an ordinary DDP training loop, with Paceline's lines in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data import datasets
from paceline.data.datasets import Data
from paceline.errors import PacelineError
from paceline.learners import models
from paceline.runs import Recorder
from paceline.torch import peers
from paceline.torch.feed.loader import BalancedLoader
from paceline.torch.liveness.shutdown import end_with_parent
from paceline.torch.liveness.stall import OnMissed
from paceline.torch.measuring.open_rounds import RoundResult
from paceline.torch.measuring.recorder import RoundRecorder
from paceline.torch.pace import Pace
from paceline.train import contents, slowdown
from paceline.train.checkpoint import Checkpoints
from paceline.train.config import TrainConfig

Emit = Callable[[dict[str, Any]], None]
TEST_CHUNK = 250


class ImageSet(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """A data set in memory, indexed a whole batch at a time."""

    def __init__(self, data: Data) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data.x_train)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self.__getitems__([index])
        return images[0], labels[0]

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        images = datasets.floats(self._data.x_train[indices])
        return torch.from_numpy(images), torch.from_numpy(self._data.y_train[indices])


class Prepared(NamedTuple):
    """slowed: seconds to sleep, as ``slowdown.create`` makes it; None where nothing is slowed down."""

    data: Data
    model: nn.Module
    loss_of: nn.Module
    slowed: slowdown.Slowdown | None
    optimizer: torch.optim.Optimizer


def as_it_stands(batch: Any) -> Any:
    """The collate function of data sets that make whole batches themselves."""
    return batch


def paced(config: TrainConfig, model: nn.Module, guard: Guard, **options: Any) -> Pace:
    """What a run's ranks divide their rounds by. options: further ones of Pace."""
    return Pace(
        model,
        config.global_batch,
        config.policy,
        limits=config.limits,
        micro_batch=config.micro_batch,
        quantum=config.quantum,
        weigh=config.weigh,
        loop="pieces",
        on_round=guard,
        on_nan="raise",  # which the guard does first, in words of its own
        **options,
    )


def loading(config: TrainConfig, pace: Pace, data: Data) -> BalancedLoader:
    """This rank's loader."""
    return pace.loader(
        ImageSet(data),
        seed=config.seed,
        num_workers=config.loader_workers,
        collate_fn=as_it_stands,
        worker_init_fn=end_with_parent,
    )


def train(
    config: TrainConfig, run_dir: Path, emit: Emit, resume: bool = False, missed: OnMissed = "warn"
) -> dict[str, Any] | None:
    """Train as one rank of the current process group; rank 0 returns the summary.

    emit: takes rank 0's progress as dicts with a "type" ("start", "round", "test", "note").
    missed: told of ranks that keep the others waiting, see Pace's ``on_missed``.
    resume: go on from the run directory's checkpoint (from the beginning where there is none yet).
    """
    rank, ranks = peers.rank(), peers.ranks()
    data, model, loss_of, slowed, optimizer = prepared(config)
    ddp = DistributedDataParallel(model) if ranks > 1 else model
    guard = Guard()
    pace = paced(config, ddp, guard, on_missed=missed, patience=config.patience)
    with pace:
        loader = loading(config, pace, data)
        kept = contents.of_run(run_dir)
        if resume:
            note = peers.together(lambda: go_on(kept, model, optimizer, pace, len(data.x_train)))
            peers.agree({"steps done": pace.rounds})
            if note and rank == 0:
                emit({"type": "note", "text": note})
        last = config.rounds(len(data.x_train))
        record = _record(config, run_dir, ranks, pace.rounds if resume else None) if rank == 0 else None
        if record is not None:
            guard.listeners.append(record.round)
            guard.listeners.append(lambda result: emit(progress(result, last)))
            emit({"type": "start", "rounds": last, "first": pace.rounds, "policy": config.policy})
        saved = pace.rounds
        while pace.rounds < last:
            for images, labels in loader:
                if slowed is not None:
                    time.sleep(slowed(rank, pace.rounds, len(labels), first=pace.first))
                loss = loss_of(ddp(images), labels)
                pace.backward(loss)
                if pace.step(optimizer):
                    if pace.rounds - saved >= config.checkpoint_every:
                        saved = pace.rounds
                        pace.flush()  # so that all its rounds are on record before it
                        if record is not None:
                            record.recorder.sync()
                            kept.save(packed(model, optimizer, pace))
                    if pace.rounds >= last:
                        break
        pace.flush()
        if record is not None:
            emit({"type": "test"})
            if pace.rounds > saved:  # the two that are kept are of different rounds
                record.recorder.sync()
                kept.save(packed(model, optimizer, pace))
        portion = accuracy(model, data, rank, ranks)
        if record is None:
            return None
        return record.close(test_accuracy=portion, run_dir=str(run_dir))


def prepared(config: TrainConfig) -> Prepared:
    """What a worker trains with, alike on all of them."""
    torch.manual_seed(config.seed)
    data = datasets.load(config.data)
    model = models.create(config.model, data.shape, data.classes)
    loss_of = nn.CrossEntropyLoss()
    timed, equal = trial(model, loss_of, data), max(1, config.global_batch // config.workers)
    # All ranks are timed at once.
    slowed = slowdown.create(config, lambda: peers.gather(slowdown.seconds_per_sample(timed, equal)))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    return Prepared(data, model, loss_of, slowed, optimizer)


class Guard:
    """Passes each round on, and stops every rank alike when the loss is no number any more."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[RoundResult], None]] = []

    def __call__(self, result: RoundResult) -> None:
        for listener in self.listeners:
            listener(result)
        if not math.isfinite(result.loss):
            raise PacelineError(
                f"the loss became {result.loss:g} at step {result.step}; lower the learning rate (--lr) or look "
                "for bad values in the data"
            )


def _record(config: TrainConfig, run_dir: Path, ranks: int, keep: int | None) -> RoundRecorder:
    facts = config.as_dict() | {"workers": ranks, "engine": "torch"}
    return RoundRecorder(Recorder.create(run_dir, facts, resume=keep))


def go_on(
    kept: Checkpoints[dict[str, Any]],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    pace: Pace,
    samples: int,
) -> str:
    """Go on from the run's checkpoint, where there is one; a sentence where that is not the newest."""
    parts = kept.load()
    if parts is None:
        return ""
    try:
        model.load_state_dict(parts["model"])
        optimizer.load_state_dict(parts["optimizer"])
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise PacelineError(
            f"the checkpoint in {kept.newest.parent} does not fit the run's model ({str(error).splitlines()[0]}); "
            "put back the run's own"
        ) from error
    pace.load_state_dict(parts["pace"])
    if pace.samples_done > samples:
        raise PacelineError(
            f"the checkpoint in {kept.newest.parent} has {pace.samples_done} samples of an epoch behind it, the data "
            f"has {samples}; expected the data that the run began with"
        )
    return kept.note


def packed(model: nn.Module, optimizer: torch.optim.Optimizer, pace: Pace) -> bytes:
    """A checkpoint."""
    return contents.encode(model=model.state_dict(), optimizer=optimizer.state_dict(), pace=pace.state_dict())


def progress(result: RoundResult, rounds: int) -> dict[str, Any]:
    return {
        "type": "round",
        "round": result.step,
        "rounds": rounds,
        "loss": result.loss,
        "seconds": result.seconds,
        "loads": result.loads.tolist(),
        "compute": result.compute.tolist(),
    }


def trial(model: nn.Module, loss_of: nn.Module, data: Data) -> Callable[[int], None]:
    """Forward and backward on some samples, leaving no trace in the model."""

    def compute(samples: int) -> None:
        images = torch.from_numpy(datasets.floats(data.x_train[:samples]))
        labels = torch.from_numpy(data.y_train[:samples])
        before = {name: value.clone() for name, value in model.named_buffers()}
        loss_of(model(images), labels).backward()
        model.zero_grad()
        for name, value in model.named_buffers():
            value.copy_(before[name])

    return compute


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, rank: int, ranks: int) -> float:
    """Portion of the test set that the model gets right, each rank judging every n-th chunk. Collective."""
    model.eval()
    if ranks > 1:  # rank 0's running statistics are the model's, as in its checkpoint
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)
    judged = torch.zeros(1, dtype=torch.float64)
    for number in range(chunks(data))[rank::ranks]:
        judged += right(model, data, number)
    if ranks > 1:
        dist.all_reduce(judged)
    return float(judged) / len(data.x_test)


def chunks(data: Data) -> int:
    """In how many parts the test set is judged."""
    return -(-len(data.x_test) // TEST_CHUNK)


@torch.no_grad()
def right(model: nn.Module, data: Data, number: int) -> int:
    """How many of a part of the test set the model gets right."""
    part = slice(number * TEST_CHUNK, (number + 1) * TEST_CHUNK)
    guess = model(torch.from_numpy(datasets.floats(data.x_test[part]))).argmax(dim=1).numpy()
    return int(np.sum(guess == data.y_test[part]))
