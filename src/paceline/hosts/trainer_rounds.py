"""Rounds for the loop of the Hugging Face Trainer: one item for each optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.hosts.comparing import warn_of_comparisons
from paceline.torch.feed.costs import read
from paceline.torch.host import Host
from paceline.torch.mistakes import Words
from paceline.torch.options import min_samples_of
from paceline.torch.progress import rounds

# Whether samples are shuffled, by train_sampling_strategy. With the last two, Paceline also divides by length.
SHUFFLES = {"random": True, "sequential": False, "group_by_length": True, "batch_rebalance": True}
BY_LENGTH = ("group_by_length", "batch_rebalance")
LOADING = ("collate_fn", "num_workers", "pin_memory")
OF_WORKERS = ("persistent_workers", "prefetch_factor", "worker_init_fn")
EQUAL = "use balance={{'policy': 'equal'}}, which divides the batch as plain DDP does"


class _UnderTrainer(Host):
    """The host of a Trainer's Pace."""

    words = Words(
        count=EQUAL,
        reduction="balance={{'over': 'sum'}}",
        backward="one loss from compute_loss, the sum of all",
        added=EQUAL.format(),
    )


class Rounds:
    """The iterable for the Trainer's loop: one ``TrainerRound`` for each optimizer step.

    plain: the loader that the Trainer would have used; its data set, columns and collator are kept.
    """

    def __init__(self, trainer: Any, plain: Any) -> None:
        self.trainer, self.dataset = trainer, plain.dataset
        names = (*LOADING, *OF_WORKERS) if plain.num_workers else LOADING
        self._options = {name: getattr(plain, name) for name in names}
        self._options["drop_last"] = trainer.args.dataloader_drop_last
        self._loader: Any = None

    @property
    def pace(self) -> HostedPace:
        """The Trainer's Pace."""
        assert self.trainer.pace is not None
        return self.trainer.pace

    def start(self, saved: dict[str, Any] | None, steps: int) -> None:
        """Begin when the model is wrapped. saved: the state after ``steps`` optimizer steps. Collective."""
        trainer = self.trainer
        first = trainer.pace is None
        if trainer.pace is not None:
            trainer.pace.host.detach()
        trainer.pace = pace = HostedPace(trainer.model_wrapped, **trainer.balance)
        pace.host.adapter = _UnderTrainer()
        if first:
            warn_of_comparisons(trainer)
        self._loader = self._made(pace)
        self._resume(saved, steps)

    def state(self) -> dict[str, Any]:
        """The state for ``start``."""
        return self.pace.state_dict()

    def epoch_after(self) -> float:
        """Epochs done so far, including the done part of the current one."""
        return self.pace.epoch + 1 - self.pace.host.progress.left / len(self)

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch; within an epoch, continue at the current position."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[TrainerRound]:
        pace, micro_steps = self.pace, iter(self._loader)
        for _, size in list(pace.host.progress.remaining()):
            yield TrainerRound(pace, micro_steps, size)

    @cached_property
    def _rounds(self) -> int:
        """The rounds of an epoch."""
        trainer = self.trainer
        samples, batch = len(self.dataset), trainer.balance["global_batch"]
        if trainer.args.dataloader_drop_last:
            samples -= samples % batch
        return rounds(samples, 0, batch, min_samples_of(trainer.model_wrapped))

    def _made(self, pace: HostedPace) -> Any:
        """The loader of the training samples."""
        trainer, args = self.trainer, self.trainer.args
        seed = args.seed if args.data_seed is None else args.data_seed
        shuffle = SHUFFLES[getattr(args, "train_sampling_strategy", "random")]
        cost = _cost_of(trainer) | trainer.loading
        return pace.loader(self.dataset, seed=seed, shuffle=shuffle, **(cost | self._options))

    def _resume(self, saved: dict[str, Any] | None, steps: int) -> None:
        """Continue from this state, made after ``steps`` optimizer steps."""
        if saved is not None:
            self.pace.load_state_dict(saved)
        elif steps % len(self):
            raise PacelineError(
                f"the checkpoint after step {steps} was made within an epoch by a Trainer that did not balance, with "
                "its own order of samples; continue from one made at the end of an epoch"
            )


class TrainerRound(dict[str, Any]):
    """One item of the Trainer's loop: a round, whose micro-batches are drawn when they are run. As a mapping, in
    which the Trainer counts tokens, it has this rank's inputs of the micro-batches that are done; reading anything
    else raises PacelineError.

    samples: of the round, over all ranks.
    """

    def __init__(self, pace: HostedPace, micro_steps: Iterator[Any], samples: int) -> None:
        super().__init__()
        self.samples = samples
        self._pace, self._loop = pace, micro_steps

    def micro_steps(self) -> Iterator[Any]:
        """This rank's micro-batches."""
        while True:
            yield next(self._loop)
            if self._pace.host.last:
                return

    def note(self, main: str, batch: Any) -> None:
        """Add the inputs of a micro-batch that is done."""
        for name in (main, "attention_mask"):
            if name in batch:
                new = batch[name].reshape(-1) if self._pace.counts else batch[name].new_empty(0)
                self[name] = torch.cat([self[name], new]) if name in self else new

    def _unreadable(self, *_: Any) -> Any:
        raise PacelineError(
            "training_step or get_batch_samples of a subclass reads a whole round, whose micro-batches are drawn "
            "while it runs; override compute_loss, or let BalancedTrainer come first: class Mine(BalancedTrainer, "
            "MyTrainer), so that MyTrainer's methods get each micro-batch"
        )

    # The Trainer itself uses only ``in`` and ``[]``. Without ``__iter__``, ``**inputs`` would read nothing.
    __missing__ = __iter__ = __len__ = keys = values = items = pop = popitem = copy = _unreadable

    def get(self, name: str, default: Any = None) -> Any:
        return self[name]


def _cost_of(trainer: Any) -> dict[str, Any]:
    """The loader's options on the samples' costs if the Trainer samples by length."""
    args, dataset = trainer.args, trainer.train_dataset
    if getattr(args, "train_sampling_strategy", "random") not in BY_LENGTH or "cost" in trainer.loading:
        return {}
    # Read the data set that the user gave: the loader has only those columns that the model takes.
    name = args.length_column_name
    if name not in (getattr(dataset, "column_names", None) or ()):
        named = getattr(trainer.processing_class, "model_input_names", None)
        name = named[0] if named else "input_ids"
    return {"cost": read(name, dataset).lengths}
