"""Lightning's Trainer with balanced batches, against one process that takes each whole batch itself."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from support import hosts
from support.guarantees import guarantee
from support.hosts import (
    BATCH,
    COSTS,
    COUNT,
    EPOCHS,
    FREE,
    SEED,
    UNEVEN,
    Found,
    Samples,
    Together,
    difference,
    every_sample_once,
    fresh,
    optimizer_of,
    whole_batch,
)  # fmt: skip
from support.ranks import run_ranks
from support.sharding import possible, sharded, whole
from support.skips import skip_without

skip_without("lightning")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()

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
            self.optimizer_of: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of
            self.used: list[list[int]] = []
            self.milliseconds, self.sharding, self.fails_at, self.ends_at = 0.0, False, -1, -1
            self.apart = False  # most of the loss is added in a backward() of its own

        def configure_model(self) -> None:
            if self.sharding:
                sharded(self.net, self.device_mesh)

        def on_train_epoch_start(self) -> None:
            self.used.append([])

        def on_train_batch_start(self, _: Any, number: int) -> int | None:
            return -1 if number == self.ends_at else None

        def training_step(self, batch: Any, _: int) -> Any:
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
            if self.apart:
                loss, self.rest = loss * 0.25, loss * 0.75
            weight = self.loss_of.weight
            return loss if weight is None else {"loss": loss, "over": weight[y].sum()}

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer_of(self.net)

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
    weight: torch.Tensor | None = None,
    ends_at: int = -1,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    apart: bool = False,
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
    task.milliseconds, task.sharding, task.ends_at = milliseconds, sharding, ends_at
    task.loss_of, task.optimizer_of = nn.CrossEntropyLoss(weight), optimizer
    if apart:
        task.apart, task.backward = True, lambda loss: (loss + task.rest).backward()
    strategy: Any = "ddp" if ranks > 1 else "auto"
    if sharding:
        strategy = ModelParallelStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    trainer = Trainer(
        **SILENT | ({"enable_checkpointing": True} if keep else {}), devices=ranks if ranks > 1 else 1,
        strategy=strategy, precision=precision, callbacks=callbacks,
        max_epochs=epochs, max_steps=until, **trainer_options,
    )  # fmt: skip
    began = time.perf_counter()
    data = balanced.loader(
        Samples(count, getattr(torch, dtype)), seed=SEED, num_workers=loader_workers, **loading or {}
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(task, data, ckpt_path=ckpt)
    return {
        "said": [
            f"{Path(one.filename).name}: {one.message}"
            for one in said
            if issubclass(one.category, RuntimeWarning)
        ],
        "used": task.used,
        "parameters": [whole(p).tolist() for p in task.net.parameters()],
        "loads": [result.loads.tolist() for result in results],
        "losses": [result.loss for result in results],
        "seconds": time.perf_counter() - began,
        "kind": str(task.kind),
        "steps": trainer.global_step,
        "wrapped": "training_step" in vars(trainer.strategy),
    }


CASES: dict[str, dict[str, Any]] = {
    "uneven": {},
    "accumulated and clipped": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05},
    "prefetching": {"loader_workers": 1, "epochs": 1},
    "sharded": {"sharding": True, "dtype": "float32", "precision": "32-true"},
    "by cost": {"loading": {"cost": COSTS, "padded": False}},
    "by cost, accumulated and clipped": {
        "accumulate_grad_batches": 3,
        "gradient_clip_val": 0.05,
        "loading": {"cost": COSTS, "padded": True},
    },
    "own backward": {"apart": True, "epochs": 1},
    "bfloat16": {"dtype": "float32", "precision": "bf16-mixed"},
}
CASES = possible(CASES)
CLIPPED = {"accumulated and clipped": 0.05, "by cost, accumulated and clipped": 0.05}


def names(ranks: int) -> list[str]:
    return list(CASES) if ranks == 3 else ["accumulated and clipped"]


@together
def fits(ranks: int, _: str) -> dict[str, Any]:
    return {name: fit(ranks, **CASES[name]) for name in names(ranks)}


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_fit_trains_model_of_one_process(ranks: int, found: Found, folder: str) -> None:
    every = (found if ranks == 3 else hosts.run_bodies(ranks, [fits], folder))[fits]
    for name in names(ranks):
        results = [rank[name] for rank in every]
        case = CASES[name]
        every_sample_once([result["used"] for result in results])
        assert len({str(result["parameters"]) for result in results}) == 1, f"{name}: the ranks differ"
        assert [result["said"] for result in results] == [[]] * ranks, name
        assert results[0]["loads"] == results[1]["loads"]
        assert any(len(set(loads)) > 1 for loads in results[0]["loads"]), f"{name}: the loads are even"
        epochs = case.get("epochs", 2)
        assert results[0]["steps"] == 6 * epochs
        mixed, kind = name == "bfloat16", case.get("dtype", "float64")
        assert results[0]["kind"] == ("torch.bfloat16" if mixed else f"torch.{kind}")
        expected = whole_batch(getattr(torch, kind), clip=CLIPPED.get(name), epochs=epochs)
        far = difference(results[0]["parameters"], expected)
        limit = 2e-2 if mixed else 1e-12 if kind == "float64" else 2e-6
        assert far < limit, f"{name}: relative difference {far:.1e}"


WEIGHT = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)


@together
def weighted(ranks: int, _: str) -> dict[str, Any]:
    """Fits with class weights: with the number that the loss is over, in one and three micro-steps, and without."""
    return {
        "count": fit(ranks, weight=WEIGHT, options={"count": "over"}),
        "count, accumulated": fit(ranks, weight=WEIGHT, options={"count": "over"}, accumulate_grad_batches=3),
        "no count": fit(ranks, weight=WEIGHT, epochs=1),
    }


@guarantee(
    "Losses with class weights, ignored targets or left-out samples are exact with `count=`; without it, "
    "Paceline raises or warns once."
)
def test_loss_with_class_weights_is_exact_with_count_and_warns_without(found: Found) -> None:
    expected = whole_batch(weight=WEIGHT)
    for rank in found[weighted]:
        for name in ("count", "count, accumulated"):
            assert difference(rank[name]["parameters"], expected) < 1e-12, name
            assert rank[name]["said"] == []
            assert not rank[name]["wrapped"], "the strategy keeps a function of this fit"
    said = [one for rank in found[weighted] for one in rank["no count"]["said"]]
    assert said
    assert all(one.startswith("test_lightning.py: ") for one in said), said
    assert all("count='over'" in one and "{'loss': loss, 'over': weight[y].sum()}" in one for one in said)


@together
def closed(ranks: int, _: str) -> str:
    """The error message for LBFGS, whose closure Lightning makes."""
    try:
        fit(ranks, optimizer=lambda net: torch.optim.LBFGS(net.parameters(), max_iter=2))
    except PacelineError as error:
        return str(error)
    return "nothing was wrong"


def test_lbfgs_that_decides_by_own_losses_raises(found: Found) -> None:
    for message in found[closed]:
        assert "LBFGS decides by the loss how often it runs its closure" in message


@together
def cut(ranks: int, folder: str) -> dict[str, Any]:
    """Epochs that ``on_train_batch_start`` ends with the third batch, and a checkpoint after each."""
    keep = {
        "dirpath": Path(folder) / "cut",
        "every_n_epochs": 1,
        "save_on_train_epoch_end": True,
        "save_top_k": -1,
    }
    return fit(ranks, ends_at=2, keep=keep)


def test_epoch_ended_by_its_module_continues_with_the_next(found: Found) -> None:
    expected = whole_batch(order=lambda epoch: Order(COUNT, SEED).epoch(epoch)[: 2 * BATCH])
    for rank in found[cut]:
        assert rank["steps"] == 2 * EPOCHS
        assert difference(rank["parameters"], expected) < 1e-12


@together
def dropped(ranks: int, _: str) -> dict[str, Any]:
    return fit(ranks, accumulate_grad_batches=2, loading={"drop_last": True})


def test_short_last_batch_is_dropped_if_asked(found: Found) -> None:
    full = COUNT // BATCH
    assert all(rank["steps"] == full * EPOCHS for rank in found[dropped])
    epochs = zip(*(rank["used"] for rank in found[dropped]), strict=True)
    assert [len({index for part in parts for index in part}) for parts in epochs] == [full * BATCH] * EPOCHS


@together
def validated(ranks: int, _: str) -> list[tuple[float, float]]:
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
        (alone,) = Trainer(**options).validate(task, plain, verbose=False)
        pairs.append((loss, alone["loss"]))
    return pairs


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_validation_gives_losses_without_paceline(found: Found) -> None:
    for pairs in found[validated]:
        assert len(pairs) == 1 + 2  # the sanity check, and every sixth of 12 batches
        assert all(ours == theirs for ours, theirs in pairs), pairs


RESUMED: list[dict[str, Any]] = [
    {"steps": 4},
    {"steps": 6, "accumulate_grad_batches": 2},  # at the end of the epoch, before Lightning says so
    {"steps": 0},
]


@together
def resumed(ranks: int, folder: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Two fits for each case: one keeps a checkpoint after so many steps, the other continues from it."""
    pairs = []
    for number, each in enumerate(RESUMED):
        case, where = dict(each), Path(folder) / str(number)
        keep = {"dirpath": where, "save_top_k": -1}
        if steps := case.pop("steps"):
            first = fit(ranks, keep=keep | {"every_n_train_steps": steps}, until=steps, **case)
        else:
            first = fit(
                ranks, keep=keep | {"every_n_epochs": 1, "save_on_train_epoch_end": True}, epochs=1, **case
            )
        (kept,) = where.glob("*.ckpt")
        pairs.append((first, fit(ranks, ckpt=str(kept), **case)))
    return pairs


def test_resumed_fit_is_as_if_unbroken(found: Found) -> None:
    unbroken = found[fits][0]["uneven"]
    parameters = [torch.tensor(p, dtype=torch.float64) for p in unbroken["parameters"]]
    for case, ranks in zip(RESUMED, zip(*found[resumed], strict=True), strict=True):
        first, then = ranks[0]
        assert first["loads"] + then["loads"] == unbroken["loads"], case
        assert difference(then["parameters"], parameters) < 1e-12, case
        used = chain.from_iterable(part["used"] for pair in ranks for part in pair)
        assert sorted(chain.from_iterable(used)) == sorted(2 * list(range(COUNT))), case


def failed_and_resumed(folder: str, fails_at: int) -> tuple[list[list[int]], dict[str, Any]]:
    """One process whose step fails, and one that continues from what Lightning kept: the first's samples, the end."""
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


def test_fit_that_failed_within_a_round_continues(tmp_path: Path) -> None:
    before, after = failed_and_resumed(str(tmp_path), 4)
    assert [*before[0], *after["used"][0]] == fit(1, epochs=1)["used"][0]
    assert difference(after["parameters"], whole_batch()) < 1e-12


def refusal(
    trainer_options: dict[str, Any], options: dict[str, Any], plain: bool = False, norm: bool = False
) -> str:
    """The error message that one process receives. norm: the module has batch norm, too."""
    from lightning.pytorch import Trainer
    from torch.utils.data import DataLoader

    from paceline.hosts.lightning import BalancedCallback

    task = module_of(torch.float32)
    task.norm = nn.BatchNorm1d(2) if norm else None
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


def test_trainer_that_cannot_be_balanced_raises() -> None:
    from lightning.pytorch.callbacks import (
        GradientAccumulationScheduler,
        LearningRateFinder,
        StochasticWeightAveraging,
    )

    limited = {"limit_train_batches": 4, "accumulate_grad_batches": 3}
    assert "expected a multiple of accumulate_grad_batches=3" in refusal(limited, {})
    assert "overfit_batches" in refusal({"overfit_batches": 2}, {})
    changing = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
    assert "set accumulate_grad_batches" in refusal(changing, {})
    averaging: dict[str, Any] = {"callbacks": [StochasticWeightAveraging(swa_lrs=0.1, swa_epoch_start=1)]}
    assert "one more epoch, without a backward pass" in refusal(averaging, {}, norm=True)
    assert "LearningRateFinder" in refusal({"callbacks": [LearningRateFinder()]}, {})
    assert "expected {'loss': loss, 'over': number}" in refusal({}, {"count": "over"})
    assert "comes from a DataLoader" in refusal({}, {}, plain=True)
    assert "plans whole rounds" in refusal({}, {"policy": "factoring"})
    assert "leave it out" in refusal({}, {"micro_steps": 2})
    assert "follows from the Trainer's" in refusal({}, {"loop": "round"})


def test_loader_of_a_stream_and_loader_outside_of_a_fit_raise() -> None:
    from paceline.hosts.lightning import BalancedCallback

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(COUNT))

    balanced = BalancedCallback(BATCH)
    with pytest.raises(PacelineError, match=r"is a Stream; .* for a stream use paceline\.hosts\.fabric"):
        balanced.loader(Stream())
    with pytest.raises(PacelineError, match="read outside of a fit"):
        next(iter(balanced.loader(Samples(COUNT, torch.float32))))


def losses(nets: nn.ModuleList, x: torch.Tensor, y: torch.Tensor, way: str) -> list[Any]:
    """The losses of a batch, each computed when it is its turn, with the number of the net that steps after it."""
    one, other = nets
    if way == "once":
        return [(lambda: nn.functional.cross_entropy(one(x), y), 0)]
    if way == "a loss in two passes":
        out = one(x)
        first, second = nn.functional.cross_entropy(out, y), out.square().mean()
        return [(lambda: first, None), (lambda: first + second, 0)]
    return [
        (lambda: (other(x).exp() - one(x).detach()).square().mean(), 1),
        (lambda: (other(x) + one(x)).square().mean(), 0),
    ]


def manual(rank: int, ranks: int, way: str) -> list[list[float]]:
    """The parameters after an epoch of manual optimization: one optimizer for each net."""
    from lightning.pytorch import LightningModule, Trainer

    from paceline.hosts.lightning import BalancedCallback

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.nets, self.automatic_optimization = two_nets(way), False

        def training_step(self, batch: Any, _: int) -> None:
            x, y, _ = batch
            optimizers = self.optimizers(use_pl_optimizer=True)
            optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
            for optimizer in optimizers if way != "zeroed in turn" else ():
                optimizer.zero_grad()
            for loss, number in losses(self.nets, x, y, way):
                if way == "zeroed in turn":
                    optimizers[number].zero_grad()
                toggles = way == "two nets"
                if toggles:
                    self.toggle_optimizer(optimizers[number])
                self.manual_backward(loss(), retain_graph=number is None)
                if number is not None:
                    optimizers[number].step()
                if toggles:
                    self.untoggle_optimizer(optimizers[number])

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return steppers(self.nets)

    hosts.as_torchrun(rank, ranks)  # else Lightning starts the ranks itself, which run this command again
    balanced = BalancedCallback(BATCH, UNEVEN, limits=FREE[:ranks])
    strategy = "ddp_find_unused_parameters_true" if way in ("two nets", "zeroed in turn") else "ddp"
    trainer = Trainer(
        **SILENT, precision="64-true", devices=ranks, strategy=strategy, callbacks=[balanced], max_epochs=1
    )
    task = Task()
    trainer.fit(task, balanced.loader(Samples(COUNT), seed=SEED))
    return [p.tolist() for p in task.nets.parameters()]


def two_nets(way: str) -> nn.ModuleList:
    other = fresh(torch.float64) if way in ("two nets", "zeroed in turn") else nn.Identity()
    return nn.ModuleList([fresh(torch.float64), other])


def steppers(nets: nn.ModuleList) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(net.parameters(), 0.1) for net in nets if list(net.parameters())]


def manual_alone(way: str) -> list[torch.Tensor]:
    nets, data = two_nets(way), Samples(COUNT)
    optimizers = steppers(nets)
    order = Order(COUNT, SEED).epoch(0)
    for start in range(0, COUNT, BATCH):
        chosen = torch.as_tensor(order[start : start + BATCH])
        if way != "zeroed in turn":
            nets.zero_grad()
        for loss, number in losses(nets, data.x[chosen], data.y[chosen], way):
            if way == "zeroed in turn":
                optimizers[number].zero_grad()
            for each, net in enumerate(nets):
                net.requires_grad_(number in (None, each) or way != "two nets")
            loss().backward(retain_graph=number is None)
            if number is not None:
                optimizers[number].step()
    return [p.detach() for p in nets.parameters()]


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("way", ["once", "a loss in two passes", "two nets", "zeroed in turn"])
def test_manual_optimization_trains_model_of_one_process(way: str) -> None:
    for found in run_ranks(2, manual, way):
        assert difference(found, manual_alone(way)) < 1e-12


def logged(rank: int, ranks: int) -> dict[str, float]:
    """What Lightning has of means that are logged in a round of 60 samples, of which rank 2 has none."""
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from paceline.hosts.lightning import BalancedCallback

    class Task(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            (x,) = batch
            for name, how in (("epoch", {"on_epoch": True, "on_step": False}), ("step", {"on_step": True})):
                self.log(name, x.mean(), sync_dist=True, batch_size=len(x), **how)
            self.log("largest", x.max(), on_epoch=True, on_step=False, sync_dist=True, reduce_fx="max")
            for name, value in (("sum", x.sum()), ("max", x.max()), ("min", x.min())):
                value = value if balanced.pace.counts else torch.tensor({"min": -7.0}.get(name, 700.0))
                self.log(f"{name} of all", value, on_epoch=True, sync_dist=True, reduce_fx=name)
            loss: torch.Tensor = self.net(x).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    hosts.as_torchrun(rank, ranks)  # else Lightning starts the ranks itself, which run this command again
    balanced = BalancedCallback(60, limits=[(43, 43), (17, 17), (0, 0)][:ranks])
    data = torch.utils.data.TensorDataset(torch.arange(180.0)[:, None])
    trainer = Trainer(**SILENT, devices=ranks, strategy="ddp", callbacks=[balanced], max_epochs=1)
    trainer.fit(Task(), balanced.loader(data, shuffle=False))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@guarantee("Means that Lightning's `training_step` logs with `sync_dist` are means over all samples.")
def test_logged_means_are_those_over_all_samples() -> None:
    for found in run_ranks(3, logged):
        means = {"epoch": 89.5, "step": 149.5, "largest": 179.0}
        sums = {"sum of all": 16110.0, "max of all": 179.0, "min of all": 0.0}
        assert {name: found[name] for name in means} == means
        assert {name: found[f"{name}_epoch"] for name in sums} == sums
