"""Balanced batches under the Hugging Face Trainer.

    from paceline.hosts.transformers import BalancedTrainer                    # 1, instead of Trainer

    trainer = BalancedTrainer(model=model, args=args, train_dataset=dataset)   # 2
    trainer.train()
    trainer.pace.close()                                                       # 3, a clean end under gloo

or ``class MyTrainer(BalancedTrainer, SFTTrainer)`` for another Trainer. The Trainer's loop sees one item for each
optimizer step, a whole round; ``training_step`` runs its micro-batches: gradient_accumulation_steps of them on every
rank, so that a ``compute_loss`` may gather metrics from all ranks, or with loop="round" as many as each rank needs.
The gradient is that of one process whose loss is the mean over the round's labels that are not -100 (over its
samples, where batches have no "labels"), whether the model, ``compute_loss_func`` or ``compute_loss`` makes it.
"""

from __future__ import annotations

import contextlib
import copy
import time
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

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
except ModuleNotFoundError as error:  # pragma: no cover - where the extra is not installed
    raise PacelineError("Transformers is not installed; install paceline[hosts]") from error

__all__ = ["BalancedTrainer"]

# Whether samples are shuffled, by train_sampling_strategy. The last two balance by length: so does Paceline then.
SHUFFLES = {"random": True, "sequential": False, "group_by_length": True, "batch_rebalance": True}
BY_LENGTH = ("group_by_length", "batch_rebalance")
OF_COST = ("cost", "padded", "micro_batch_cost")  # of balance=, what is the loader's
OF_WORKERS = ("persistent_workers", "prefetch_factor", "worker_init_fn")
# Parts of the names of sentence-transformers' losses that look at other samples of the batch.
IN_BATCH = (
    "NegativesRanking", "GISTEmbed", "BatchAll", "BatchHard", "BatchSemiHard", "MegaBatch", "CoSENT", "AnglE",
    "OnlineContrastive", "ContrastiveTension", "GlobalOrthogonal", "DistillKLDiv",
)  # fmt: skip
LOADING = ("collate_fn", "num_workers", "pin_memory")


class BalancedTrainer(Trainer):
    """Trainer whose training batches are divided by what each rank can do.

    balance: options of ``paceline.torch.Pace``, such as policy, limits, micro_batch, record and on_round. Its
        global_batch is by default the Trainer's own total: per_device_train_batch_size times
        gradient_accumulation_steps times ranks. loop is "whole" (default) or "round": a rank then takes as many
        micro-batches as it needs, work may move within the round, and compute_loss must call no collective; if the
        Trainer accumulates, micro_batch is then by default per_device_train_batch_size, which fits into memory.
        cost, padded and micro_batch_cost are those of
        ``Pace.loader``; under train_sampling_strategy="group_by_length" or "batch_rebalance", cost is by default the
        column args.length_column_name, or the number of tokens.

    ``pace`` is the Pace of the newest ``train()``. What can't be balanced (DeepSpeed, FSDP, several GPUs in one
    process, streams) is refused with a PacelineError.
    """

    def __init__(self, *args: Any, balance: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        _warn_of_comparisons(self)
        self.pace: Pace | None = None
        steps, own = self.args.gradient_accumulation_steps, self.args.per_device_train_batch_size
        self.balance = {"global_batch": own * steps * self.args.world_size, "fill": True, **(balance or {})}
        loop = self.balance.pop("loop", "whole")
        if loop == "round":
            self.balance = {"loop": "pieces"} | ({"micro_batch": own} if steps > 1 else {}) | self.balance
        elif loop == "whole":
            self.balance.setdefault("micro_steps", steps)
        else:
            raise PacelineError(f"balance={{'loop': {loop!r}}}: expected 'whole' or 'round'")
        self.loading = {name: self.balance.pop(name) for name in OF_COST if name in self.balance}
        # The loop is to see a whole round as one batch, and to leave it to us to go on within an epoch after a
        # checkpoint. The user's own args stay as they are.
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.args.ignore_data_skip = True
        self.add_callback(Pacing())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Whatever computes the loss, and whoever overrides that, it goes through here.
        self._plain_backward = self.accelerator.backward
        self.accelerator.backward = self._weighted_backward
        # A loss may gather a metric of each sample, and ranks have unlike numbers of samples.
        self._plain_gather = self.accelerator.gather
        self.accelerator.gather = self._gathered
        self._count: int | None = None  # labels that the coming loss is a mean over, where there are any
        self._loss: torch.Tensor | None = None  # of the running round

    def get_train_dataloader(self) -> Any:
        check_indexed(self.train_dataset)
        plain = super().get_train_dataloader()
        sampler, known = order_of(plain.batch_sampler)
        if not (known or type(sampler).__name__ in ("LengthGroupedSampler", "BatchRebalanceSampler")):
            raise PacelineError(
                f"the training samples are drawn by a {type(sampler).__name__}, and balancing draws each sample once "
                "an epoch, in the data's order or a random one; expected the Trainer's own sampler (with "
                "sentence-transformers, batch_sampler=BatchSamplers.BATCH_SAMPLER and one data set)"
            )
        return Rounds(self, plain)

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self.balance["global_batch"])

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """All of this rank's micro-batches of a round; returns the round's loss, the same on every rank."""
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
                    self._count *= pace.counts  # else its samples only keep the others company
                    labels += self._count
                super().training_step(model, batch, None if items is None else items.clamp(min=1))
            inputs.note(getattr(self.model, "main_input_name", "input_ids"), batch)
        summed = torch.stack([self._loss.double(), self._loss.new_tensor(labels, dtype=torch.float64)])
        self._loss = None
        if peers.ranks() > 1:
            dist.all_reduce(summed)
        loss, everywhere = summed[0], int(summed[1])
        # Where results have the same bits, weights leave out that DDP averages.
        if not pace.terms.cell:
            loss = loss / pace.ranks
        if self._count is not None and everywhere and everywhere != inputs.samples:
            # So far the labels' sum over the round's samples; its mean over the labels is asked for.
            scale = inputs.samples / everywhere
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
            loss = loss * scale
        return loss

    def _weighted_backward(self, loss: torch.Tensor, **options: Any) -> None:
        pace = self.pace
        if pace is None or self._loss is None:
            self._plain_backward(loss, **options)
            return
        if self._count is not None:  # a mean over no labels at all is NaN
            loss = loss * self._count if self._count else torch.nan_to_num(loss) * 0.0
        weighted = loss * pace.host.weight(loss, "mean" if self._count is None else "sum")
        self._loss = self._loss + weighted.detach()
        self._plain_backward(weighted, **options)
        pace.host.backward_done()

    def _gathered(self, tensor: Any) -> Any:
        """``Accelerator.gather``; within a round, of tensors of any length on each rank."""
        if self._loss is None or peers.ranks() == 1:
            return self._plain_gather(tensor)
        return recursively_apply(_gather_unlike, tensor, error_on_other_type=True)

    @contextlib.contextmanager
    def _tokens_of_this_rank(self) -> Iterator[None]:
        """In a micro-batch the Trainer leaves the other ranks' tokens to us; evaluation stays as it is."""
        kept, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = kept


class Rounds:
    """What the Trainer's loop iterates: one ``Round`` for each optimizer step.

    plain: the loader that the Trainer would have used; its data set, columns and collator stay.
    """

    def __init__(self, trainer: BalancedTrainer, plain: Any) -> None:
        self.trainer, self.dataset = trainer, plain.dataset
        names = (*LOADING, *OF_WORKERS) if plain.num_workers else LOADING
        self._options = {name: getattr(plain, name) for name in names}
        floor = 2 if has_batch_norm(trainer.model_wrapped) else 1
        samples, batch = len(self.dataset), trainer.balance["global_batch"]
        if trainer.args.dataloader_drop_last:
            samples -= samples % batch
        self._rounds = rounds(samples, 0, batch, floor)
        self._loader: Any = None

    @property
    def pace(self) -> Pace:
        """The Trainer's."""
        assert self.trainer.pace is not None
        return self.trainer.pace

    def start(self, saved: dict[str, Any] | None, steps: int) -> None:
        """The model is wrapped: begin, after ``steps`` optimizer steps of which ``saved`` tells. Collective."""
        trainer, args = self.trainer, self.trainer.args
        if trainer.pace is not None:
            trainer.pace.detach()
        trainer.pace = pace = Pace(trainer.model_wrapped, **trainer.balance)
        seed = args.seed if args.data_seed is None else args.data_seed
        shuffle = SHUFFLES[getattr(args, "train_sampling_strategy", "random")]
        cost = _cost_of(trainer) | trainer.loading
        options = cost | self._options | {"drop_last": args.dataloader_drop_last}
        self._loader = pace.loader(self.dataset, seed=seed, shuffle=shuffle, **options)
        if saved is not None:
            pace.load_state_dict(saved)
        elif steps % len(self):
            raise PacelineError(
                f"the checkpoint after step {steps} was made in mid-epoch by a Trainer that did not balance, in an "
                "order of its own; go on from one made at the end of an epoch"
            )

    def epoch_after(self) -> float:
        """Epochs done so far, with the part of the running one."""
        return self.pace.epoch + 1 - self.pace.host.progress.left / len(self)

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch; within it, go on where it was left."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return self._rounds

    def __iter__(self) -> Iterator[Round]:
        pace, micro_steps = self.pace, iter(self._loader)
        for _, size in list(pace.host.progress.remaining()):
            yield Round(pace, micro_steps, size)


class Round(dict[str, Any]):
    """One item of the Trainer's loop: a round, whose micro-batches are drawn as they are run. The Trainer counts
    tokens in it: as a mapping it holds this rank's inputs of all of them, once they are through.

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
        """A micro-batch is through."""
        for name in (main, "attention_mask"):
            if name in batch:
                new = batch[name].reshape(-1) if self._pace.counts else batch[name].new_empty(0)
                self[name] = torch.cat([self[name], new]) if name in self else new


class Pacing(TrainerCallback, ExportableState):
    """Tells the pace of the Trainer's doings, and puts its state into the Trainer's checkpoints."""

    def __init__(self) -> None:
        self.saved: dict[str, Any] | None = None
        self._rounds: Rounds | None = None
        self._began = 0.0

    def state(self) -> dict[str, Any]:
        """What the Trainer writes into a checkpoint."""
        pace = self._rounds.trainer.pace if self._rounds is not None else None
        return {"args": {}, "attributes": {"saved": None if pace is None else pace.state_dict()}}

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
        state.epoch = self._rounds.epoch_after()  # the loop counts from where this run began

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().flush()
        self._pace().detach()

    def _pace(self) -> Pace:
        assert self._rounds is not None
        return self._rounds.pace


def _cost_of(trainer: BalancedTrainer) -> dict[str, Any]:
    """What the loader is told of the samples' costs where the Trainer was asked to sample by length."""
    args, dataset = trainer.args, trainer.train_dataset
    if getattr(args, "train_sampling_strategy", "random") not in BY_LENGTH or "cost" in trainer.loading:
        return {}
    # Of the data set as it was given: its loader has only those columns that the model takes.
    name = args.length_column_name
    if name not in (getattr(dataset, "column_names", None) or ()):
        named = getattr(trainer.processing_class, "model_input_names", None)
        name = named[0] if named else "input_ids"
    return {"cost": read(name, dataset).lengths}


def _labels(batch: Any) -> int | None:
    """Over how many labels the loss of this batch is a mean; None where it has none."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    return labels.numel() if labels.is_floating_point() else int(labels.ne(-100).sum())


def _gather_unlike(tensor: torch.Tensor) -> torch.Tensor:
    """Rows of all ranks, which may have unlike numbers of them."""
    rows = tensor[None] if tensor.ndim == 0 else tensor
    own = rows.detach().cpu().clone()  # a slice would take the whole along that it is of
    return torch.cat([each.to(rows.device) for each in peers.gather(own)])


def _warn_of_comparisons(trainer: Trainer) -> None:
    """Warn, once, of a loss that compares the samples of a batch with each other."""
    losses = getattr(trainer, "loss", None)
    made = losses.values() if isinstance(losses, dict) else [losses]
    found = [each for each in (*made, trainer.model) if isinstance(each, torch.nn.Module)]
    modules = torch.nn.ModuleList(found)
    name = next((kind for each in modules.modules() if (kind := comparing(each))), None)
    if name is not None and peers.rank() == 0:
        warnings.warn(
            f"{name} compares the samples of a micro-batch with each other, so that its value depends on how the "
            "batch is divided: on the number of ranks, as under plain DDP, and here also on the balance; "
            "balance={'policy': 'equal'} divides it as plain DDP does",
            RuntimeWarning,
            stacklevel=4,
        )


def comparing(module: torch.nn.Module) -> str | None:
    """The name of a loss that is no mean of a loss of each sample; None for what is not known to be one."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    known = package == "sentence_transformers" and any(part in kind.__name__ for part in IN_BATCH)
    return kind.__name__ if known or kind.__module__.startswith("pytorch_metric_learning.losses") else None


def _check(trainer: Trainer) -> None:
    """Raises PacelineError for what cannot be balanced."""
    args, kind = trainer.args, trainer.accelerator.distributed_type.value
    strategy = getattr(args, "train_sampling_strategy", "random")
    replicated, unknown = kind.startswith(("NO", "MULTI_")), strategy not in SHUFFLES
    reasons = {
        f"the Trainer distributes this model by {kind}; expected DistributedDataParallel": not replicated,
        f"{args.n_gpu} GPUs in one process are expected to share each batch evenly; start one process for each GPU "
        "with torchrun": args.n_gpu > 1,
        "auto_find_batch_size=True changes the batch on the way; "
        "set per_device_train_batch_size": args.auto_find_batch_size,
        f"train_sampling_strategy={strategy!r}: expected one of {', '.join(SHUFFLES)}": unknown,
    }
    refuse("BalancedTrainer", reasons)
