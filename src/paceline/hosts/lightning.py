"""Balanced batches under Lightning's Trainer.

    balanced = BalancedCallback(global_batch=256)                                # 1
    trainer = Trainer(..., callbacks=[balanced])                         # 2
    trainer.fit(model, balanced.loader(dataset, seed=0))                 # 3, instead of a DataLoader

The loader may also come from ``train_dataloader()`` of the module or a data module. The callback weights the gradient
at the begin of the backward pass, so that DDP's mean over the ranks is the gradient of the whole batch;
``training_step`` returns the mean over its samples, as usual. With ``accumulate_grad_batches=a`` every round takes a
micro-steps on every rank, and global_batch is the number of samples in the whole window. The callback's state, which
includes the position within the epoch, is part of Lightning's checkpoints.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch

from paceline.commands import installation
from paceline.errors import PacelineError, refuse, short
from paceline.policies import Policy
from paceline.rounds import Cluster
from paceline.torch.feed.loader import BalancedLoader, check_indexed
from paceline.torch.gradients.counts import checked_count
from paceline.torch.gradients.weighing import GLOBAL
from paceline.torch.host import Host
from paceline.torch.mistakes import Words
from paceline.torch.options import has_batch_norm, min_samples_of
from paceline.torch.progress import rounds

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import (
        BatchSizeFinder,
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ModuleNotFoundError as error:  # pragma: no cover - if the extra is not installed
    raise PacelineError(f"Lightning is not installed; {installation('hosts')}") from error

from paceline.hosts.accumulating import HostedPace
from paceline.hosts.fabric import check_strategy

__all__ = ["BalancedCallback"]

# Options of Pace that the user cannot set, and what determines them.
OWNED = {"micro_steps": "accumulate_grad_batches", "weigh": "the loss", "loop": "the Trainer's"}


class _UnderLightning(Host):
    """The host of a BalancedCallback's Pace."""

    words = Words(
        count="pass the number that it is a mean over: BalancedCallback(..., count='over'), with a training_step "
        "that returns {{'loss': loss, 'over': {}}}, or {}",
        reduction="BalancedCallback(..., reduction={!r})",
        backward="one loss from training_step, the sum of all, or manual_backward(loss) for each",
        added="use BalancedCallback(..., policy='equal'), which gives all ranks the same load",
    )


class BalancedCallback(Callback):
    """Divides each global batch of a Trainer's fit according to the speeds of the ranks.

    ``pace`` is the Pace of the newest fit. A fit that cannot be balanced raises PacelineError when it begins.

    Args:
        global_batch: B, samples per optimizer step over all ranks, that is of the whole accumulation window.
        policy: As for ``paceline.torch.Pace``; policies that move work within the round are refused, since Lightning
            counts an epoch's batches beforehand.
        reduction: The form of the loss over the samples of ``training_step``'s batch: "mean", "sum", or "global" as
            in ``Pace.backward``.
        count: The key under which ``training_step`` returns, beside "loss", the number of tokens or the like that its
            loss is a mean (or sum) over, if not samples: ``count=`` of ``Pace.backward``.
        options: As for ``paceline.torch.Pace``; ``micro_batch`` limits a rank's load to what fits into memory in
            accumulate_grad_batches micro-steps.

    Raises:
        PacelineError: For an option that follows from the Trainer.
    """

    def __init__(
        self,
        global_batch: int,
        policy: str | Callable[[Cluster], Policy[Any]] = "auto",
        *,
        reduction: str = "mean",
        count: str | None = None,
        **options: Any,
    ) -> None:
        for owned, why in OWNED.items():
            if owned in options:
                raise PacelineError(f"{owned}= follows from {why} under Lightning; leave it out")
        self.global_batch, self.policy, self.reduction = int(global_batch), policy, reduction
        self.count = count
        self.options: dict[str, Any] = options
        self.pace: HostedPace | None = None
        self.trainer: Trainer | None = None
        self._loader: Loader | None = None
        self._saved: dict[str, Any] | None = None
        self._fitting = False
        self._noted = False  # whether this micro-step's loss is noted
        self._counted: float | None = None  # what this micro-step's loss is over, if not samples
        self._weighing: list[Any] = []  # the hooks that weigh the running backward pass
        self._stepping = 0.0

    def loader(self, dataset: Any, *, seed: int = 0, shuffle: bool = True, **options: Any) -> Loader:
        """The training data, for ``Trainer.fit``.

        Args:
            dataset: An indexed data set.
            seed: Seed of the order of the samples; the same on all ranks.
            shuffle: Whether each epoch has a random order.
            options: Of torch's DataLoader (num_workers, collate_fn, ...).

        Returns:
            A loader that yields this rank's part of each global batch.

        Raises:
            PacelineError: For a stream, and an empty data set.
        """
        check_indexed(dataset, "for a stream use paceline.hosts.fabric.FabricPace and its pace.stream(...)")
        self._loader = Loader(self, dataset, dict(options, seed=seed, shuffle=shuffle))
        return self._loader

    # -- what Lightning calls --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.trainer = trainer
            _check(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._loader is None or trainer.train_dataloader is not self._loader:
            raise PacelineError(
                f"the training data comes from a {type(trainer.train_dataloader).__name__}; expected only that of "
                "balanced.loader(dataset): pass it to fit(), or return it from train_dataloader()"
            )
        if self.count is not None:
            self._read_count(trainer, self.count)
        micro_steps, batches = trainer.accumulate_grad_batches, trainer.num_training_batches
        if batches % micro_steps:
            raise PacelineError(
                f"limit_train_batches leaves {batches:g} batches per epoch, so that its last round is incomplete; "
                f"expected a multiple of accumulate_grad_batches={micro_steps}"
            )
        model = trainer.strategy.model
        assert model is not None
        if _own_backward(pl_module) and not isinstance(trainer.strategy, DDPStrategy | SingleDeviceStrategy):
            raise PacelineError(
                f"{type(pl_module).__name__}.backward() under a {type(trainer.strategy).__name__}: what it adds to "
                "the loss would not be weighed; expected Lightning's own backward(), and the sum of all losses from "
                "training_step"
            )
        self.pace = HostedPace(model, self.global_batch, self.policy, micro_steps=micro_steps, **self.options)
        self.pace.host.adapter = _UnderLightning()
        _weigh_logs(trainer.fit_loop.epoch_loop._results, self.pace)
        self._fitting = True
        if self._saved is not None:
            self.pace.load_state_dict(self._saved)

    def on_train_batch_start(self, *_: Any) -> None:
        self._noted = False

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        pace = self._running()
        # Lightning has divided the loss by it; one over all ranks keeps that weight.
        divided = 1 if self.reduction == GLOBAL else trainer.accumulate_grad_batches
        whole = loss * divided
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            whole = whole / scaler.get_scale()
        if not pl_module.automatic_optimization:
            pace.host.prepared()  # Lightning does so for each manual_backward, within DDP's forward pass
        weight = pace.host.weight(None if self._noted else whole, self.reduction, self._counted)
        weight, self._noted = weight * divided, True
        weighed: Sequence[torch.Tensor] = (loss,)
        if _own_backward(pl_module):  # it may add other losses to this one
            weighed = [each for each in pl_module.parameters() if each.requires_grad]
        self._weighing = [each.register_hook(lambda gradient: gradient * weight) for each in weighed]

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for hook in self._weighing:
            hook.remove()  # another loss may be a sum with this one
        self._running().host.backward_done()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._stepping = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        pace, loader = self._running(), self._loader
        assert loader is not None
        if pace.complete:
            pace.host.stepped(time.perf_counter() - self._stepping)
        else:
            pace.host.end_micro_step()
        # Lightning counts batches, and does not request one more, which would end the epoch.
        if pace.host.progress.samples_done == loader.samples:
            pace.host.close_epoch()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._running().host.abandon()  # on_train_batch_start may have ended the epoch with a batch that was drawn

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pace = self._running()
        pace.host.flush()
        self._saved, self._fitting = pace.state_dict(), False  # another fit continues from here
        pace.host.detach()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and self.pace is not None:
            self.pace.host.release()
            self._read_no_count(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._fitting:
            return
        pace = self._running()
        pace.host.abandon()
        # If another rank is lost, the state that was saved before is kept.
        with contextlib.suppress(PacelineError):
            self._saved = pace.state_dict()
        self._fitting = False
        pace.host.detach()
        self._read_no_count(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"pace": self._running().state_dict() if self._fitting else self._saved}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["pace"]

    def _read_count(self, trainer: Trainer, key: str) -> None:
        """Note the number that each ``training_step`` returns under ``key``."""
        if not trainer.lightning_module.automatic_optimization:
            raise PacelineError(
                f"count={key!r}: with manual optimization, training_step returns after its backward passes; use "
                "paceline.hosts.fabric.FabricPace, whose backward takes count="
            )
        strategy: Any = trainer.strategy
        plain = type(strategy).training_step

        def training_step(*args: Any, **options: Any) -> Any:
            output = plain(strategy, *args, **options)
            if not (isinstance(output, Mapping) and key in output):
                raise PacelineError(
                    f"count={key!r}, and training_step returned {short(output)}; expected "
                    f"{{'loss': loss, {key!r}: number}}"
                )
            self._counted = checked_count(output[key])
            return output

        strategy.training_step = training_step

    def _read_no_count(self, trainer: Trainer) -> None:
        if self.count is not None:
            vars(trainer.strategy).pop("training_step", None)

    def _running(self) -> HostedPace:
        assert self.pace is not None
        return self.pace


def _own_backward(module: LightningModule) -> bool:
    """Whether the module runs its backward passes by itself."""
    return getattr(module.backward, "__func__", None) is not LightningModule.backward


class Loader:
    """The iterable for Lightning: this rank's batches, ``accumulate_grad_batches`` per round.

    Made by ``BalancedCallback.loader``. It has the methods of a loader that Lightning can resume; its state is part
    of the callback's.
    """

    def __init__(self, balanced: BalancedCallback, dataset: Any, options: dict[str, Any]) -> None:
        self.dataset = dataset
        self._balanced, self._options = balanced, options
        self._made: tuple[HostedPace, BalancedLoader] | None = None

    @property
    def samples(self) -> int:
        """Samples that an epoch uses."""
        whole, batch = len(self.dataset), self._balanced.global_batch
        if not self._options.get("drop_last"):
            return whole
        if whole < batch:
            raise PacelineError(
                f"drop_last=True leaves nothing of {whole} samples, fewer than global_batch={batch}; leave it out, "
                "or take a smaller global_batch"
            )
        return whole - whole % batch

    def __len__(self) -> int:
        """Batches of a whole epoch, as many on every rank."""
        trainer = self._balanced.trainer
        if trainer is None:
            raise PacelineError(
                "balanced.loader(...) without its BalancedCallback; expected Trainer(callbacks=[balanced])"
            )
        min_samples = min_samples_of(trainer.lightning_module)
        many = rounds(self.samples, 0, self._balanced.global_batch, min_samples)
        return many * trainer.accumulate_grad_batches

    def __iter__(self) -> Iterator[Any]:
        trainer = self._balanced.trainer
        if trainer is None or self._balanced.pace is None:
            raise PacelineError(
                "balanced.loader(...) was read outside of a fit; expected Trainer(callbacks=[balanced]), whose fit() "
                "reads it"
            )
        pace, loader = self._balanced.pace, self._inner()
        ran = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        if not ran:  # the last fit may have ended within its epoch; Lightning then begins that epoch again
            pace.host.progress.begin(pace.epoch)
        left = len(loader)
        if ran + left != len(self):
            raise PacelineError(
                f"Lightning continues after batch {ran} of an epoch of {len(self)}, and {left} are left to balance; "
                "expected a checkpoint made with BalancedCallback, between two optimizer steps"
            )
        yield from islice(loader, left)

    @property
    def sampler(self) -> Loader:
        """The object on which Lightning calls ``set_epoch``."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Use the order of this epoch."""
        if self._balanced.pace is not None:
            self._inner().set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass

    def _inner(self) -> BalancedLoader:
        pace = self._balanced._running()
        if self._made is None or self._made[0] is not pace:
            self._made = pace, pace.loader(self.dataset, **self._options)
        return self._made[1]


def _weigh_logs(results: Any, pace: HostedPace) -> None:
    """Let values that ``training_step`` logs count each sample once: on a rank without work the batch counts for
    nothing, ``sync_dist`` weights the means of a step by samples, and the mean number of samples is not rounded.

    results: what Lightning collects of the training's logs.
    """
    plain = type(results).update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        metric = results[key]
        meta, synced = metric.meta, None
        if not (metric.is_tensor and pace.host.in_round and (meta.is_mean_reduction or not pace.counts)):
            plain(results, key, value, batch_size)
            return
        if not meta.is_mean_reduction:
            changes_nothing = (
                0.0 if meta.is_sum_reduction else -math.inf if meta.is_max_reduction else math.inf
            )
            floating = value if value.is_floating_point() else value.float()
            plain(results, key, torch.full_like(floating, changes_nothing), batch_size)
            if meta.on_step and not (meta.is_sum_reduction or meta.sync.should):
                metric._forward_cache = value  # of this rank's batch, whatever it counts for
            return
        if not pace.counts:
            value, batch_size = torch.zeros_like(value), 0
        if meta.on_step and meta.sync.should:
            sync, many = meta.sync, float(pace.host.piece.samples)
            synced = sync(value.clone() * many) / sync(torch.tensor(many, device=value.device))
            meta.sync = type(sync)(_op=sync.op)
        try:
            plain(results, key, value, batch_size)
        finally:
            if synced is not None:
                meta.sync = sync
        if synced is not None:
            metric._forward_cache = synced
            metric.value = metric.value if meta.on_epoch else synced
        if not metric.cumulated_batch_size.is_floating_point():
            metric.cumulated_batch_size = metric.cumulated_batch_size.double()

    results.update_metrics = update_metrics


def _check(trainer: Any) -> None:
    """Raises PacelineError for a Trainer that cannot be balanced."""
    check_strategy(trainer.strategy)
    scheduled = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
    finders = any(isinstance(one, (LearningRateFinder, BatchSizeFinder)) for one in trainer.callbacks)
    averages = getattr(trainer.strategy, "_model_averaging_period", None) is not None
    swa = any(isinstance(callback, StochasticWeightAveraging) for callback in trainer.callbacks)
    norms = swa and trainer.max_epochs != -1 and has_batch_norm(trainer.lightning_module)
    reasons = {
        "StochasticWeightAveraging runs one more epoch, without a backward pass, for the statistics of batch norm; "
        "use WeightAveraging and compute them after the fit, or use another norm": norms,
        "GradientAccumulationScheduler changes the window from epoch to epoch; "
        "set accumulate_grad_batches": scheduled,
        "model averaging lets the ranks' parameters differ; leave model_averaging_period out": averages,
        "LearningRateFinder and BatchSizeFinder train without BalancedCallback; run them by a Trainer without "
        "Paceline, and leave them out here": finders,
        "overfit_batches takes the same batches in every epoch, but balancing changes their order; "
        "leave it out": trainer.overfit_batches,
    }
    refuse("BalancedCallback", reasons)
