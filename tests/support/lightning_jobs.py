"""What the ranks of the Lightning tests run."""

from __future__ import annotations

import copy
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import RoundResult
from paceline.torch.callbacks import OnRound
from support import hosts
from support.fabric_jobs import sharded, whole
from support.hosts import BATCH, COUNT, EPOCHS, FREE, SEED, UNEVEN, Samples, fresh, optimizer_of

SILENT = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "enable_checkpointing": False,
}  # fmt: skip


def module_of(dtype: torch.dtype) -> Any:
    from lightning.pytorch import LightningModule

    class Task(LightningModule):
        """Notes the samples that count, and the kind of its outputs."""

        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_of = fresh(dtype), nn.CrossEntropyLoss()
            self.used: list[list[int]] = []
            self.milliseconds, self.sharding, self.fails_at = 0.0, False, -1

        def configure_model(self) -> None:
            if self.sharding:
                sharded(self.net, self.device_mesh)

        def on_train_epoch_start(self) -> None:
            self.used.append([])

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            x, y, index = batch
            balanced = self.trainer.callbacks[0]
            if self.trainer.global_step == self.fails_at:
                raise ArithmeticError
            time.sleep(self.milliseconds * len(x) / 1e3)
            if balanced.pace.counts:
                if not self.used:  # resumed in mid-epoch
                    self.used.append([])
                self.used[-1] += index.tolist()
            out = self.net(x)
            self.kind = out.dtype
            loss = self.loss_of(out, y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    return Task()


def fit(
    ranks: int,
    dtype: str = "float64",
    precision: str = "64-true",
    until: int = -1,
    ckpt: str | None = None,
    keep: dict[str, Any] | None = None,
    loader_workers: int = 0,
    milliseconds: float = 0.0,
    sharding: bool = False,
    options: dict[str, Any] | None = None,
    epochs: int = EPOCHS,
    count: int = COUNT,
    batch: int = BATCH,
    loading: dict[str, Any] | None = None,
    **trainer_options: Any,
) -> dict[str, Any]:
    """One fit by ``ranks`` ranks; what it used, ended with, and how its rounds were divided."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    from paceline.hosts.lightning import BalancedCallback

    warnings.filterwarnings("ignore", module="lightning")
    results: list[RoundResult] = []
    options = {"policy": UNEVEN if ranks > 1 else "equal", "limits": FREE[:ranks]} | (options or {})
    balanced = BalancedCallback(batch, callbacks=[OnRound(results.append)], **options)
    callbacks = [balanced, *([ModelCheckpoint(**keep)] if keep else [])]
    task = module_of(getattr(torch, dtype))
    task.milliseconds, task.sharding = milliseconds, sharding
    strategy: Any = "ddp" if ranks > 1 else "auto"
    if sharding:
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = Trainer(
        **SILENT | ({"enable_checkpointing": True} if keep else {}), devices=ranks if ranks > 1 else 1,
        strategy=strategy, precision=precision, callbacks=callbacks,
        max_epochs=epochs, max_steps=until, **trainer_options,
    )  # fmt: skip
    began = time.perf_counter()
    trainer.fit(
        task,
        balanced.loader(
            Samples(count, getattr(torch, dtype)), seed=SEED, num_workers=loader_workers, **loading or {}
        ),
        ckpt_path=ckpt,
    )
    return {
        "used": task.used,
        "parameters": [whole(p).tolist() for p in task.net.parameters()],
        "loads": [result.loads.tolist() for result in results],
        "losses": [result.loss for result in results],
        "seconds": time.perf_counter() - began,
        "kind": str(task.kind),
        "steps": trainer.global_step,
    }


def fits(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[Any]:
    """A fit for each case, and with three ranks what validation gave."""
    hosts.as_torchrun(rank, ranks)
    return [*(fit(ranks, **case) for case in cases), *([evaluated(ranks)] if ranks == 3 else [])]


def stopped_and_resumed(rank: int, ranks: int, folder: str, cases: list[dict[str, Any]]) -> list[Any]:
    """For each case (its ``steps``, and options of ``fit``): a fit that keeps a checkpoint after so many steps, and
    one that goes on from it; and at last an unbroken one."""
    hosts.as_torchrun(rank, ranks)
    pairs = []
    for number, case in enumerate(cases):
        case = dict(case)
        steps, where = case.pop("steps"), Path(folder) / str(number)
        keep = {"dirpath": where, "save_top_k": -1}
        keep |= (
            {"every_n_train_steps": steps}
            if steps
            else {"every_n_epochs": 1, "save_on_train_epoch_end": True}
        )
        first = fit(ranks, keep=keep, **case | ({"until": steps} if steps else {"epochs": 1}))
        (kept,) = where.glob("*.ckpt")
        pairs.append((first, fit(ranks, ckpt=str(kept), **case)))
    return [*pairs, fit(ranks)]


def evaluated(ranks: int) -> list[tuple[float, float]]:
    """The validation losses within a balanced fit, each beside that of a Trainer without Paceline that is given the
    same parameters."""
    from lightning.pytorch import Callback, LightningModule, Trainer

    from paceline.hosts.lightning import BalancedCallback

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.loss_of = hosts.normed(), nn.CrossEntropyLoss()

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return self.loss_of(self.net(batch[0]), batch[1])

        def validation_step(self, batch: Any, _: int) -> None:
            self.log("loss", self.loss_of(self.net(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer_of(self.net)

    class Keeps(Callback):
        def on_validation_end(self, trainer: Any, task: Any) -> None:
            kept.append((trainer.callback_metrics["loss"].item(), copy.deepcopy(task.state_dict())))

    kept: list[tuple[float, Any]] = []
    balanced, pairs = BalancedCallback(BATCH, policy=UNEVEN), []
    options: dict[str, Any] = {"devices": ranks, "strategy": "ddp", "precision": "64-true"} | SILENT
    fitting = {
        "max_epochs": 1,
        "accumulate_grad_batches": 2,
        "val_check_interval": 6,
        "num_sanity_val_steps": -1,
    }
    plain = torch.utils.data.DataLoader(Samples(COUNT), 7)
    Trainer(**options, **fitting, callbacks=[balanced, Keeps()]).fit(
        Task(), balanced.loader(Samples(COUNT), seed=SEED), plain
    )
    for loss, state in kept:
        task = Task()
        task.load_state_dict(state)
        (found,) = Trainer(**options).validate(
            task, torch.utils.data.DataLoader(Samples(COUNT), 7), verbose=False
        )
        pairs.append((loss, found["loss"]))
    return pairs


def failed_and_resumed(folder: str, fails_at: int) -> tuple[list[list[int]], dict[str, Any]]:
    """One process whose step fails, and one that goes on from what Lightning kept: the first's samples, the end."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    from paceline.hosts.lightning import BalancedCallback

    balanced, task = BalancedCallback(BATCH), module_of(torch.float64)
    task.fails_at = fails_at
    callbacks = [balanced, OnExceptionCheckpoint(folder)]
    try:
        Trainer(
            **SILENT | {"enable_checkpointing": True}, precision="64-true", max_epochs=EPOCHS, callbacks=callbacks
        ).fit(task, balanced.loader(Samples(COUNT), seed=SEED))  # fmt: skip
    except ArithmeticError:
        return task.used, fit(1, ckpt=f"{folder}/on_exception.ckpt")
    raise AssertionError("the step did not fail")


def refusal(trainer_options: dict[str, Any], options: dict[str, Any], plain: bool = False) -> str:
    """The sentence with which one process is refused."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from paceline.hosts.lightning import BalancedCallback

    task = module_of(torch.float32)
    data = Samples(COUNT, torch.float32)

    try:
        balanced = BalancedCallback(BATCH, **options)
        callbacks = [balanced, *trainer_options.pop("callbacks", [])]
        Trainer(**SILENT, max_epochs=1, callbacks=callbacks, **trainer_options).fit(
            task, DataLoader(data, 8) if plain else balanced.loader(data)
        )
    except PacelineError as error:
        return str(error)
    return "nothing was wrong"
