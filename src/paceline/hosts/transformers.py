"""Balanced batches under the Hugging Face Trainer.

    from paceline.hosts.transformers import BalancedTrainer                    # 1, instead of Trainer

    trainer = BalancedTrainer(model=model, args=args, train_dataset=dataset)   # 2
    trainer.train()
    trainer.pace.close()                                                       # 3, a clean end under gloo

or ``class MyTrainer(BalancedTrainer, SFTTrainer)`` for another Trainer. The Trainer's loop sees one item for each
optimizer step, a whole round; ``training_step`` runs its micro-batches: gradient_accumulation_steps of them on every
rank, so that a ``compute_loss`` may gather metrics from all ranks, or with loop="round" as many as each rank needs.
The gradient is that of one process whose loss is the mean over the round's labels that are not -100 (over its
samples if batches have no "labels"), whether the model, ``compute_loss_func`` or ``compute_loss`` computes it.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from paceline.commands import installation
from paceline.errors import PacelineError, refuse
from paceline.torch import peers
from paceline.torch.feed.costs import read
from paceline.torch.feed.loader import check_indexed
from paceline.torch.feed.pieces import order_of
from paceline.torch.options import has_batch_norm
from paceline.torch.pace import Pace
from paceline.torch.progress import rounds

try:
    from accelerate.utils.operations import recursively_apply
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:  # pragma: no cover - if the extra is not installed
    raise PacelineError(f"Transformers is not installed; {installation('hosts')}") from error

__all__ = ["BalancedTrainer"]

# Whether samples are shuffled, by train_sampling_strategy. With the last two, Paceline also divides by length.
SHUFFLES = {"random": True, "sequential": False, "group_by_length": True, "batch_rebalance": True}
BY_LENGTH = ("group_by_length", "batch_rebalance")
OF_COST = ("cost", "padded", "micro_batch_cost")  # those keys of balance= that are options of the loader
OF_WORKERS = ("persistent_workers", "prefetch_factor", "worker_init_fn")
# Parts of the names of sentence-transformers' losses that compare a sample with others of the batch.
IN_BATCH = (
    "NegativesRanking", "GISTEmbed", "BatchAll", "BatchHard", "BatchSemiHard", "MegaBatch", "CoSENT", "AnglE",
    "OnlineContrastive", "ContrastiveTension", "GlobalOrthogonal", "DistillKLDiv",
)  # fmt: skip
# Losses of trl that compare the samples of a batch: of trainers that estimate a divergence or a mean reward from
# the batch, and those of any trainer that sort the batch.
TRL_ESTIMATES, TRL_SORTS = ("KTOTrainer", "BCOTrainer"), ("aot", "aot_pair", "aot_unpaired")
LOADING = ("collate_fn", "num_workers", "pin_memory")


class BalancedTrainer(Trainer):
    """A Trainer whose training batches are divided according to the speeds of the ranks.

    balance: options of ``paceline.torch.Pace``, such as policy, limits, micro_batch and callbacks. Its
        global_batch is by default the Trainer's own total: per_device_train_batch_size times
        gradient_accumulation_steps times ranks. loop is "whole" (default) or "round": a rank then takes as many
        micro-batches as it needs, work may move within the round, and compute_loss must call no collective; if the
        Trainer accumulates, micro_batch is then by default per_device_train_batch_size, which fits into memory.
        cost, padded and micro_batch_cost are those of ``Pace.loader``; cost is by default the column
        args.length_column_name, or the number of tokens, if train_sampling_strategy is in BY_LENGTH.

    A stream as train_dataset needs args.max_steps; each rank reads the part of it that ``part_of`` gives it.

    ``pace`` is the Pace of the newest ``train()``. A training that cannot be balanced (DeepSpeed, FSDP, several GPUs
    in one process) is refused with a PacelineError.
    """

    def __init__(self, *args: Any, balance: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        self.pace: Pace | None = None
        steps, own = self.args.gradient_accumulation_steps, self.args.per_device_train_batch_size
        if self.accelerator.split_batches:  # then it is the batch of all ranks
            own //= self.args.world_size
        self.balance = {"global_batch": own * steps * self.args.world_size, "fill": True, **(balance or {})}
        loop = self.balance.pop("loop", "whole")
        if loop == "round":
            self.balance = {"loop": "pieces"} | ({"micro_batch": own} if steps > 1 else {}) | self.balance
        elif loop == "whole":
            self.balance.setdefault("micro_steps", steps)
        else:
            raise PacelineError(f"balance={{'loop': {loop!r}}}: expected 'whole' or 'round'")
        self.loading = {name: self.balance.pop(name) for name in OF_COST if name in self.balance}
        # The loop must see a whole round as one batch, and leave it to Paceline to continue within an epoch after a
        # checkpoint. The user's own args are not changed.
        self.reads_over = not self.args.ignore_data_skip  # of a stream, the samples before a checkpoint
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.args.ignore_data_skip = True
        self.add_callback(Pacing())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Every loss passes through this method, even if a subclass overrides the code that computes it.
        self._plain_backward = self.accelerator.backward
        self.accelerator.backward = self._weighted_backward
        # A loss may gather a metric of each sample, and the ranks have different numbers of samples.
        self._plain_gather = self.accelerator.gather
        self.accelerator.gather = self._gathered
        self._count: int | None = None  # labels that the next loss is a mean over; None if it has no labels
        self._loss: torch.Tensor | None = None  # sum of the weighted losses of the current round

    def get_train_dataloader(self) -> Any:
        if isinstance(self.train_dataset, IterableDataset):
            return StreamedRounds(self, super().get_train_dataloader())
        check_indexed(self.train_dataset)
        plain = super().get_train_dataloader()
        sampler, known = order_of(plain.batch_sampler)
        if not (known or type(sampler).__name__ in ("LengthGroupedSampler", "BatchRebalanceSampler")):
            raise PacelineError(
                f"the training samples are drawn by a {type(sampler).__name__}; expected the Trainer's own sampler "
                "(sentence-transformers: batch_sampler=BatchSamplers.BATCH_SAMPLER, one data set)"
            )
        return Rounds(self, plain)

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self.balance["global_batch"])

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run all of this rank's micro-batches of a round; returns the round's loss, the same on every rank."""
        pace = self.pace
        if pace is None or not isinstance(inputs, Round):
            return super().training_step(model, inputs, num_items_in_batch)
        self._loss = torch.zeros((), device=self.args.device)
        labels = 0
        for batch in inputs.micro_steps():
            with self._tokens_of_this_rank():
                _, items = super().get_batch_samples(iter([batch]), 1, self.args.device)
                items = None if items is None else torch.as_tensor(items)
                self._count = _labels(batch) if items is None else int(items)
                if self._count is not None:
                    self._count *= pace.counts  # 0 for a batch that only fills up this rank's micro-steps
                    labels += self._count
                super().training_step(model, batch, None if items is None else items.clamp(min=1))
            inputs.note(getattr(self.model, "main_input_name", "input_ids"), batch)
        summed = torch.stack([self._loss.double(), self._loss.new_tensor(labels, dtype=torch.float64)])
        self._loss = None
        if peers.ranks() > 1:
            dist.all_reduce(summed)
        loss, everywhere = summed[0], int(summed[1])
        # With a cell (results with the same bits), the weights do not contain the factor for DDP's average.
        if not pace.terms.cell:
            loss = loss / pace.ranks
        if self._count is not None and everywhere and everywhere != inputs.samples:
            # So far it is the sum over the labels divided by the round's samples; the mean over labels is needed.
            scale = inputs.samples / everywhere
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
            loss = loss * scale
        return loss

    def _weighted_backward(self, loss: torch.Tensor, **options: Any) -> None:
        pace = self.pace
        if pace is None or self._loss is None:
            self._plain_backward(loss, **options)
            return
        if self._count is not None:  # a mean over no labels is NaN
            loss = loss * self._count if self._count else torch.nan_to_num(loss) * 0.0
        weighted = loss * pace.host.weight(loss, "mean" if self._count is None else "sum")
        self._loss = self._loss + weighted.detach()
        self._plain_backward(weighted, **options)
        pace.host.backward_done()

    def _gathered(self, tensor: Any) -> Any:
        """``Accelerator.gather``; within a round, the tensors may have different lengths on the ranks."""
        if self._loss is None or peers.ranks() == 1:
            return self._plain_gather(tensor)
        return recursively_apply(_gather_unlike, tensor, error_on_other_type=True)

    @contextlib.contextmanager
    def _tokens_of_this_rank(self) -> Iterator[None]:
        """Let the Trainer count only this rank's tokens in a micro-batch; evaluation is not changed."""
        kept, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = kept


class Rounds:
    """The iterable for the Trainer's loop: one ``Round`` for each optimizer step.

    plain: the loader that the Trainer would have used; its data set, columns and collator are kept.
    """

    def __init__(self, trainer: BalancedTrainer, plain: Any) -> None:
        self.trainer, self.dataset = trainer, plain.dataset
        names = (*LOADING, *OF_WORKERS) if plain.num_workers else LOADING
        self._options = {name: getattr(plain, name) for name in names}
        self._options["drop_last"] = trainer.args.dataloader_drop_last
        self._loader: Any = None

    @property
    def pace(self) -> Pace:
        """The Trainer's Pace."""
        assert self.trainer.pace is not None
        return self.trainer.pace

    def start(self, saved: dict[str, Any] | None, steps: int) -> None:
        """Begin when the model is wrapped. saved: the state after ``steps`` optimizer steps. Collective."""
        trainer = self.trainer
        first = trainer.pace is None
        if trainer.pace is not None:
            trainer.pace.detach()
        trainer.pace = pace = Pace(trainer.model_wrapped, **trainer.balance)
        if first:
            _warn_of_comparisons(trainer)
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

    def __iter__(self) -> Iterator[Round]:
        pace, micro_steps = self.pace, iter(self._loader)
        for _, size in list(pace.host.progress.remaining()):
            yield Round(pace, micro_steps, size)

    @cached_property
    def _rounds(self) -> int:
        """The rounds of an epoch."""
        trainer = self.trainer
        floor = 2 if has_batch_norm(trainer.model_wrapped) else 1
        samples, batch = len(self.dataset), trainer.balance["global_batch"]
        if trainer.args.dataloader_drop_last:
            samples -= samples % batch
        return rounds(samples, 0, batch, floor)

    def _made(self, pace: Pace) -> Any:
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


class StreamedRounds(Rounds):
    """``Rounds`` of a stream, of which each rank takes its own part (see ``part_of``)."""

    def __init__(self, trainer: BalancedTrainer, plain: Any) -> None:
        args = trainer.args
        reasons = {
            f"max_steps={args.max_steps} with a stream, whose samples are not counted; set max_steps to the number "
            "of optimizer steps": args.max_steps <= 0,
            "dispatch_batches=True lets rank 0 read for all ranks, and with Paceline each rank reads its own part of "
            "the stream; leave it out": trainer.accelerator.dispatch_batches,
            f"balance={{{', '.join(map(repr, trainer.loading))}}} needs samples that are known ahead, and a stream's "
            "are not; leave it out": trainer.loading,
        }
        refuse("BalancedTrainer", reasons)
        super().__init__(trainer, plain)
        self.dataset = part_of(trainer.train_dataset, args.process_index, args.world_size)
        self._drawn = [0] * args.world_size  # samples of this epoch that each rank has run
        self._resumed = False
        self._first = 0  # epoch of the stream in the Trainer's first epoch

    def state(self) -> dict[str, Any]:
        return super().state() | {"stream": {"drawn": list(self._drawn), "workers": self._workers}}

    def epoch_after(self) -> float:
        # As the Trainer counts if the length is unknown: a whole epoch is max_steps rounds, or the stream's end.
        done = -(-sum(self._drawn) // self.trainer.balance["global_batch"])
        return self.pace.epoch + done / self.trainer.args.max_steps

    def set_epoch(self, epoch: int) -> None:
        """Use the stream's order of this epoch, counted from the checkpoint."""
        self._choose(self._first + epoch)

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def __iter__(self) -> Iterator[Round]:
        resumed, self._resumed = self._resumed, False
        if not resumed:
            self._drawn = [0] * self.pace.ranks
        ran = False
        for each in self._epoch():
            ran = True
            yield each
        if resumed and not ran:  # the checkpoint was made at the end of the stream
            self._first += 1
            self._choose(self.pace.epoch)
            self._drawn = [0] * self.pace.ranks
            yield from self._epoch()

    @property
    def _workers(self) -> int:
        return int(self._options["num_workers"])

    def _choose(self, epoch: int) -> None:
        """Take this epoch next, also within the stream."""
        self.pace.host.progress.choose(epoch)
        data, args = self.trainer.train_dataset, self.trainer.args
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        elif isinstance(generator := getattr(data, "generator", None), torch.Generator):
            generator.manual_seed((args.seed if args.data_seed is None else args.data_seed) + epoch)

    def _epoch(self) -> Iterator[Round]:
        """The rounds until the stream ends."""
        pace, micro_steps = self.pace, iter(self._loader)
        for first in micro_steps:
            plan = pace.host.piece.plan
            self._drawn = [before + int(load) for before, load in zip(self._drawn, plan.loads, strict=True)]
            yield Round(pace, chain([first], micro_steps), plan.batch)

    def _made(self, pace: Pace) -> Any:
        return pace.stream(self.dataset, **self._options)

    def _resume(self, saved: dict[str, Any] | None, steps: int) -> None:
        pace = self.pace
        if saved is not None:
            pace.load_state_dict(saved)
        self._first = pace.epoch
        if not self.trainer.reads_over:
            pace.host.progress.begin(pace.epoch)
            return
        stream = (saved or {}).get("stream")
        if stream is None and (pace.samples_done or (saved is None and steps)):
            raise PacelineError(
                f"the checkpoint after step {steps} does not say how far each rank has read the stream; expected one "
                "of BalancedTrainer with a stream, or ignore_data_skip=True to begin the stream again"
            )
        if stream is None or not pace.samples_done:
            return
        made, now = (len(stream["drawn"]), stream["workers"]), (pace.ranks, self._workers)
        if made != now:
            raise PacelineError(
                f"the checkpoint was made within a stream by {made[0]} ranks with {made[1]} loading processes, and "
                f"this run has {now[0]} with {now[1]}; use the same, or ignore_data_skip=True to begin it again"
            )
        self._drawn, self._resumed = list(stream["drawn"]), True
        self._loader.skip(self._drawn[pace.rank])


class Part(IterableDataset[Any]):
    """This rank's samples of a stream that every rank reads in the same order: every n-th of n ranks'."""

    def __init__(self, stream: Any, rank: int, ranks: int) -> None:
        self._stream, self._rank, self._ranks = stream, rank, ranks
        if hasattr(stream, "set_epoch"):
            self.set_epoch = stream.set_epoch

    def __iter__(self) -> Iterator[Any]:
        return islice(self._stream, self._rank, None, self._ranks)


def part_of(stream: Any, rank: int, ranks: int) -> Any:
    """This rank's part of a stream. The parts of all ranks have each sample once.

    A stream of Hugging Face's datasets is split by ``split_dataset_by_node``: by shards if their number is a multiple
    of the ranks, else by samples. One that was split for these ranks already is taken as it is.
    """
    if ranks == 1:
        return stream
    if type(stream).__module__.partition(".")[0] != "datasets":
        return Part(stream, rank, ranks)
    from datasets.distributed import split_dataset_by_node

    split = getattr(stream, "_distributed", None)
    if split is None:
        return split_dataset_by_node(stream, rank, ranks)
    if (split.rank, split.world_size) != (rank, ranks):
        raise PacelineError(
            f"train_dataset was split for rank {split.rank} of {split.world_size}; expected it for rank {rank} of "
            f"{ranks}, or without split_dataset_by_node"
        )
    return stream


class Round(dict[str, Any]):
    """One item of the Trainer's loop: a round, whose micro-batches are drawn when they are run. As a mapping, in
    which the Trainer counts tokens, it has this rank's inputs of the micro-batches that are done.

    samples: of the round, over all ranks.
    """

    def __init__(self, pace: Pace, micro_steps: Iterator[Any], samples: int) -> None:
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


class Pacing(TrainerCallback, ExportableState):
    """Reports the Trainer's steps to the pace, and puts the pace's state into the Trainer's checkpoints."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        self._rounds: Rounds | None = None
        self._began = 0.0

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into a checkpoint."""
        source = self._rounds
        saved = None if source is None or source.trainer.pace is None else source.state()
        return {"args": {}, "attributes": {"saved": saved}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, train_dataloader: Any = None, **_: Any
    ) -> None:
        if not isinstance(train_dataloader, Rounds):
            raise PacelineError(
                f"get_train_dataloader() was overridden and returned a {type(train_dataloader).__name__}; expected "
                "BalancedTrainer's: leave it as it is, and override collator and data set"
            )
        self._rounds = train_dataloader
        kept = state.stateful_callbacks.setdefault(type(self).__name__, self.state())
        train_dataloader.start(kept["attributes"]["saved"], state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().host.stepped(time.perf_counter() - self._began)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._rounds is not None
        state.epoch = self._rounds.epoch_after()  # the loop itself counts from the begin of this run

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().flush()
        self._pace().detach()

    def _pace(self) -> Pace:
        assert self._rounds is not None
        return self._rounds.pace


def _cost_of(trainer: BalancedTrainer) -> dict[str, Any]:
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


def _labels(batch: Any) -> int | None:
    """The number of labels that the loss of this batch is a mean over; None if it has no labels."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    return labels.numel() if labels.is_floating_point() else int(labels.ne(-100).sum())


def _gather_unlike(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of all ranks, which may have different numbers of rows."""
    rows = tensor[None] if tensor.ndim == 0 else tensor
    own = rows.detach().cpu().clone()  # without a copy, a slice would be sent with its whole storage
    return torch.cat([each.to(rows.device) for each in peers.gather(own)])


def _warn_of_comparisons(trainer: Trainer) -> None:
    """Warn, once, about a loss that compares the samples of a batch with each other."""
    losses = getattr(trainer, "loss", None)
    made = losses.values() if isinstance(losses, dict) else [losses]
    found = [each for each in (*made, trainer.model) if isinstance(each, torch.nn.Module)]
    modules = torch.nn.ModuleList(found)
    name = next((kind for each in modules.modules() if (kind := comparing(each))), None) or of_trl(trainer)
    if name is not None and peers.rank() == 0:
        warnings.warn(
            f"{name} compares the samples of a micro-batch with each other, so that its value depends on how the "
            "batch is divided: on the number of ranks, as under plain DDP, and also on the balancing; "
            "balance={'policy': 'equal'} divides it as plain DDP does",
            RuntimeWarning,
            stacklevel=2,
        )


def comparing(module: torch.nn.Module) -> str | None:
    """The name of a loss that is not a mean of losses of single samples; None if it is not known as one."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    known = package == "sentence_transformers" and any(part in kind.__name__ for part in IN_BATCH)
    return kind.__name__ if known or kind.__module__.startswith("pytorch_metric_learning.losses") else None


def of_trl(trainer: Any) -> str | None:
    """The name of a loss of trl's trainers that compares the samples of a batch; None if it is not known as one."""
    kinds = [kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.partition(".")[0] == "trl"]
    if not kinds:
        return None
    given = getattr(trainer.args, "loss_type", None)
    sorting = [name for name in (given if isinstance(given, list) else [given]) if name in TRL_SORTS]
    if sorting:
        return f"the loss {sorting[0]!r} of {kinds[0]}"
    estimates = kinds[0] in TRL_ESTIMATES and getattr(trainer, "calculate_KL", True)
    return f"the loss of {kinds[0]}" if estimates else None


def _check(trainer: Trainer) -> None:
    """Raises PacelineError for a Trainer that cannot be balanced."""
    args, kind = trainer.args, trainer.accelerator.distributed_type.value
    strategy = getattr(args, "train_sampling_strategy", "random")
    replicated, unknown = kind.startswith(("NO", "MULTI_")), strategy not in SHUFFLES
    reasons = {
        f"the Trainer distributes this model by {kind}; expected DistributedDataParallel": not replicated,
        f"{args.n_gpu} GPUs in one process are expected to share each batch evenly; start one process for each GPU "
        "with torchrun": args.n_gpu > 1,
        "auto_find_batch_size=True changes the batch during the training; "
        "set per_device_train_batch_size": args.auto_find_batch_size,
        f"train_sampling_strategy={strategy!r}: expected one of {', '.join(SHUFFLES)}": unknown,
    }
    refuse("BalancedTrainer", reasons)
