"""What people have in their loops beside the loss: each with the results of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.torch import Pace
from paceline.torch.feed.pieces import Order
from support.ranks import run_cases
from support.scripted import Script
from support.small_net import difference

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Autocast, `torch.compile`, activation checkpointing, averaged parameters and mixup give one "
    "process's results (bfloat16: to its rounding).",
)

COUNT, BATCH, SIDE = 96, 24, 6
SPLIT = Script(((5, 2, 1), (1, 6, 2), (3, 3, 3), (1, 1, 9)))


class Images(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(2)
        self.x = torch.randn(COUNT, 3, SIDE, SIDE, generator=draw, dtype=torch.float64)
        self.y = torch.randint(4, (COUNT,), generator=draw)

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Convolved(nn.Module):
    """A small convolutional network, whose middle may be computed again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.middle = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.last, self.again = nn.Linear(16, 4), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self.middle, hidden, use_reentrant=False) if self.again else self.middle(hidden)
        return self.last(torch.tanh(hidden).flatten(1))


class Program:
    """A model and how it is trained, in one of the ways to be tried."""

    def __init__(self, way: str) -> None:
        torch.manual_seed(8)
        self.way = way
        kind = torch.float32 if way == "autocast" else torch.float64
        self.model = Convolved(again=way == "activation checkpointing").to(kind)
        if way == "channels last":
            self.model = self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.mean = torch.optim.swa_utils.AveragedModel(
            self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sizes: set[int] = set()

    def loss(self, forward: Callable[..., torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.sizes.add(len(x))
        if self.way == "channels last":
            x = x.to(memory_format=torch.channels_last)
        if self.way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return nn.functional.cross_entropy(forward(x.float()), y)
        if self.way == "mixup in pairs":  # of neighbours, so that a batch must be even
            assert len(x) % 2 == 0
            x = (0.7 * x.unflatten(0, (-1, 2)) + 0.3 * x.unflatten(0, (-1, 2)).flip(1)).flatten(0, 1)
            other = y.unflatten(0, (-1, 2)).flip(1).flatten()
            out = forward(x)
            return 0.7 * nn.functional.cross_entropy(out, y) + 0.3 * nn.functional.cross_entropy(out, other)
        return nn.functional.cross_entropy(forward(x), y)

    def stepped(self) -> None:
        self.mean.update_parameters(self.model)

    def results(self) -> list[torch.Tensor]:
        """The parameters, and their moving average."""
        return [p.detach() for p in (*self.model.parameters(), *self.mean.module.parameters())]


WAYS = ("plain", "autocast", "compiled", "activation checkpointing", "channels last", "mixup in pairs")


def one_process(way: str) -> list[torch.Tensor]:
    program, data = Program(way), Images()
    for epoch in range(2):
        for chosen in torch.from_numpy(Order(COUNT, 5).epoch(epoch)).split(BATCH):
            program.optimizer.zero_grad()
            program.loss(program.model, data.x[chosen], data.y[chosen]).backward()
            program.optimizer.step()
            program.stepped()
    return program.results()


def trained(rank: int, ranks: int, way: str, loop: str) -> tuple[float, int]:
    """The largest relative difference from one process, and how many sizes of batches there were."""
    program = Program(way)
    model: Any = program.model
    if way == "compiled":
        torch._dynamo.reset()
        model = torch.compile(model, backend="aot_eager")
    ddp = DistributedDataParallel(model)
    micro = {} if loop == "whole" else {"micro_batch": 6}
    pace = Pace(ddp, BATCH, SPLIT, loop=loop, quantum=2, **micro)
    loader = pace.loader(Images(), seed=5)
    for _ in range(2):
        for batch in loader:
            program.optimizer.zero_grad()
            if loop == "round":
                pace.round(batch, lambda x, y: program.loss(ddp, x, y))
            else:
                pace.backward(program.loss(ddp, *batch))
            pace.step(program.optimizer)
            program.stepped()
    pace.host.detach()
    return difference(program.results(), one_process(way)), len(program.sizes)


@pytest.mark.parametrize("loop", ["whole", pytest.param("round", marks=pytest.mark.nightly)])
def test_loop_features_give_the_results_of_one_process(loop: str) -> None:
    for way, ranks in run_cases(3, trained, {way: {"way": way, "loop": loop} for way in WAYS}).items():
        for far, sizes in ranks:
            # bfloat16 holds 8 bits, and rounds another sum in each division of the batch
            limit = 0.05 if way == "autocast" else 1e-12
            assert far < limit, f"{way}: relative difference {far:.1e}"
            assert sizes <= 10, "quantum keeps the sizes few"
