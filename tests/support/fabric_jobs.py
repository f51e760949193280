"""What the ranks of the Fabric tests run."""

from __future__ import annotations

import copy
import random
import time
import warnings
from typing import Any

import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch.callbacks import OnRound
from support import hosts
from support.hosts import BATCH, COUNT, EPOCHS, FREE, SEED, UNEVEN, Samples, fresh, optimizer_of


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """As ModelParallelStrategy's parallelize_fn: FSDP2 over the ranks."""
    from torch.distributed.fsdp import fully_shard

    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


def whole(parameter: Any) -> torch.Tensor:
    """All of a parameter, of which this rank may hold a part."""
    return getattr(parameter, "full_tensor", lambda: parameter)().detach()


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


def trained(rank: int, ranks: int, folder: str, cases: list[dict[str, Any]]) -> list[Any]:
    """Each case, as ``hosts.stopped_and_resumed`` has it; with three ranks at last what evaluation gave."""
    hosts.as_torchrun(rank, ranks)
    found = hosts.stopped_and_resumed(train, ranks, folder, cases)
    return [*found, evaluated(ranks)] if ranks == 3 else found


def evaluated(ranks: int) -> tuple[Any, Any]:
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


def refusal(kind: str) -> str:
    """The sentence with which one process is refused."""
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
