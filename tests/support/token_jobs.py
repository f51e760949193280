"""Losses that are means over tokens: some samples have many, some have none that count."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace, RoundResult
from paceline.torch.feed.pieces import Order
from paceline.torch.progress import batches
from support.torch_jobs import forked

COUNT, BATCH, LENGTH, WORDS = 90, 24, 12, 7
IGNORED = -100


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences of unlike lengths, padded; padding and a third of the sentences' labels count for nothing."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        self.words = torch.randint(WORDS, (COUNT, LENGTH), generator=draw)
        self.labels = torch.randint(WORDS, (COUNT, LENGTH), generator=draw)
        lengths = torch.randint(1, LENGTH + 1, (COUNT,), generator=draw)
        self.labels[torch.arange(LENGTH)[None] >= lengths[:, None]] = IGNORED
        self.labels[::3] = IGNORED

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.words[index], self.labels[index]


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(WORDS, 5), nn.Tanh(), nn.Linear(5, WORDS)).double()


def loss_of(out: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(
        out.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def one_process(clip: bool) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters, and the losses of the rounds, of one process that takes whole batches of two epochs."""
    net, data = model(), Sentences()
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), []
    for epoch in range(2):
        order = torch.from_numpy(Order(COUNT, 5).epoch(epoch))
        for first, size in batches(COUNT, 0, BATCH):
            chosen = order[first : first + size]
            optimizer.zero_grad()
            loss = loss_of(net(data.words[chosen]), data.labels[chosen], "mean")
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.02)
            optimizer.step()
            losses.append(loss.item())
    return [p.detach() for p in net.parameters()], losses


def tokens(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """For each case: the largest relative difference of the parameters and of the losses from one process."""
    return [_case(rank, **case) for case in cases]


def _case(
    rank: int,
    loop: str = "whole",
    reduction: str = "mean",
    clip: bool = False,
    workers: int = 0,
    **options: Any,
) -> tuple[float, float]:
    results: list[RoundResult] = []
    net = model()
    ddp, stalls = DistributedDataParallel(net), random.Random(rank)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    pace = Pace(ddp, BATCH, loop=loop, on_round=results.append, **options)
    loader = pace.loader(Sentences(), seed=5, **forked(workers))

    def function(words: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(4e-4 * stalls.expovariate(1.0))
        return loss_of(ddp(words), labels, reduction), labels.ne(IGNORED).sum()

    for _ in range(2):
        for batch in loader:
            if loop == "round":
                pace.round(batch, function, reduction)
            else:
                loss, count = function(*batch)
                pace.backward(loss, reduction, count=count)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.02)
            pace.step(optimizer)
    pace.flush()
    pace.detach()
    expected, losses = one_process(clip)
    return max(
        float((p.detach() - q).abs().max() / q.abs().max())
        for p, q in zip(net.parameters(), expected, strict=True)
    ), max(abs(r.loss / right - 1) for r, right in zip(results, losses, strict=True))
