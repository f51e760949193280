"""What the ranks do in tests of thresholds behind which late micro-batches are dropped."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import runs
from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.callbacks import OnRound, Record
from support.torch_jobs import Samples, fresh, optimizer_of

COUNT, BATCH = 100, 24


def weight(index: torch.Tensor) -> torch.Tensor:
    """Tokens of each sample, where losses are means over tokens."""
    return 1 + index % 5


def loss_at(model: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor, tokens: bool) -> Any:
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    many = weight(index) if tokens else torch.ones(len(index))
    return (each * many).sum() / many.sum(), many.sum()


def dropping(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case: the parameters after some rounds, this rank's samples of each, and what was told."""
    return [_case(rank, **case) for case in cases]


def _case(
    rank: int,
    stall: float = 0.06,
    rounds: int = 8,
    tokens: bool = False,
    leave: bool = False,
    loader: Any = None,
    record: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(ddp)
    told: list[Any] = []
    chosen = {"policy": "equal", "loop": "round", "micro_batch": 2} | options
    pace = Pace(
        ddp, BATCH, callbacks=[OnRound(told.append), *([] if record is None else [Record(record)])], **chosen
    )
    batches = pace.loader(Samples(COUNT), seed=5, **(loader or {}))
    used: list[list[int]] = []

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Any:
        time.sleep(stall if rank == 2 else 0.001)
        used[-1].extend(index.tolist())
        loss, many = loss_at(ddp, x, y, index, tokens)
        return (loss, many) if tokens else loss

    while pace.rounds < rounds:
        for batch in batches:
            used.append([])
            pace.round(batch, function)
            if leave and pace.rounds == 2:
                leave = False
                used.pop()
                break  # its step is not taken
            pace.step(optimizer)
            if pace.rounds == rounds:
                break
    pace.host.flush()
    found = {
        "parameters": [p.detach().numpy() for p in model.parameters()],
        "used": used,
        "dropped": None if told[0].dropped_loads is None else np.array([each.dropped_loads for each in told]),
        "loads": np.array([each.loads for each in told]),
        "losses": [each.loss for each in told],
        "tau": None if pace._loop.drops is None else pace._loop.drops.tau,
    }
    pace.close()
    if record is not None and rank == 0:
        found["record"] = runs.read(record)
    return found


def alone(rounds: list[list[int]], tokens: bool) -> tuple[list[Any], list[float]]:
    """Parameters and losses of one process that takes just these samples in each round."""
    model, data, losses = fresh(torch.float64), Samples(COUNT), []
    optimizer = optimizer_of(model)
    for samples in rounds:
        index = torch.tensor(samples)
        loss, _ = loss_at(model, data.x[index], data.y[index], index, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [p.detach().numpy() for p in model.parameters()], losses


def counting(rank: int, ranks: int, alone: bool) -> str:
    """What is said if only some losses come with a count: those of rank 0, or every second one."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer = optimizer_of(ddp)
    pace = Pace(ddp, BATCH, "equal", loop="round", micro_batch=2, drop=600)
    calls: list[int] = []

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Any:
        calls.append(len(x))
        loss, many = loss_at(ddp, x, y, index, False)
        return (loss, many) if (rank == 0 if alone else len(calls) % 2) else loss

    try:
        for batch in pace.loader(Samples(COUNT)):
            pace.round(batch, function)
            pace.step(optimizer)
    except PacelineError as error:
        return str(error)
    return ""
