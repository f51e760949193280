"""A Fabric loop with balanced batches, against one process that takes each whole batch itself."""

from __future__ import annotations

import copy
import random
import time
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch.callbacks import OnRound
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


def train(
    ranks: int,
    dtype: str = "float64",
    precision: str = "64-true",
    sharding: bool = False,
    clip: float | None = None,
    until: int = -1,
    save: str | None = None,
    load: str | None = None,
    jitter: float = 0.0,
    epochs: int = EPOCHS,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train up to ``epochs`` epochs or ``until`` rounds; what was used, and what it ended with."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    from paceline.hosts.fabric import FabricPace

    warnings.filterwarnings("ignore", module="lightning")
    kind = getattr(torch, dtype)
    torch.set_default_dtype(torch.float32)
    model = fresh(kind)
    torch.set_default_dtype(kind)  # to which Fabric casts the model's outputs
    strategy = ModelParallelStrategy(sharded, data_parallel_size=ranks, tensor_parallel_size=1)
    fabric = Fabric(
        accelerator="cpu", devices=ranks, strategy=strategy if sharding else "ddp", precision=precision
    )
    fabric.launch()
    if sharding:
        model = fabric.setup_module(model)
        optimizer = fabric.setup_optimizers(optimizer_of(model))
    else:
        model, optimizer = fabric.setup(model, optimizer_of(model))
    options = {"policy": UNEVEN, "limits": FREE[:ranks]} | options
    results: list[Any] = []
    pace = FabricPace(fabric, model, BATCH, callbacks=[OnRound(results.append)], **options)
    loader, loss_of = pace.loader(Samples(COUNT, kind), seed=SEED, **loading or {}), nn.CrossEntropyLoss()
    parts = {"model": model, "optimizer": optimizer, "pace": pace}
    if load is not None:
        fabric.load(load, parts)
    used: list[list[int]] = []
    stalls, window = random.Random(fabric.global_rank), options.get("accumulate", 1)
    kinds: set[str] = set()

    def loss_for(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        time.sleep(jitter * stalls.expovariate(1.0))
        if pace.counts:
            used[-1].extend(index.tolist())
        out = model(x)
        kinds.add(str(out.dtype))
        return loss_of(out, y) / window

    while pace.epoch < epochs and pace.rounds != until:
        used.append([])
        for micro_step, batch in enumerate(loader):
            if options.get("loop") == "round":
                pace.round(batch, loss_for)
            else:
                with fabric.no_backward_sync(model, enabled=(micro_step + 1) % window != 0):
                    pace.backward(loss_for(*batch))
            if pace.complete and clip is not None:
                fabric.clip_gradients(model, optimizer, max_norm=clip)
            if pace.step(optimizer) and pace.rounds == until:
                break
    if save is not None:
        fabric.save(save, parts)
    found = [whole(p).tolist() for p in model.parameters()]
    pace.host.detach()
    loads = [result.loads.tolist() for result in results]
    return {"used": used, "parameters": found, "loads": loads, "kind": ", ".join(kinds)}


MOVES = {"policy": "factoring", "limits": None, "jitter": 2e-3}
SHARDED = {"sharding": True, "dtype": "float32", "precision": "32-true"}
CASES: dict[str, dict[str, Any]] = {
    "clipped": {"clip": 0.05},
    "accumulated and clipped": {"clip": 0.05, "micro_batch": 3, "loop": "pieces"},
    "accumulated by the loop": {"clip": 0.05, "accumulate": 2},
    "moved within the round": MOVES | {"loop": "pieces"},
    "a round each micro-step": MOVES | {"clip": 0.05, "loop": "round"},
    "by cost": {"clip": 0.05, "loading": {"cost": COSTS, "padded": True}},
    "by cost, moved within the round": MOVES | {"loop": "round", "loading": {"cost": COSTS, "padded": False}},
    "by cost, sharded": SHARDED
    | {"loop": "round", "loading": {"cost": COSTS, "padded": True, "micro_batch_cost": 200}},
    "bfloat16": {"dtype": "float32", "precision": "bf16-mixed"},
    "stopped and resumed": {"steps": 4},
    "sharded": SHARDED | {"micro_batch": 4, "loop": "pieces"},
}
CASES = possible(CASES)


def names(ranks: int) -> list[str]:
    return list(CASES) if ranks == 3 else ["accumulated and clipped"]


@together
def trained(ranks: int, folder: str) -> list[dict[str, Any]]:
    return hosts.stopped_and_resumed(train, ranks, folder, [CASES[name] for name in names(ranks)])


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("ranks", [2, 3])
def test_uneven_loop_trains_model_of_one_process(ranks: int, found: Found, folder: str) -> None:
    every = (found if ranks == 3 else hosts.run_bodies(ranks, [trained], folder))[trained]
    for number, name in enumerate(names(ranks)):
        results = [rank[number] for rank in every]
        every_sample_once([result["used"] for result in results])
        assert len({str(result["parameters"]) for result in results}) == 1, f"{name}: the ranks differ"
        assert len(results[0]["loads"]) == 12
        assert any(len(set(loads)) > 1 for loads in results[0]["loads"]), f"{name}: the loads are even"
        mixed, kind = name == "bfloat16", CASES[name].get("dtype", "float64")
        assert results[0]["kind"] == f"torch.{kind}"
        expected = whole_batch(getattr(torch, kind), clip=CASES[name].get("clip"))
        far = difference(results[0]["parameters"], expected)
        limit = 2e-2 if mixed else 1e-12 if kind == "float64" else 2e-6
        assert far < limit, f"{name}: relative difference {far:.1e}"
        assert far > 1e-5 or not mixed, "bfloat16 was not used"


@together
def evaluated(ranks: int, _: str) -> tuple[Any, Any]:
    """What evaluation gives in mid-epoch of a balanced run, and without Paceline with the same parameters."""
    from lightning.fabric import Fabric

    from paceline.hosts.fabric import FabricPace

    torch.set_default_dtype(torch.float64)

    def fabric_and_model(state: Any = None) -> tuple[Any, Any, Any]:
        fabric, net = (
            Fabric(accelerator="cpu", devices=ranks, strategy="ddp", precision="64-true"),
            hosts.normed(),
        )
        fabric.launch()
        net.load_state_dict(state or net.state_dict())
        return fabric, *fabric.setup(net, optimizer_of(net))

    def evaluation(fabric: Any, model: nn.Module) -> Any:
        loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(Samples(COUNT), 7))
        return hosts.evaluation(model, loader, fabric.all_gather)

    fabric, model, optimizer = fabric_and_model()
    pace = FabricPace(fabric, model, BATCH, policy=UNEVEN)
    for x, y, _ in pace.loader(Samples(COUNT), seed=SEED):
        pace.backward(nn.CrossEntropyLoss()(model(x), y))
        if pace.step(optimizer) and pace.rounds == 3:
            break
    state = copy.deepcopy(model.state_dict())
    ours = evaluation(fabric, model)
    pace.host.detach()
    fabric, model, _ = fabric_and_model(state)
    return ours, evaluation(fabric, model)


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluation_gives_results_without_paceline(found: Found) -> None:
    for ours, theirs in found[evaluated]:
        assert sum(map(len, ours)) >= 3 * COUNT
        assert ours == theirs


def refusals(rank: int, ranks: int) -> list[str]:
    """The error messages that one process receives."""
    return [refusal(kind) for kind in ("plain module", "strategy", "scaler")]


def refusal(kind: str) -> str:
    from lightning.fabric import Fabric

    from paceline.hosts.fabric import FabricPace

    fabric, model = Fabric(accelerator="cpu", devices=1), fresh(torch.float32)
    try:
        if kind == "plain module":
            FabricPace(fabric, model, BATCH)
        wrapped, _ = fabric.setup(model, optimizer_of(model))
        if kind == "strategy":
            fabric._strategy = type("DeepSpeedStrategy", (), {})()
        pace = FabricPace(fabric, wrapped, BATCH)
        pace.backward(torch.zeros(()), scaler=torch.amp.GradScaler("cpu"))
    except PacelineError as error:
        return str(error)
    return "nothing was wrong"


def test_loop_that_cannot_be_balanced_raises() -> None:
    ((plain_module, strategy, scaler),) = run_ranks(1, refusals)
    assert "expected what fabric.setup" in plain_module
    assert "does not leave the plain mean" in strategy
    assert "set its precision" in scaler
