"""What the ranks of the FSDP2 tests run."""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.errors import PacelineError
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import OnRound
from support import hosts
from support.hosts import BATCH, COUNT, EPOCHS, FREE, SEED, UNEVEN, Samples, fresh, optimizer_of
from support.sharding import BALANCED, NEEDED


def shard(ranks: int, model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(
    ranks: int,
    dtype: str = "float64",
    mixed: bool = False,
    clip: float | None = None,
    until: int = -1,
    save: str | None = None,
    load: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    lower = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)} if mixed else {}
    model = shard(ranks, fresh(kind), **lower)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    pace = Pace(
        model,
        BATCH,
        **{"policy": UNEVEN, "limits": FREE[:ranks], "loop": "pieces", "callbacks": [OnRound(results.append)]}
        | options,
    )
    loader = pace.loader(Samples(COUNT, kind), seed=SEED)

    def parts() -> dict[str, Any]:
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "pace": json.dumps(pace.state_dict())}

    if load is not None:
        loaded = parts()
        dcp.load(loaded, checkpoint_id=load)
        pace.load_state_dict(json.loads(loaded["pace"]))
        set_state_dict(
            model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
        )
    used: list[list[int]] = []
    while pace.epoch < EPOCHS and pace.rounds != until:
        used.append([])
        for x, y, index in loader:
            if pace.counts:
                used[-1] += index.tolist()
            out = model(x)
            pace.backward(loss_of(out.float() if mixed else out, y))
            if pace.complete and clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if pace.step(optimizer) and pace.rounds == until:
                break
    if save is not None:
        dcp.save(parts(), checkpoint_id=save)
    pace.host.detach()
    found = [p.full_tensor().tolist() for p in model.parameters()]
    loads = [result.loads.tolist() for result in results]
    return {"used": used, "parameters": found, "loads": loads, "kind": str(out.dtype)}


def trained(rank: int, ranks: int, folder: str, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each case, as ``hosts.stopped_and_resumed`` has it."""
    return hosts.stopped_and_resumed(train, ranks, folder, cases)


def measured(rank: int, ranks: int, milliseconds: list[float], steps: int) -> list[RoundResult]:
    """Rounds of ranks that sleep for each sample, in the forward pass between the layers' collectives."""
    model = shard(ranks, fresh(torch.float64))
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()

    def slow(_: Any, inputs: tuple[torch.Tensor]) -> None:
        time.sleep(milliseconds[rank] * len(inputs[0]) / 2e3)

    for layer in (model.first, model.second):
        layer.register_forward_pre_hook(slow)
    results: list[RoundResult] = []
    pace = Pace(model, 60, "equal", callbacks=[OnRound(results.append)])
    for x, y, _ in pace.loader(Samples(60 * steps), seed=5):
        pace.backward(loss_of(model(x), y))
        pace.step(optimizer)
    pace.host.detach()
    return results


def misuse(rank: int, ranks: int) -> list[str]:
    """The sentences that a rank gets when something is wrong: the last of all, a PyTorch that is too old."""
    partly = fresh(torch.float64)
    fully_shard(partly.first, mesh=init_device_mesh("cpu", (ranks,)))
    whole = shard(ranks, fresh(torch.float64))
    meant = [(partly, {}), (whole, {"policy": "factoring"}), (whole, {"weigh": "hook"})]
    sentences = []
    for number, (model, options) in enumerate([*meant, (whole, {})]):
        if number == len(meant) and BALANCED:
            delattr(FSDPModule, NEEDED)
        try:
            Pace(model, BATCH, **options)
            sentences.append("nothing was wrong")
        except PacelineError as error:
            sentences.append(str(error))
    return sentences
