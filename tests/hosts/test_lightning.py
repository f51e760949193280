"""Lightning's Trainer with balanced batches, against one process that takes each whole batch itself."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from support import hosts
from support.guarantees import guarantee
from support.hosts import COSTS, difference, every_sample_once, whole_batch
from support.later import later
from support.ranks import run_ranks
from support.sharding import possible

jobs = later("support.lightning_jobs", needs="lightning")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]

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
    "bfloat16": {"dtype": "float32", "precision": "bf16-mixed"},
}
CASES = possible(CASES)
VALIDATED = -1  # what follows the cases' fits
CLIPPED = {"accumulated and clipped": 0.05, "by cost, accumulated and clipped": 0.05}


@pytest.fixture(scope="module")
def three() -> list[list[Any]]:
    return run_ranks(3, jobs.fits, list(CASES.values()))


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_one_process_with_the_whole_batch(ranks: int, three: list[list[Any]]) -> None:
    names = list(CASES) if ranks == 3 else ["accumulated and clipped"]
    found = three if ranks == 3 else run_ranks(ranks, jobs.fits, [CASES[name] for name in names])
    for number, name in enumerate(names):
        results = [rank[number] for rank in found]
        case = CASES[name]
        every_sample_once([result["used"] for result in results])
        assert len({str(result["parameters"]) for result in results}) == 1, f"{name}: the ranks differ"
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


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_validates_as_without_it(three: list[list[Any]]) -> None:
    for pairs in (rank[VALIDATED] for rank in three):
        assert len(pairs) == 1 + 2  # the sanity check, and every sixth of 12 batches
        assert all(ours == theirs for ours, theirs in pairs), pairs


def test_resumes_from_a_checkpoint_as_if_unbroken(tmp_path: Path) -> None:
    cases = [
        {"steps": 4},
        {"steps": 6, "accumulate_grad_batches": 2},  # at the end of the epoch, before Lightning says so
        {"steps": 0},
    ]
    ranks = run_ranks(3, jobs.stopped_and_resumed, str(tmp_path), cases)
    unbroken = ranks[0][-1]
    for number, case in enumerate(cases):
        first, then = ranks[0][number]
        assert first["loads"] + then["loads"] == unbroken["loads"], case
        assert (
            difference(
                then["parameters"], [torch.tensor(p, dtype=torch.float64) for p in unbroken["parameters"]]
            )
            < 1e-12
        ), case
        used = chain.from_iterable(part["used"] for rank in ranks for part in rank[number])
        assert sorted(chain.from_iterable(used)) == sorted(2 * list(range(83))), case


def test_continues_after_an_exception_within_a_round(tmp_path: Path) -> None:
    before, after = jobs.failed_and_resumed(str(tmp_path), 4)
    assert [*before[0], *after["used"][0]] == jobs.fit(1, epochs=1)["used"][0]
    assert difference(after["parameters"], whole_batch()) < 1e-12


def test_what_cannot_be_balanced_is_refused() -> None:
    from lightning.pytorch.callbacks import GradientAccumulationScheduler

    limited = {"limit_train_batches": 4, "accumulate_grad_batches": 3}
    assert "expected a multiple of accumulate_grad_batches=3" in jobs.refusal(limited, {})
    assert "overfit_batches" in jobs.refusal({"overfit_batches": 2}, {})
    changing = {"callbacks": [GradientAccumulationScheduler({0: 1, 1: 2})]}
    assert "set accumulate_grad_batches" in jobs.refusal(changing, {})
    assert "comes from a DataLoader" in jobs.refusal({}, {}, plain=True)
    assert "plans whole rounds" in jobs.refusal({}, {"policy": "factoring"})
    assert "leave it out" in jobs.refusal({}, {"micro_steps": 2})
    assert "follows from the Trainer's" in jobs.refusal({}, {"loop": "round"})


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
            loss: torch.Tensor = self.net(x).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    hosts.as_torchrun(rank, ranks)  # else Lightning starts the ranks itself, which run this command again
    balanced = BalancedCallback(60, limits=[(43, 43), (17, 17), (0, 0)][:ranks])
    data = torch.utils.data.TensorDataset(torch.arange(180.0)[:, None])
    trainer = Trainer(**jobs.SILENT, devices=ranks, strategy="ddp", callbacks=[balanced], max_epochs=1)
    trainer.fit(Task(), balanced.loader(data, shuffle=False))
    return {name: float(trainer.callback_metrics[name]) for name in ("epoch", "step", "largest")}


@guarantee("Means that Lightning's `training_step` logs with `sync_dist` are means over all samples.")
def test_logged_means_are_those_over_all_samples() -> None:
    for found in run_ranks(3, logged):
        assert found == {"epoch": 89.5, "step": 149.5, "largest": 179.0}
