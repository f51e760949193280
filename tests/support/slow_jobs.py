"""What ranks run whose gradients, or parameters, go over a slow link in one of torch's own ways."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import LocalSGD, Merge, Pace
from paceline.torch.callbacks import OnRound
from support.scripted import Script
from support.torch_jobs import UNEVEN, Samples, fresh

COUNT, BATCH, SEED, WARM, STEPS = 83, 16, 5, 2, 18
FORCED = [(2, 2), (3, 3), (11, 11)]  # "level" has no choice then


def base_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.01)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if kind == "momentum" else 0.0)


def register(ddp: DistributedDataParallel, hook: str, rank: int) -> None:
    """Give the module this hook, as its user would."""
    if hook == "fp16":
        ddp.register_comm_hook(None, hooks.fp16_compress_hook)
    elif hook == "bf16":
        ddp.register_comm_hook(None, hooks.bf16_compress_hook)
    elif hook == "power":
        state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=WARM, random_seed=11)
        ddp.register_comm_hook(state, powerSGD_hook)
    elif hook == "local":
        ddp.register_comm_hook(PostLocalSGDState(None, None, WARM, False), post_localSGD_hook)


def slow_ways(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each case this rank's parameters after its steps, and the samples that it ran in each of them."""
    return [_slow_way(rank, **case) for case in cases]


def _slow_way(
    rank: int,
    hook: str = "",
    steps: int = STEPS,
    dtype: str = "float64",
    optimizer: str = "momentum",
    period: int = 0,
    forced: bool = False,
    tokens: bool = False,
    **options: Any,
) -> dict[str, Any]:
    kind = getattr(torch, dtype)
    ddp = DistributedDataParallel(fresh(kind))
    register(ddp, hook, rank)
    used: list[list[int]] = [[] for _ in range(steps)]
    steps_of: Any = base_optimizer(optimizer, ddp.parameters())
    if period:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a period of 1 is of no use but for a test
            steps_of = PostLocalSGDOptimizer(steps_of, PeriodicModelAverager(period, WARM))
    loads: Any = (
        {"limits": FORCED, "policy": "level"} if forced else {"policy": UNEVEN, "limits": [(0, None)] * 3}
    )
    loads |= {"loop": "whole" if forced else "pieces"} | options
    pace = Pace(ddp, BATCH, **loads)
    loader = pace.loader(Samples(COUNT, kind), seed=SEED, drop_last=forced)
    while pace.rounds < steps:
        for x, y, index in loader:
            if pace.counts:
                used[pace.rounds] += index.tolist()
            weights = weights_of(index).to(kind) * (1.0 if pace.counts else 0.0)
            losses = nn.functional.cross_entropy(ddp(x), y, reduction="none")
            if tokens:
                count = weights.sum()
                pace.backward((losses * weights).sum() / count.clamp(min=1.0), count=count)
            elif loads.get("weigh") == "hook":
                losses.mean().backward()
            else:
                pace.backward(losses.mean())
            pace.step(steps_of)
            if pace.rounds == steps:
                break
    pace.host.detach()
    return {"parameters": nn.utils.parameters_to_vector(ddp.parameters()).tolist(), "used": used}


def weights_of(index: torch.Tensor) -> torch.Tensor:
    """How many tokens a sample has."""
    return 1 + index % 5


def refusals(rank: int, ranks: int) -> dict[str, str]:
    """What a user is told where one of torch's ways cannot be had."""
    told = {}
    for name, hook, options in (
        ("bf16 on gloo", "bf16", {}),
        ("two hooks", "fp16", {"weigh": "hook"}),
    ):
        ddp = DistributedDataParallel(fresh(torch.float64))
        try:
            register(ddp, hook, rank)
            Pace(ddp, BATCH, "level", **options).close()
        except (TypeError, PacelineError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def loads_under(rank: int, ranks: int, hook: str, milliseconds: list[float], rounds: int) -> list[float]:
    """The last round's loads of ranks that sleep for each sample."""
    ddp = DistributedDataParallel(fresh(torch.float32))
    register(ddp, hook, rank)
    optimizer, last = torch.optim.SGD(ddp.parameters(), lr=0.1), list[list[float]]()
    with Pace(
        ddp, 60, "level", callbacks=[OnRound(lambda result: last.append(result.loads.tolist()))]
    ) as pace:
        for x, y, _ in pace.loader(Samples(60 * rounds, torch.float32), seed=SEED):
            time.sleep(milliseconds[rank] * len(x) / 1e3)
            pace.backward(nn.functional.cross_entropy(ddp(x), y))
            pace.step(optimizer)
    return last[-1]


def own_data(rank: int, ranks: int, ways: list[str]) -> list[float]:
    """Of each way to weigh merges, where a number ends that rank 0 pulls to 0 in 8 steps, and rank 1 to 1 in 2."""
    ends = []
    for by in ways:
        model = nn.Linear(1, 1, bias=False).double()
        nn.init.constant_(model.weight, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        merge = Merge(by=by)
        with LocalSGD(model, 2, Script(((4.0, 1.0),)), every=5, merge=merge) as pace:
            for (x,) in pace.stream([(torch.ones(1, dtype=torch.float64),)] * 4000):
                pace.backward((model(x) - float(rank)).square().mean() / 2)
                pace.step(optimizer)
                if pace.rounds == 100:  # 0.905^100 of the way is left
                    break
        ends.append(float(model.weight))
    return ends
