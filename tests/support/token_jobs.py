"""Losses that are means over tokens: some samples have many, some have none that count."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order

COUNT, BATCH, LENGTH, WORDS = 90, 24, 12, 7
IGNORED = -100


class Sentences(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences of unlike lengths, padded; padding and the labels of whole sentences count for nothing.

    rare: only every so manyth sentence has labels that count, so that most ranks of a round have none, and some
    rounds have none at all; by default two of three have.
    """

    def __init__(self, rare: int = 0) -> None:
        draw = torch.Generator().manual_seed(11)
        self.words = torch.randint(WORDS, (COUNT, LENGTH), generator=draw)
        self.labels = torch.randint(WORDS, (COUNT, LENGTH), generator=draw)
        lengths = torch.randint(1, LENGTH + 1, (COUNT,), generator=draw)
        self.labels[torch.arange(LENGTH)[None] >= lengths[:, None]] = IGNORED
        self.labels[torch.arange(COUNT) % rare != 0 if rare else torch.arange(COUNT) % 3 == 0] = IGNORED

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


def one_process(
    clip: bool, rare: int = 0, by_sentence: bool = False
) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters, and the losses of the rounds, of one process that takes whole batches of two epochs.

    by_sentence: its loss is the mean over the sentences of each one's own mean, not the mean over all tokens."""
    net, data = model(), Sentences(rare)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9), []
    for epoch in range(2):
        order = torch.from_numpy(Order(COUNT, 5).epoch(epoch))
        for first in range(0, COUNT, BATCH):
            chosen = order[first : first + BATCH]
            optimizer.zero_grad()
            out, labels = net(data.words[chosen]), data.labels[chosen]
            if by_sentence:
                loss = means_of_sentences(out, labels).mean()
            elif labels.ne(IGNORED).any():
                loss = loss_of(out, labels, "mean")
            else:  # a mean over nothing: the round moves nothing but the momentum
                loss = out.sum() * 0.0
            loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 0.02)
            optimizer.step()
            losses.append(loss.item())
    return [p.detach() for p in net.parameters()], losses


def means_of_sentences(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each sentence the mean loss of its tokens that count, 0 where it has none."""
    each = nn.functional.cross_entropy(
        out.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return each.view(labels.shape).sum(1) / labels.ne(IGNORED).sum(1).clamp(min=1)


def tokens(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """For each case: the largest relative difference of the parameters and of the losses from one process."""
    return [_case(rank, ranks, **case) for case in cases]


def _case(
    rank: int,
    ranks: int,
    loop: str = "whole",
    reduction: str = "mean",
    clip: bool = False,
    workers: int = 0,
    rare: int = 0,
    by_sentence: bool = False,
    sharded: bool = False,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[float, float]:
    results: list[RoundResult] = []
    net, stalls = model(), random.Random(rank)
    ddp: nn.Module = sharded_over(net, ranks) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    pace = HostedPace(ddp, BATCH, loop=loop, callbacks=[OnRound(results.append)], **options)
    loader = pace.loader(Sentences(rare), seed=5, num_workers=workers, **(loading or {}))

    def function(words: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, Any]:
        time.sleep(4e-4 * stalls.expovariate(1.0))
        if by_sentence:
            each = means_of_sentences(ddp(words), labels)
            return each.mean() if reduction == "mean" else each.sum(), None
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
    pace.host.flush()
    pace.host.detach()
    expected, losses = one_process(clip, rare, by_sentence)
    found = [p.full_tensor().detach() if sharded else p.detach() for p in net.parameters()]  # type: ignore[operator]
    return max(float((p - q).abs().max() / q.abs().max()) for p, q in zip(found, expected, strict=True)), max(
        abs(r.loss / right - 1)
        for r, right in zip(results, losses, strict=True)
        if right  # a round without a token has no mean
    )


def sharded_over(net: nn.Sequential, ranks: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def collectives(rank: int, ranks: int) -> list[tuple[str, bool]]:
    """The collectives that one round with counts calls for beside DDP's own, each with whether the caller goes on
    at once, and the order in which they and the backward pass begin and end."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer, said = torch.optim.SGD(net.parameters(), lr=0.3), []
    plain = {name: getattr(dist, name) for name in ("all_reduce", "all_gather", "broadcast", "barrier")}

    def telling(name: str, *arguments: Any, **options: Any) -> Any:
        said.append((name, bool(options.get("async_op"))))
        return plain[name](*arguments, **options)

    with Pace(ddp, BATCH, "equal") as pace:
        for words, labels in pace.loader(Sentences(), seed=5):
            if pace.rounds == 1:
                for name in plain:
                    setattr(dist, name, partial(telling, name))
                net[0].register_forward_hook(lambda *_: said.append(("forward", True)))
                net[2].weight.register_hook(lambda _: said.append(("backward", True)))
            out = ddp(words)
            pace.backward(loss_of(out, labels, "mean"), count=labels.ne(IGNORED).sum())
            pace.step(optimizer)
            if pace.rounds == 2:
                break
        for name, function in plain.items():
            setattr(dist, name, function)
    return said


def counts_on_some(rank: int, ranks: int) -> str:
    """The sentence that this rank gets where rank 0 alone says over how many labels its loss is a mean."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    pace = Pace(ddp, BATCH, "equal")
    try:
        for words, labels in pace.loader(Sentences(), seed=5):
            count = labels.ne(IGNORED).sum() if rank == 0 else None
            pace.backward(loss_of(ddp(words), labels, "mean"), count=count)
            pace.step(optimizer)
    except PacelineError as error:
        return str(error)
    finally:
        pace.host.detach()
    return "nothing was wrong"
