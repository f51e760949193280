"""Uneven training gives the model of one process with the whole batch."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.hosts.accumulating import HostedPace
from support.guarantees import guarantee
from support.often import some
from support.ranks import run_cases
from support.small_net import UNEVEN, Samples, difference, fresh, optimizer_of, reference

pytestmark = pytest.mark.processes

GUARANTEES = ("Results agree within rounding for all kernels of torch and MKL and all orders of DDP's sums.",)

CASES: dict[str, dict[str, Any]] = {
    "weighted loss": {},
    "sum loss": {"reduction": "sum"},
    "unused parameters": {"sometimes": True},
    "micro-batches": {"micro_batch": 3},
    "hook": {"weigh": "hook"},
    "hook, micro-batches": {"weigh": "hook", "micro_batch": 3},
    "hook, unused parameters": {"weigh": "hook", "sometimes": True},
    "quantum": {"quantum": 4, "count": 84},
    "batch larger than the data": {"count": 11},
    "prefetching": {"loader_workers": 1},
    "scaled": {"scaled": True, "micro_batch": 5},
    "equal micro-steps": {"micro_steps": 3, "fill": True, "micro_batch": 8},
    "single precision": {"dtype": "float32"},
}


CLAIMED: dict[str, dict[str, Any]] = {
    "factoring": {},
    "half at once": {"policy": "factoring:portion=0.5"},
    "self-scheduling": {"policy": "factoring:scheme=self,piece=3"},
    "guided": {"policy": "factoring:scheme=guided"},
    "auto": {"policy": "auto"},
    "auto, hook, micro-batches": {"policy": "auto", "weigh": "hook", "micro_batch": 5},
    "auto, quantum, prefetching": {"policy": "auto", "quantum": 4, "count": 232, "loader_workers": 1},
    "micro-batches": {"micro_batch": 5},
    "quantum": {"quantum": 4, "count": 232},
    "hook": {"weigh": "hook"},
    "hook, unused parameters": {"weigh": "hook", "sometimes": True},
    "unused parameters": {"sometimes": True},
    "sum loss": {"reduction": "sum"},
    "a rank without a plan": {
        "policy": "factoring:scheme=self,piece=2",
        "limits": [(0, None)] * 3,
        "batch": 2,
    },
    "limits": {"limits": [(1, 20), (1, 20), (1, 20)]},
    "prefetching": {"loader_workers": 1},
    "deterministic": {"deterministic": True, "jitter": 0.0},
    "deterministic, quantum": {"deterministic": True, "jitter": 0.0, "quantum": 8},
}
PULLED: dict[str, Any] = {
    "policy": "factoring",
    "batch": 48,
    "count": 230,
    "jitter": 4e-4,
    "limits": None,
    "steps": 7,
}
PLANNED = some(CASES, "hook, micro-batches", "hook, unused parameters")
CLAIMED = some(
    {name: PULLED | case for name, case in CLAIMED.items()},
    *("half at once", "guided", "auto, hook, micro-batches", "hook, unused parameters", "deterministic"),
)


def trained(
    rank: int,
    ranks: int,
    dtype: str = "float64",
    sometimes: bool = False,
    count: int = 83,
    batch: int = 16,
    steps: int = 10,
    loader_workers: int = 0,
    limits: Any = ((0, None),) * 3,
    scaled: bool = False,
    reduction: str = "mean",
    jitter: float = 0.0,
    **options: Any,
) -> float:
    """The largest relative difference from ``reference`` after so many uneven steps."""
    kind = getattr(torch, dtype)
    model = fresh(kind, sometimes=sometimes)
    ddp = DistributedDataParallel(model, find_unused_parameters=sometimes)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss(reduction=reduction)
    pace = HostedPace(
        ddp, batch, options.pop("policy", UNEVEN), limits=limits, **({"loop": "pieces"} | options)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    loader = pace.loader(Samples(count, kind), seed=5, num_workers=loader_workers)
    stalls = random.Random(rank)  # so that the ranks claim in another order every round
    while pace.rounds < steps:
        for x, y, _ in loader:
            time.sleep(jitter * stalls.expovariate(1.0))
            loss = loss_of(ddp(x), y)
            if pace.host.terms.weigh == "hook":
                loss.backward()
            else:
                pace.backward(loss, reduction, scaler)
            pace.step(optimizer, scaler)
            if pace.rounds == steps:
                break
    pace.host.detach()
    return difference(model.parameters(), reference(count, batch, steps, kind, sometimes))


@guarantee(
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop."
)
@pytest.mark.parametrize(
    "cases",
    [PLANNED, CLAIMED],
    ids=["planned", "claimed"],
)
def test_uneven_training_gives_the_model_of_one_process(cases: dict[str, dict[str, Any]]) -> None:
    for name, (first, *others) in run_cases(3, trained, cases).items():
        assert others == [first, first], f"{name}: the ranks' parameters differ"
        limit = 1e-5 if cases[name].get("dtype") == "float32" else 1e-12
        assert first < limit, f"{name}: relative difference {first:.1e}"
