"""Every reducer goes through the same script, and comes to the same: one process, DDP, FSDP2, members of a run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import ElasticPace, Pace
from paceline.torch.callbacks import OnRound
from paceline.torch.elastic.messages import Where
from paceline.torch.elastic.supervisor import Supervisor
from support.elastic_runs import BATCH, Oops, Rows, alone, network, optimizers, squares
from support.forks import Fork
from support.ranks import run_ranks
from support.sharding import whole

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop.",
)

SAMPLES, ROUNDS, LEFT = 240, 12, 7  # 5 rounds an epoch; one of them is left in its middle


def script(kind: str, ranks: int) -> dict[str, Any]:
    """What this rank has in the end, with the reducer of this kind."""
    torch.set_num_threads(1)
    model, seen, told = network(), list[list[float]](), list[dict[str, Any]]()
    wrapped = model
    if kind == "ddp":
        wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    elif kind == "fsdp":
        wrapped = fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer, scheduler = optimizers(wrapped)
    pace = (ElasticPace if kind == "elastic" else Pace)(
        wrapped,
        BATCH,
        "level",
        loop="round",
        callbacks=[
            OnRound(lambda r: told.append({"step": r.step, "loads": r.loads.tolist(), "loss": r.loss}))
        ],
    )
    leaves = [LEFT]

    def loss_of(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = squares(wrapped, x, y, None)
        if pace.rounds in leaves:
            leaves.clear()
            raise Oops
        if pace.counts:
            seen.append(x[:, 0].tolist())
        return loss

    with pace:
        loader = pace.loader(Rows(SAMPLES), seed=3)
        if kind == "elastic":
            pace.register(optimizer, scheduler)
        while pace.rounds < ROUNDS:
            try:
                for batch in loader:
                    pace.round(batch, loss_of)
                    assert pace.step(optimizer)
                    scheduler.step()
                    if pace.rounds == ROUNDS:
                        break
            except Oops:
                pace.host.abandon()
                pace.load_state_dict(pace.state_dict())  # so that the epoch goes on
        pace.host.flush()
        state = pace.state_dict()
        flat = nn.utils.parameters_to_vector([whole(p) for p in wrapped.parameters()])
    return {
        "parameters": flat.tolist(),
        "rounds": told,
        "seen": seen,
        "stands": [state["epoch"], state["samples_done"], state["rounds"]],
    }


def ranked(rank: int, ranks: int, kind: str) -> dict[str, Any]:
    """A rank of a process group."""
    return script(kind, ranks)


def _member(where: Where, out: Path) -> None:
    os.environ.update(where.environment())
    part = out / f"{where.place}.part"
    part.write_text(json.dumps(script("elastic", where.places)))
    part.rename(out / f"{where.place}.json")
    os._exit(0)  # gloo's threads are those of groups that were left


def members(out: Path, ranks: int) -> list[dict[str, Any]]:
    """The same of the members of a run that may lose ranks."""
    keeper, until = (
        Supervisor(ranks, lambda where: Fork(_member, where, out), 0, 30.0),
        time.monotonic() + 400,
    )
    try:
        while keeper.workers and time.monotonic() < until:
            keeper.look()
            time.sleep(0.005)
    finally:
        keeper.close()
    return [json.loads((out / f"{place}.json").read_text()) for place in range(ranks)]


def ran(kind: str, out: Path) -> list[dict[str, Any]]:
    if kind == "elastic":
        return members(out, 2)
    found: list[dict[str, Any]] = run_ranks(1 if kind == "one process" else 2, ranked, kind)
    return found


@pytest.mark.parametrize("kind", ["one process", "ddp", "fsdp", "elastic"])
def test_every_reducer_trains_the_model_of_one_process(kind: str, tmp_path: Path) -> None:
    found = ran(kind, tmp_path)
    expected = alone(ROUNDS, samples=SAMPLES)
    inputs = Rows(SAMPLES).x[:, 0]
    for rank in found:
        parameters = torch.tensor(rank["parameters"], dtype=torch.float64)
        assert (parameters - expected).abs().max() < 1e-12
        assert rank["stands"] == [2, 2 * BATCH, ROUNDS], "two epochs of five rounds, and two rounds"
        assert rank["rounds"] == found[0]["rounds"], "all ranks are told the same"
    rounds = found[0]["rounds"]
    assert [each["step"] for each in rounds] == list(range(ROUNDS))
    assert all(sum(each["loads"]) == BATCH and each["loss"] > 0 for each in rounds)
    seen = np.sort(np.concatenate([np.concatenate(rank["seen"]) for rank in found]))
    orders = [np.random.default_rng((3, epoch)).permutation(SAMPLES) for epoch in range(3)]
    used = np.concatenate([orders[0], orders[1], orders[2][: 2 * BATCH]])
    np.testing.assert_array_equal(seen, np.sort(inputs[used].numpy()))
