"""Balanced batches in Ray Train's real TorchTrainer: exact, and going on after a worker's failure."""

from __future__ import annotations

import contextlib
import copy
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import peers
from support import hosts
from support.guarantees import guarantee
from support.hosts import (
    BATCH,
    COUNT,
    EPOCHS,
    FREE,
    SEED,
    UNEVEN,
    Samples,
    Together,
    difference,
    fresh,
    optimizer_of,
    whole_batch,
)
from support.skips import skip_without

skip_without("ray")

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray-products"), pytest.mark.usefixtures("cluster")]
together = Together()

FALLS = 8  # rounds after which a worker fails, once; within the second epoch


class Run:
    """A worker's training loop, as Ray Train's users write it."""

    def __init__(
        self,
        ranks: int,
        dtype: torch.dtype = torch.float64,
        net: nn.Module | None = None,
        loading: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        import ray.train.torch

        from paceline.hosts.ray_train import RayTrainPace

        self.net = net or fresh(dtype)
        self.model = ray.train.torch.prepare_model(self.net)
        self.optimizer = optimizer_of(self.model)
        options = {"policy": UNEVEN, "limits": FREE[:ranks]} | options
        self.pace = RayTrainPace(self.model, BATCH, **options)
        self.loader = self.pace.loader(Samples(COUNT, dtype), seed=SEED, **loading or {})
        self.used: list[list[int]] = [[] for _ in range(EPOCHS)]
        self.dtypes: set[str] = set()

    def train(
        self, rounds: int | None = None, clip: float | None = None, jitter: float = 0.0, precision: Any = None
    ) -> None:
        """To the last epoch, or for so many rounds."""
        loss_of, stalls = nn.CrossEntropyLoss(), random.Random(peers.rank())
        for epoch in range(self.pace.epoch, EPOCHS):
            for x, y, index in self.loader:
                time.sleep(jitter * stalls.expovariate(1.0))
                self.used[epoch] += index.tolist() if self.pace.counts else []
                mixed = torch.autocast("cpu", precision) if precision else contextlib.nullcontext()
                with mixed:
                    logits = self.model(x)
                self.dtypes.add(str(logits.dtype))
                self.pace.backward(loss_of(logits.to(x.dtype), y))
                if clip is not None and self.pace.complete:
                    nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                self.pace.step(self.optimizer)
                if self.pace.rounds == rounds:
                    return

    def off(self, clip: float | None = None) -> float:
        """How far the parameters are from those of one process."""
        self.pace.close()
        return difference(self.net.parameters(), whole_batch(clip=clip))

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "pace": self.pace}


def trained(ranks: int, clip: float | None = None, jitter: float = 0.0, **options: Any) -> tuple[float, Any]:
    """How far the parameters are from those of one process, and the samples of each epoch."""
    run = Run(ranks, **options)
    run.train(clip=clip, jitter=jitter)
    return run.off(clip), run.used


def fit(ranks: int, folder: Path, fails: int | None = None) -> list[dict[str, Any]]:
    """What each worker found, by rank; the worker ``fails`` fails once after a checkpoint."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    TorchTrainer(
        loop,
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


@together
def plain(ranks: int, _: str) -> tuple[float, Any]:
    return trained(ranks)


@together
def accumulated(ranks: int, _: str) -> tuple[float, Any]:
    return trained(ranks, clip=0.3, micro_batch=3, loop="pieces")


def test_uneven_rounds_train_model_of_one_process(found: list[dict[str, Any]]) -> None:
    assert max(rank[name][0] for rank in found for name in ("plain", "accumulated")) < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in found])


def test_two_workers_train_model_of_one_process(two: list[dict[str, Any]]) -> None:
    assert max(rank["plain"][0] for rank in two) < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in two])


@together
def by_cost(ranks: int, _: str) -> tuple[float, Any]:
    return trained(ranks, loading={"cost": hosts.COSTS})


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
def test_samples_of_different_cost_train_model_of_one_process(found: list[dict[str, Any]]) -> None:
    assert max(rank["by_cost"][0] for rank in found) < 1e-12
    hosts.every_sample_once([rank["by_cost"][1] for rank in found])


@together
def moved(ranks: int, _: str) -> tuple[float, Any]:
    return trained(ranks, jitter=2e-3, policy="factoring", limits=None, loop="pieces")


def test_work_that_moves_within_rounds_trains_model_of_one_process(found: list[dict[str, Any]]) -> None:
    assert max(rank["moved"][0] for rank in found) < 1e-12
    hosts.every_sample_once([rank["moved"][1] for rank in found])


def loop(config: dict[str, Any]) -> None:
    """A worker, which leaves what the bodies found. Where a worker is to fail: a first attempt that ends with that
    after a checkpoint, and a second that continues from it."""
    import ray.train

    context = ray.train.get_context()
    rank, ranks, kept = context.get_world_rank(), context.get_world_size(), ray.train.get_checkpoint()
    bodies = together if config["fails"] is None else [plain, before] if kept is None else [after]
    found = {body.__name__: body(ranks, config["folder"]) for body in bodies}
    (Path(config["folder"]) / f"{bodies[-1].__name__}-{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()  # all have left what they found
    if config["fails"] == rank and kept is None:
        raise RuntimeError("this worker fails")


def before(ranks: int, _: str) -> list[list[int]]:
    import ray.train

    run = Run(ranks, policy="level", limits=None)
    run.train(rounds=FALLS)
    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: part.state_dict() for name, part in run.parts().items()}, Path(folder) / "state.pt")
        made = ray.train.Checkpoint.from_directory(folder) if peers.rank() == 0 else None
        ray.train.report({"rounds": FALLS}, checkpoint=made)
    run.pace.close()
    ray.train.get_all_reported_checkpoints()  # waits until the checkpoint is on record
    return run.used


def after(ranks: int, _: str) -> tuple[float, list[list[int]]]:
    import ray.train

    run = Run(ranks, policy="level", limits=None)
    with ray.train.get_checkpoint().as_directory() as folder:
        state = torch.load(Path(folder) / "state.pt", weights_only=True)
    for name, part in run.parts().items():
        part.load_state_dict(state[name])
    run.train()
    return run.off(), run.used


def test_failed_worker_continues_from_checkpoint(two: list[dict[str, Any]]) -> None:
    assert max(rank["after"][0] for rank in two) < 1e-12
    hosts.every_sample_once(
        [[a + b for a, b in zip(rank["before"], rank["after"][1], strict=True)] for rank in two]
    )


@together
def evaluated(ranks: int, _: str) -> tuple[Any, Any]:
    """What evaluation gives in mid-epoch of a balanced run, and without Paceline with the same parameters."""
    import ray.train.torch

    def evaluation(model: nn.Module) -> Any:
        loader = ray.train.torch.prepare_data_loader(torch.utils.data.DataLoader(Samples(COUNT), 7))
        return hosts.evaluation(model, loader, lambda output: output)

    run = Run(ranks, net=hosts.normed(), limits=None)
    run.train(rounds=3)
    state = copy.deepcopy(run.net.state_dict())
    ours = evaluation(run.model)
    run.pace.close()
    net = hosts.normed()
    net.load_state_dict(state)
    return ours, evaluation(ray.train.torch.prepare_model(net))


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluation_gives_results_without_paceline(found: list[dict[str, Any]]) -> None:
    for ours, theirs in (rank["evaluated"] for rank in found):
        assert sum(map(len, ours)) >= COUNT
        assert ours == theirs


@together
def bf16(ranks: int, _: str) -> tuple[float, list[str]]:
    run = Run(ranks, torch.float32)
    run.train(precision=torch.bfloat16)
    return run.off(), sorted(run.dtypes)


def test_bf16_trains_model_of_one_process(found: list[dict[str, Any]]) -> None:
    for off, dtypes in (rank["bf16"] for rank in found):
        assert dtypes == ["torch.bfloat16"]
        assert off < 0.02


@together
def refused(ranks: int, _: str) -> str:
    run = Run(ranks)
    try:
        run.pace.loader(iter([1, 2]))
    except PacelineError as error:
        return str(error)
    finally:
        run.pace.close()
    return "nothing was wrong"


def outside() -> None:
    from paceline.hosts.ray_train import RayTrainPace

    RayTrainPace(nn.Linear(1, 1), BATCH)


def test_mistakes_raise(found: list[dict[str, Any]], cluster: Any) -> None:
    for rank in found:
        assert "the data set is a list_iterator" in rank["refused"]
    # In a process of its own: a trainer without workers leaves a context behind in the process that ran it.
    with pytest.raises(PacelineError, match="outside of a Ray Train worker"):
        cluster.get(cluster.remote(max_calls=1)(outside).remote())
