"""The training loop that each worker of ``paceline train`` runs: an ordinary loop with Paceline's lines in it."""

from __future__ import annotations

import copy
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.data import datasets
from paceline.data.datasets import Data
from paceline.errors import PacelineError
from paceline.learners import models
from paceline.learners.images import tensor
from paceline.rounds import RoundResult
from paceline.runs.run import CONFIG
from paceline.torch import ElasticLocalSGD, ElasticPace, LocalSGD, Pace, peers
from paceline.torch.balanced import Balanced, Hosted
from paceline.torch.callbacks import Callback
from paceline.torch.elastic.link import Left, company
from paceline.torch.elastic.member import Mended
from paceline.torch.liveness.shutdown import end_with_parent
from paceline.torch.liveness.stall import Missing, Stall
from paceline.torch.local import Merge
from paceline.train import slowdown
from paceline.train.checkpoint import encode, of_run
from paceline.train.config import TrainConfig

Emit = Callable[[dict[str, Any]], None]


class _Empty(Hosted):
    """A handle under which a worker without work runs an empty batch, which all models of ``learners`` take."""

    _fill = False


class _Pace(Pace, _Empty): ...


class _LocalSGD(LocalSGD, _Empty): ...


class _ElasticPace(ElasticPace, _Empty): ...


class _ElasticLocalSGD(ElasticLocalSGD, _Empty): ...


# By whether the run continues without lost workers, and whether workers step by themselves.
HANDLES: dict[tuple[bool, bool], Any] = {
    (False, False): _Pace,
    (False, True): _LocalSGD,
    (True, False): _ElasticPace,
    (True, True): _ElasticLocalSGD,
}
KEPT = "kept"  # the members' message to one another that there is a checkpoint of the last round
LOOK = 0.02  # seconds between two checks for that message


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
        return tensor(self._data.x_train[indices]), torch.from_numpy(self._data.y_train[indices])


def train(
    config: TrainConfig,
    run_dir: Path,
    emit: Emit,
    resume: bool = False,
    survives: bool = False,
    missed: str | Callable[[Missing], object] = "warn",
) -> None:
    """Train as one of the workers of the run; ``journal.Journal`` makes the record from their events.

    emit: takes the progress as dicts with a "type": "start", "round", "checkpoint" (prepared, and to be committed
        when its rounds are on record), "note", and "test" when the rounds are over and the model may be evaluated. If
        the run survives the loss of a worker, all workers report the rounds and each change of members ("members");
        else only rank 0 does.
    resume: continue from the run directory's checkpoint (from the beginning if there is none yet).
    survives: whether the run continues without lost workers, which requires Paceline's own launcher. Else the workers
        are the ranks of the process group.
    missed: what to do if ranks keep the others waiting, see ``Stall``.
    """
    link = company() if survives else None

    def chief() -> bool:
        """Whether this worker does the work of a single one."""
        return pace.chief if survives else peers.rank() == 0

    torch.manual_seed(config.seed)
    data, criterion = datasets.load(config.data), nn.CrossEntropyLoss()
    model = models.create(config.model, data.shape, data.classes)
    equal = max(1, config.global_batch // config.workers)
    trial = copy.deepcopy(model)

    def timed(samples: int) -> None:
        """Forward and backward on some samples, leaving no trace in the model."""
        criterion(trial(tensor(data.x_train[:samples])), torch.from_numpy(data.y_train[:samples])).backward()

    # All ranks are timed at once.
    slowed = slowdown.create(config, lambda: peers.gather(slowdown.seconds_per_sample(timed, equal)))
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    last = config.rounds(len(data.x_train))
    own = config.loop == "local"
    trained = model if survives or own or peers.ranks() == 1 else DistributedDataParallel(model)
    notify = emit if survives or peers.rank() == 0 else lambda event: None

    class Reports(Callback):
        """Reports each round and each change of members, and stops every rank if the loss is not finite."""

        def on_round(self, result: RoundResult) -> None:
            notify({"type": "round", "round": result.step, "rounds": last, "result": result})
            if not math.isfinite(result.loss):
                raise PacelineError(
                    f"the loss became {result.loss:g} at step {result.step}; lower the learning rate (--lr) or look "
                    "for bad values in the data"
                )

        def on_members(self, change: Mended) -> None:
            emit({"type": "members", "mended": change})

    options: dict[str, Any] = {} if survives else {"stall": Stall(missed, config.patience)}
    if own:
        options |= {"every": config.every or "auto", "merge": Merge(outer=config.outer or "mean")}
    else:
        options |= {"loop": config.loop, "micro_batch": config.micro_batch}
        options |= {} if survives else {"weigh": config.weigh}
    pace = HANDLES[survives, own](
        trained,
        config.global_batch,
        config.policy,
        limits=config.limits,
        quantum=config.quantum,
        callbacks=[Reports()],
        **options,
    )

    def over() -> bool:
        return pace.epoch >= config.epochs if own else pace.rounds >= last

    if survives:  # after the last round the end is near anyway, and the others wait for claimed samples
        signal.signal(signal.SIGTERM, lambda *_: None if over() else pace.leave())

    def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if slowed is not None:
            time.sleep(slowed(peers.rank(), pace.rounds, len(labels), first=pace.host.first))
        loss: torch.Tensor = criterion(trained(images), labels)
        return loss

    with pace:
        loader = pace.loader(
            ImageSet(data),
            seed=config.seed,
            num_workers=config.loader_workers,
            collate_fn=_unchanged,
            worker_init_fn=end_with_parent,
        )
        kept = RunCheckpoints(run_dir, model, optimizer, pace, notify)
        if resume:
            note = peers.together(lambda: kept.go_on(len(data.x_train)))
            if not survives:
                peers.agree({"steps done": pace.rounds})
            if note:
                notify({"type": "note", "text": note})
        first = pace.rounds
        if survives:
            pace.register(optimizer)
        notify({"type": "start", "rounds": last, "first": first, "policy": config.policy})
        if slowed is not None and slowed.words:
            notify({"type": "note", "text": slowed.words})
        due = pace.rounds
        try:
            while not over():
                for batch in loader:
                    if own:
                        pace.backward(loss_of(*batch))
                    else:
                        pace.round(batch, loss_of)
                    pace.step(optimizer)
                    if pace.rounds - due >= config.checkpoint_every:
                        due = pace.rounds
                        if chief():
                            kept.save()
                    if over():
                        break
        except Left:
            pace.host.abandon()
            if chief():  # all workers may have had to leave
                kept.save()
            raise
        pace.host.flush()
        if link is None and chief():
            kept.save()
        while link is not None and not link.posted(KEPT):
            if link.first:  # also if the first member has been lost since
                kept.save()
                link.post(KEPT)
            time.sleep(LOOK)
        notify({"type": "test"})


class RunCheckpoints:
    """The checkpoints of this worker's model, optimizer and pace in the run's directory."""

    def __init__(
        self, run_dir: Path, model: nn.Module, optimizer: torch.optim.Optimizer, pace: Balanced, notify: Emit
    ) -> None:
        self._files, self._model, self._optimizer, self._pace = of_run(run_dir), model, optimizer, pace
        self._notify = notify
        self._newest = 0  # rounds in the newest checkpoint that this worker knows

    def go_on(self, samples: int) -> str:
        """Continue from the run's checkpoint, if there is one; returns a sentence if that is not the newest."""
        parts, place = self._files.load(), self._files.newest.parent
        if parts is None:
            return ""
        try:
            self._model.load_state_dict(parts["model"])
            self._optimizer.load_state_dict(parts["optimizer"])
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PacelineError(
                f"the checkpoint in {place} does not fit the run's model ({str(error).splitlines()[0]}); put back "
                "the run's own"
            ) from error
        self._pace.load_state_dict(parts["pace"])
        done = self._pace.host.progress.samples_done
        if done > samples:
            raise PacelineError(
                f"the checkpoint in {place} was made after {done} samples of an epoch, the data has {samples}; "
                "expected the data that the run began with"
            )
        self._newest = self._pace.rounds
        return self._files.note

    def save(self) -> None:
        """Prepare a checkpoint, which is committed when its rounds are on record; nothing if there is one of this
        round, since the two that are kept must be of different rounds."""
        rounds = self._pace.rounds
        if rounds > self._newest:
            states = (self._model.state_dict(), self._optimizer.state_dict(), self._pace.state_dict())
            archive = encode(model=states[0], optimizer=states[1], pace=states[2])
            self._newest = rounds
            while not (self._files.newest.parent / CONFIG).exists():  # the launcher is about to write it
                time.sleep(LOOK)
            self._notify({"type": "checkpoint", "rounds": rounds, "prepared": self._files.prepare(archive)})


def _unchanged(batch: Any) -> Any:
    """The collate function for data sets that make whole batches themselves."""
    return batch
