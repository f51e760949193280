"""Balanced batches under the Hugging Face Trainer.

    from paceline.hosts.transformers import BalancedTrainer                    # 1, instead of Trainer

    trainer = BalancedTrainer(model=model, args=args, train_dataset=dataset)   # 2
    trainer.train()
    trainer.pace.close()                                                       # 3, a clean end under gloo

or ``class MyTrainer(BalancedTrainer, SFTTrainer)`` for another Trainer. The Trainer's loop sees one item for each
optimizer step, a whole round; ``training_step`` runs its micro-batches: gradient_accumulation_steps of them on every
rank, so that a ``compute_loss`` may gather metrics from all ranks, or with loop="round" as many as each rank needs.
The gradient is that of one process, whether the model, ``compute_loss_func`` or ``compute_loss`` computes the loss:
the mean over what each loss is a mean over, or over labels that are not -100 where that is unknown, see
``trainer_losses.Counting`` (over samples if batches have no "labels").
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

from paceline.commands import installation
from paceline.errors import PacelineError, refuse, switches
from paceline.hosts.accumulating import HostedPace
from paceline.hosts.trainer_losses import SAMPLES, TOTAL, Counting
from paceline.hosts.trainer_rounds import SHUFFLES, Rounds, TrainerRound
from paceline.hosts.trainer_streams import StreamedRounds
from paceline.torch import peers
from paceline.torch.feed.loader import check_indexed
from paceline.torch.feed.pieces import order_of

try:
    from accelerate.utils.operations import recursively_apply
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as error:  # pragma: no cover - if the extra is not installed
    raise PacelineError(f"Transformers is not installed; {installation('hosts')}") from error

__all__ = ["BalancedTrainer"]

OF_COST = ("cost", "padded", "micro_batch_cost")  # those keys of balance= that are options of the loader


class BalancedTrainer(Trainer):
    """A Trainer whose training batches are divided according to the speeds of the ranks.

    ``balance`` has the options of ``paceline.torch.Pace``, such as policy, limits, micro_batch and callbacks. These
    have other defaults or are further ones:

    - ``global_batch``: by default the Trainer's own total, per_device_train_batch_size times
      gradient_accumulation_steps times ranks.
    - ``loop``: "whole" (default) or "round": a rank then takes as many micro-batches as it needs, work may move
      within the round, and compute_loss must call no collective; if the Trainer accumulates, micro_batch is then by
      default per_device_train_batch_size, which fits into memory.
    - ``cost``, ``padded``, ``micro_batch_cost``: as for ``Pace.loader``; cost is by default the column
      args.length_column_name, or the number of tokens, if train_sampling_strategy is in BY_LENGTH.
    - ``over``: "labels", "samples" or "sum", what a loss is over; by default its graph shows it.
    - ``shared``: whether all ranks read the whole of a stream and divide each round; by default they do, unless it is
      one of Hugging Face's datasets that was split by rank or has a multiple of the ranks' number of shards.

    A stream as train_dataset needs args.max_steps. ``pace`` is the Pace of the newest ``train()``.

    Args:
        args: Of Hugging Face's Trainer.
        balance: Options by name, see above.
        kwargs: Of Hugging Face's Trainer.

    Raises:
        PacelineError: For a training that cannot be balanced (DeepSpeed, FSDP, several GPUs in one process), and
            invalid options.
    """

    def __init__(self, *args: Any, balance: dict[str, Any] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self)
        self.pace: HostedPace | None = None
        self._accumulates = self.args.gradient_accumulation_steps
        self._given = {"fill": True, **(balance or {})}
        self._loop = self._given.pop("loop", "whole")
        if self._loop not in ("whole", "round"):
            raise PacelineError(f"balance={{'loop': {self._loop!r}}}: expected 'whole' or 'round'")
        self.shared: bool | None = self._given.pop("shared", None)
        switches(**{"balance={'shared'}": self.shared})
        self._counting = Counting(self._given.pop("over", None))
        self.loading = {name: self._given.pop(name) for name in OF_COST if name in self._given}
        self.balance = self._options()
        # The loop must see a whole round as one batch, and leave it to Paceline to continue within an epoch after a
        # checkpoint. The user's own args are not changed.
        self.reads_over = not self.args.ignore_data_skip  # of a stream, the samples before a checkpoint
        self.args = copy.copy(self.args)
        self.args.gradient_accumulation_steps = 1
        self.args.ignore_data_skip = True
        self.add_callback(Pacing())
        self._pace_first()

    def _options(self) -> dict[str, Any]:
        """The options of Pace that follow from the user's and from ``args``."""
        steps, own = self._accumulates, self.args.per_device_train_batch_size
        if self.accelerator.split_batches:  # then it is the batch of all ranks
            own //= self.args.world_size
        options = {"global_batch": own * steps * self.args.world_size}
        if self._loop == "whole":
            return options | {"micro_steps": steps} | self._given
        return options | {"loop": "pieces"} | ({"micro_batch": own} if steps > 1 else {}) | self._given

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Every loss passes through this method, even if a subclass overrides the code that computes it.
        self._plain_backward = self.accelerator.backward
        self.accelerator.backward = self._weighted_backward
        # A loss may gather a metric of each sample, and the ranks have different numbers of samples.
        self._plain_gather = self.accelerator.gather
        self.accelerator.gather = self._gathered
        # What the next loss is a mean over, or its labels before that is known; None for its samples, or a sum.
        self._count: float | None = None
        self._items = False  # whether the Trainer has passed the labels of the next loss to what computes it
        self._factor: float | None = None  # of the next loss, if it is a sum
        self._loss: torch.Tensor | None = None  # sum of the weighted losses of the current round

    def _load_callback_state(self) -> None:
        super()._load_callback_state()  # may put new callbacks behind the others
        self._pace_first()

    def _pace_first(self) -> None:
        """Let callbacks of the user see the epoch that ``Pacing`` sets."""
        self.callback_handler.callbacks.sort(key=lambda callback: not isinstance(callback, Pacing))

    def get_train_dataloader(self) -> Any:
        if self.pace is not None and self.pace.host.in_round:  # the run before was interrupted
            self.pace.host.abandon()
        self._wrap_again()
        # A search of hyperparameters, or the user, may have changed them since.
        if self.args.gradient_accumulation_steps != 1:
            self._accumulates, self.args.gradient_accumulation_steps = (
                self.args.gradient_accumulation_steps,
                1,
            )
        self.balance = self._options()
        if isinstance(self.train_dataset, IterableDataset):
            return StreamedRounds(self, super().get_train_dataloader())
        if self.shared is not None:
            raise PacelineError(
                f"balance={{'shared': {self.shared}}} is for a stream, and train_dataset has a length; leave it out"
            )
        check_indexed(self.train_dataset, "give an IterableDataset")
        plain = super().get_train_dataloader()
        sampler, known = order_of(plain.batch_sampler)
        if not (known or type(sampler).__name__ in ("LengthGroupedSampler", "BatchRebalanceSampler")):
            raise PacelineError(
                f"the training samples are drawn by a {type(sampler).__name__}; expected the Trainer's own sampler "
                "(sentence-transformers: batch_sampler=BatchSamplers.BATCH_SAMPLER, one data set)"
            )
        return Rounds(self, plain)

    def _wrap_again(self) -> None:
        """Let the Trainer wrap a model in DDP that an evaluation before the first ``train()`` has prepared without
        it. Accelerate prepares a model once, and a plain Trainer would then train another model on each rank."""
        if peers.ranks() == 1 or isinstance(self.model_wrapped, DistributedDataParallel):
            return
        model: Any = self.model
        prepared = vars(model)
        if prepared.pop("_is_accelerate_prepared", False):
            self.model_wrapped = model
            if "_original_forward" in prepared:  # without mixed precision, which would be applied twice
                model.forward = prepared.pop("_original_forward")

    def get_total_train_batch_size(self, args: Any) -> int:
        return int(self.balance["global_batch"])

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        return list(islice(epoch_iterator, num_batches)), None

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Run all of this rank's micro-batches of a round.

        Args:
            model: As the Trainer passes it.
            inputs: The round's micro-batches.
            num_items_in_batch: Unused in a balanced round.

        Returns:
            The round's loss, the same on every rank.
        """
        pace = self.pace
        if pace is None or not isinstance(inputs, TrainerRound):
            return super().training_step(model, inputs, num_items_in_batch)
        self._loss = torch.zeros((), device=self.args.device)
        counted, over = 0.0, self._counting.of(self)
        for batch in inputs.micro_steps():
            with self._one_micro_batch() as averages:
                _, items = super().get_batch_samples(iter([batch]), 1, self.args.device)
                items = None if items is None else torch.as_tensor(items)
                labels = _labels(batch) if items is None else int(items)
                # 0 for a batch that only fills up this rank's micro-steps
                count = None if labels is None or over in (SAMPLES, TOTAL) else labels * pace.counts
                self._count, self._items = count, items is not None
                self._factor = self._times(items, averages, inputs.samples) if over == TOTAL else None
                super().training_step(model, batch, None if items is None else items.clamp(min=1))
                counted += self._count or 0
            inputs.note(getattr(self.model, "main_input_name", "input_ids"), batch)
        summed = torch.stack([self._loss.double(), self._loss.new_tensor(counted, dtype=torch.float64)])
        self._loss = None
        if peers.ranks() > 1:
            dist.all_reduce(summed)
        loss, everywhere = summed[0], float(summed[1])
        # With fixed chunks (results with the same bits), the weights do not contain the factor for DDP's average.
        if not pace.host.terms.chunk:
            loss = loss / peers.ranks()
        if self._count is not None and everywhere and everywhere != inputs.samples:
            # So far it is the sum over the labels divided by the round's samples; the mean over labels is needed.
            scale = inputs.samples / everywhere
            torch._foreach_mul_([p.grad for p in model.parameters() if p.grad is not None], scale)
            loss = loss * scale
        return loss

    def _weighted_backward(self, loss: torch.Tensor, **options: Any) -> None:
        pace, nan = self.pace, False
        if pace is None or self._loss is None:
            self._plain_backward(loss, **options)
            return
        if self._count is not None:
            samples = pace.host.piece.samples
            self._count = count = self._counting.count(loss, int(self._count), samples, self._items)
            if count:
                loss = loss * count
            else:  # a mean over no labels is NaN, and so may be its gradient
                nan, loss = not bool(loss.isfinite()), torch.nan_to_num(loss) * 0.0
        sums = self._count is not None or self._factor is not None
        weighted = loss * pace.host.weight(loss, "sum" if sums else "mean")
        if self._factor is not None:
            weighted = weighted * self._factor
        self._loss = self._loss + weighted.detach()
        with _no_gradients(self.model) if nan else contextlib.nullcontext():
            self._plain_backward(weighted, **options)
        pace.host.backward_done()

    def _gathered(self, tensor: Any) -> Any:
        """``Accelerator.gather``; within a round, the tensors may have different lengths on the ranks."""
        if self._loss is None or peers.ranks() == 1:
            return self._plain_gather(tensor)
        return recursively_apply(
            _gather_unlike, tensor, self.pace is None or self.pace.counts, error_on_other_type=True
        )

    def _times(self, items: Any, averages: bool, samples: int) -> float:
        """The factor with which a plain Trainer's gradient of a loss that is a sum differs from the mean over the
        round's samples. items: what the Trainer counts for the loss, which it then takes for normalised.
        averages: the user's average_tokens_across_devices."""
        if items is None:
            return samples / (self.args.world_size * self._accumulates)
        return samples / (1 if averages else self.args.world_size)

    @contextlib.contextmanager
    def _one_micro_batch(self) -> Iterator[bool]:
        """Let the Trainer count only this rank's tokens in a micro-batch, and leave out its division by a single
        micro-step, which would look like one by a single sample; evaluation is not changed. Yields whether the user's
        Trainer counts the tokens of all ranks."""
        kept, self.args.average_tokens_across_devices = self.args.average_tokens_across_devices, False
        scaled, self.loss_is_scaled_for_ga = self.loss_is_scaled_for_ga, True
        try:
            yield bool(kept)
        finally:
            self.args.average_tokens_across_devices, self.loss_is_scaled_for_ga = kept, scaled


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
        # Without a checkpoint, the Trainer has made its state from ``self.state()``, which is that of the run before.
        kept = state.stateful_callbacks.get(type(self).__name__) if state.global_step else None
        train_dataloader.start(kept and kept["attributes"]["saved"], state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._began = time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().host.stepped(time.perf_counter() - self._began)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        assert self._rounds is not None
        state.epoch = self._rounds.epoch_after()  # the loop itself counts from the begin of this run

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().host.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._pace().host.flush()
        self._pace().host.detach()

    def _pace(self) -> HostedPace:
        assert self._rounds is not None
        return self._rounds.pace


def _labels(batch: Any) -> int | None:
    """The number of labels that the loss of this batch is a mean over; None if it has no labels."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor):
        return None
    return labels.numel() if labels.is_floating_point() else int(labels.ne(-100).sum())


@contextlib.contextmanager
def _no_gradients(model: Any) -> Iterator[None]:
    """A context whose backward passes add zeros to the gradients."""
    handles = [p.register_hook(torch.zeros_like) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gather_unlike(tensor: torch.Tensor, counts: bool = True) -> torch.Tensor:
    """The rows of all ranks, which may have different numbers of rows.

    counts: whether those of this rank count; a single number of each rank is kept.
    """
    rows = tensor[None] if tensor.ndim == 0 else tensor[: None if counts else 0]
    own = rows.detach().cpu().clone()  # without a copy, a slice would be sent with its whole storage
    return torch.cat([each.to(rows.device) for each in peers.gather(own)])


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
