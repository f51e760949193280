"""What the tests of host frameworks share: a task whose samples are counted, one process's answer, and the ranks.

A body of a host's tests runs on every rank and trains ``fresh`` on ``Samples`` with ``optimizer_of``; its test checks
the samples that the loader gave with ``every_sample_once``, and compares the parameters with ``whole_batch``'s.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from paceline.torch.feed.pieces import Order
from support import forks
from support.ports import free_port
from support.ranks import gathered, run_ranks
from support.scripted import Script
from support.small_net import FEATURES, Samples, difference, fresh, optimizer_of

COUNT, BATCH, EPOCHS, SEED = 83, 16, 2, 5
# every round divided otherwise, ranks with nothing to do among them
UNEVEN = Script(((5, 2, 1), (1, 6, 2), (3, 3, 3), (1, 1, 9), (7, 0, 4), (0, 1, 0), (0, 5, 5)))
# What each of the samples costs, where a test says that they cost differently: 4 to 99.
COSTS = tuple(4 + 37 * number % 96 for number in range(COUNT))
FREE = ((0, None),) * 3  # limits that let a rank have nothing to do

__all__ = [
    "BATCH", "COSTS", "COUNT", "EPOCHS", "FREE", "SEED", "UNEVEN", "Samples", "Script", "difference", "fresh",
    "optimizer_of",
]  # fmt: skip


Body = Callable[[int, str], Any]  # runs on a rank, and is given the number of ranks and a folder
Found = dict[Body, tuple[Any, ...]]  # what each body returned, by rank


class Together(list[Body]):
    """A module's bodies that run on the same ranks, one after the other: a start of ranks takes longer than most."""

    def __call__(self, body: Body) -> Body:
        self.append(body)
        return body


def run_bodies(ranks: int, bodies: Sequence[Body], folder: str) -> Found:
    """Run the bodies on so many ranks, in their order."""
    return dict(zip(bodies, zip(*run_ranks(ranks, _each, [*bodies], folder), strict=True), strict=True))


def _each(rank: int, ranks: int, bodies: list[Body], folder: str) -> list[Any]:
    as_torchrun(rank, ranks)
    return [body(ranks, folder) for body in bodies]


def as_torchrun(rank: int, ranks: int) -> None:
    """Say who this process is as torchrun does, in a process group, which a script may end to make its own.
    Collective."""
    os.environ.update(forks.as_torchrun(ranks, gathered(free_port())[0])[rank])


def accelerator(**options: Any) -> Any:
    """An Accelerator, whatever another one in this process was told."""
    from accelerate import Accelerator

    reset_accelerate()
    return Accelerator(cpu=True, **options)


def reset_accelerate() -> None:
    """The next Accelerator of this process is as its first."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def whole_batch(
    dtype: torch.dtype = torch.float64,
    *,
    count: int = COUNT,
    batch: int = BATCH,
    epochs: int = EPOCHS,
    clip: float | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = optimizer_of,
    order: Callable[[int], Iterable[int]] | None = None,
    weight: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """The parameters of one process that takes each whole batch itself.

    clip: largest norm of the gradient. order: epoch -> sample indices; by default that of ``Pace.loader(seed=SEED)``.
    weight: of each class in the loss.
    """
    model, data, loss_of = fresh(dtype), Samples(count, dtype), nn.CrossEntropyLoss(weight)
    stepper, drawn = optimizer(model), order or Order(count, SEED).epoch
    for epoch in range(epochs):
        indices = torch.as_tensor(list(drawn(epoch)))
        for first in range(0, len(indices), batch):
            chosen = indices[first : first + batch]
            loss_of(model(data.x[chosen]), data.y[chosen]).backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepper.step()
            stepper.zero_grad()
    return [p.detach() for p in model.parameters()]


def normed() -> nn.Module:
    """A model whose evaluation depends on what its batch norm saw in training, on each rank for itself."""
    return nn.Sequential(nn.BatchNorm1d(FEATURES), fresh(torch.float64)).double()


def evaluation(
    model: nn.Module, loader: Iterable[Any], gather: Callable[[torch.Tensor], Any]
) -> list[list[float]]:
    """What a user's evaluation gives: the outputs for each batch, ``gather``ed over the ranks."""
    model.eval()
    with torch.no_grad():
        found = [gather(model(x)).reshape(-1).tolist() for x, _, _ in loader]
    model.train()
    return found


def every_sample_once(ranks: list[list[list[int]]], count: int = COUNT) -> None:
    """``ranks[rank][epoch]`` lists the samples used: each once an epoch, over all ranks, in changing order."""
    for number, parts in enumerate(zip(*ranks, strict=True)):
        assert sorted(chain.from_iterable(parts)) == list(range(count)), f"epoch {number}"
    for rank, epochs in enumerate(ranks):
        assert all(a != b for a, b in pairwise(epochs)), f"rank {rank}: the order repeats"


def stopped_and_resumed(
    train: Callable[..., dict[str, Any]], ranks: int, folder: str, cases: Iterable[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Each case trained; one with ``steps`` is stopped after so many rounds, and another goes on from there."""
    found = []
    for number, case in enumerate(cases):
        if "steps" not in case:
            found.append(train(ranks, **case))
            continue
        case, path = dict(case), f"{folder}/{number}"
        steps = case.pop("steps")
        first = train(ranks, save=path, until=steps, **case)
        then = train(ranks, load=path, **case)
        used = [first["used"][0] + then["used"][0], *then["used"][1:]]
        found.append(then | {"used": used, "loads": first["loads"] + then["loads"]})
    return found
