"""Balanced batches in Ray Train's real TorchTrainer: exact, and going on after a worker's failure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support import hosts
from support.guarantees import guarantee
from support.later import later

ray_jobs = later("support.ray_jobs", needs="ray")

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray-products"), pytest.mark.usefixtures("cluster")]


def fit(ranks: int, folder: Path, fails: int | None = None) -> list[dict[str, Any]]:
    """What each worker found, by rank; the worker ``fails`` fails once after a checkpoint."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        ray_jobs.loop,
        train_loop_config={"folder": str(folder), "fails": fails},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=ranks),
        run_config=RunConfig(
            storage_path=str(folder / "storage"),
            name="run",
            failure_config=FailureConfig(int(fails is not None)),
        ),
    ).fit()
    return [
        {
            key: value
            for path in sorted(folder.glob(f"*-{rank}.json"))
            for key, value in json.loads(path.read_text()).items()
        }
        for rank in range(ranks)
    ]


@pytest.fixture(scope="module", autouse=True)
def loaded(forks_of_ray: Any) -> None:
    forks_of_ray.load(*forks_of_ray.BESIDE_RAY_TRAIN)


@pytest.fixture(scope="module")
def found(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return fit(3, tmp_path_factory.mktemp("ray"))


@pytest.fixture(scope="module")
def two(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Two workers, one of which fails. Each attempt starts processes, which import PyTorch and Ray Train."""
    return fit(2, tmp_path_factory.mktemp("two"), fails=1)


def test_as_one_process(found: list[dict[str, Any]]) -> None:
    assert max(rank["plain"][0] for rank in found) < 1e-12
    assert max(rank["accumulated"] for rank in found) < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in found])


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
def test_samples_may_cost_differently(found: list[dict[str, Any]]) -> None:
    assert max(rank["by cost"][0] for rank in found) < 1e-12
    hosts.every_sample_once([rank["by cost"][1] for rank in found])


def test_two_ranks(two: list[dict[str, Any]]) -> None:
    assert max(rank["plain"][0] for rank in two) < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in two])


def test_work_may_move_within_the_round(found: list[dict[str, Any]]) -> None:
    assert max(rank["moved"][0] for rank in found) < 1e-12
    hosts.every_sample_once([rank["moved"][1] for rank in found])


def test_continues_after_a_failure(two: list[dict[str, Any]]) -> None:
    assert max(rank["off"] for rank in two) < 1e-12
    hosts.every_sample_once(
        [[a + b for a, b in zip(rank["before"], rank["after"], strict=True)] for rank in two]
    )


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluates_as_without_it(found: list[dict[str, Any]]) -> None:
    for ours, theirs in (rank["evaluated"] for rank in found):
        assert sum(map(len, ours)) >= hosts.COUNT
        assert ours == theirs


def test_bf16(found: list[dict[str, Any]]) -> None:
    for off, dtypes in (rank["bf16"] for rank in found):
        assert dtypes == ["torch.bfloat16"]
        assert off < 0.02


def test_mistakes_raise(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "the data set is a list_iterator" in rank["streamed"]
    # In a process of its own: a trainer without workers leaves a context behind in the process that ran it.
    code = "import torch; from paceline.hosts.ray_train import RayTrainPace; RayTrainPace(torch.nn.Linear(1, 1), 16)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "PacelineError: " in done.stderr
    assert "outside of a Ray Train worker" in done.stderr
