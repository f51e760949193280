"""What the ranks of the tests of loaders run."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.scripted import Script
from support.torch_jobs import Samples, fresh, optimizer_of, reference

TWO = Script(((5, 2), (1, 6), (3, 3), (1, 9), (7, 0), (0, 1)))
STEPS = 14  # more than two epochs


def own_collate(samples: list[Any]) -> Any:
    """As the default, in a function that nobody knows."""
    return default_collate(samples)


def own_start(worker: int) -> None:
    """Of a loader's process."""
    torch.manual_seed(worker)


def differences(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[float]:
    """For each case of options of a loader: the largest difference of a parameter from one process."""
    return [_difference(**case) for case in cases]


def _difference(loop: str, **options: Any) -> float:
    own = {"collate_fn": own_collate, "worker_init_fn": own_start, "generator": torch.Generator()}
    options = {name: own[name] if value == "own" else value for name, value in options.items()}
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    limit = {} if loop == "whole" else {"micro_batch": 5}
    pace = Pace(ddp, 16, TWO, loop=loop, limits=[(0, None)] * 2, **limit)
    loader = pace.loader(Samples(83), seed=5, **options)
    while pace.rounds < STEPS:
        for x, y, _ in loader:
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer) and pace.rounds == STEPS:
                break
    pace.host.detach()
    expected = reference(83, 16, STEPS, torch.float64)
    return max(
        float((p.detach() - q).abs().max() / q.abs().max())
        for p, q in zip(model.parameters(), expected, strict=True)
    )


def dropping(samples: list[Any]) -> Any:
    """Leaves out the samples whose first feature is large."""
    return default_collate([sample for sample in samples if sample[0][0] < 1.0] or samples[:1])


def collated(rank: int, ranks: int, counts: bool, weigh: str, loop: str) -> tuple[float, str]:
    """Batches of which some samples are left out: the difference from one process that leaves out the same, and the
    sentence where that is refused."""
    model, data = fresh(torch.float64), Samples(80)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    used: list[list[int]] = []
    with Pace(ddp, 16, TWO, loop=loop, limits=[(2, None)] * 2, weigh=weigh) as pace:
        try:
            for batch in pace.loader(data, seed=5, collate_fn=dropping):
                if loop == "round":
                    pace.round(
                        batch, lambda x, y, index: _own(loss_of(ddp(x), y), pace.counts, index, counts, used)
                    )
                elif weigh == "hook":
                    loss_of(ddp(batch[0]), batch[1]).backward()
                else:
                    loss, count = _own(loss_of(ddp(batch[0]), batch[1]), pace.counts, batch[2], True, used)
                    pace.backward(loss, count=count if counts else None)
                pace.step(optimizer)
        except PacelineError as error:
            pace.host.abandon()
            return 0.0, str(error)
    return _from_one_process(model, data, used), ""


def _own(loss: torch.Tensor, ran: bool, index: torch.Tensor, counts: bool, used: list[list[int]]) -> Any:
    used.append(index.tolist() if ran else [])
    return (loss, len(index)) if counts else loss


def _from_one_process(model: nn.Module, data: Samples, used: list[list[int]]) -> float:
    """The difference from one process whose batches are those of all ranks together."""
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, used)
    one = fresh(torch.float64)
    optimizer = optimizer_of(one)
    for parts in zip(*everywhere, strict=True):
        index = torch.tensor(list(chain.from_iterable(parts)))
        nn.functional.cross_entropy(one(data.x[index]), data.y[index]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return max(
        float((p.detach() - q.detach()).abs().max() / q.detach().abs().max())
        for p, q in zip(model.parameters(), one.parameters(), strict=True)
    )
