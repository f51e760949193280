"""Losses that are already normalised over the samples of all ranks, or functions of a statistic of them."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import LocalSGD, Pace, RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from support.token_jobs import sharded_over

COUNT, BATCH, IN, OUT = 90, 24, 6, 3


class Pictures(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random samples, each with a number of boxes."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(11)
        self.x = torch.randn(COUNT, IN, generator=draw, dtype=torch.float64)
        self.y = torch.randn(COUNT, OUT, generator=draw, dtype=torch.float64)
        self.boxes = torch.randint(1, 6, (COUNT,), generator=draw).double()

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index], self.boxes[index]


def model() -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(IN, 5), nn.Tanh(), nn.Linear(5, OUT)).double()


def boxed(out: torch.Tensor, y: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """The summed loss of all boxes."""
    return ((out - y).square().sum(1) * boxes).sum()


def of_moments(mean: torch.Tensor, square: torch.Tensor) -> torch.Tensor:
    """A loss that is no sum over samples."""
    return (mean.square() + (square - mean.square() - 1).square()).sum() + mean.prod()


def statistic(form: str, out: torch.Tensor, y: torch.Tensor, boxes: torch.Tensor, center: Any) -> Any:
    """The loss of a whole batch in one process."""
    if form == "divided":
        return boxed(out, y, boxes) / boxes.sum()
    if form == "known":
        return (out - y).square().sum() / BATCH
    if form == "center":
        return (out - y - center).square().sum(1).mean()
    return of_moments(out.mean(0), out.square().mean(0))


def one_process(form: str, count: int) -> tuple[list[torch.Tensor], list[float]]:
    """The parameters, and the losses of the rounds, of one process that takes the whole batches of two epochs."""
    net, data, center = model(), Pictures(), torch.zeros(OUT, dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9), []
    for epoch in range(2):
        for chosen in torch.from_numpy(Order(COUNT, 5).epoch(epoch))[:count].split(BATCH):
            optimizer.zero_grad()
            out = net(data.x[chosen])
            loss = statistic(form, out, data.y[chosen], data.boxes[chosen], center)
            center = 0.5 * center + 0.5 * out.detach().mean(0)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return [p.detach() for p in net.parameters()], losses


def forms(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """For each case: the largest relative difference of the parameters and of the losses from one process."""
    warnings.simplefilter("ignore")  # of torch, for a sum over ranks within the graph
    return [_case(rank, ranks, **case) for case in cases]


def _summed(value: torch.Tensor) -> torch.Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def _case(
    rank: int,
    ranks: int,
    form: str,
    loop: str = "whole",
    sharded: bool = False,
    scaled: bool = False,
    weighted: bool = False,
    **options: Any,
) -> tuple[float, float]:
    results: list[RoundResult] = []
    net, center = model(), torch.zeros(OUT, dtype=torch.float64)
    ddp: nn.Module = sharded_over(net, ranks) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    pace = HostedPace(ddp, BATCH, loop=loop, callbacks=[OnRound(results.append)], **options)
    loader = pace.loader(Pictures(), seed=5, drop_last=form == "known")

    def function(x: torch.Tensor, y: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        nonlocal center
        out = ddp(x)
        if form == "known":
            return ranks * (out - y).square().sum() / BATCH * pace.counts
        if form == "divided":
            boxes = boxes * pace.counts
            return boxed(out, y, boxes) / (_summed(boxes.sum()) / ranks)
        size = _summed(torch.tensor(float(len(x) * pace.counts), dtype=torch.float64))
        if form == "center":
            loss = (out - y - center).square().sum(1).mean()
            center = 0.5 * center + 0.5 * _summed(out.sum(0) * pace.counts) / size
            return loss
        moments = torch.stack([out.sum(0), out.square().sum(0)]) * pace.counts / size
        if form == "differentiable":
            return of_moments(*all_reduce(moments))
        dist.all_reduce(moments)  # whose gradient is that of this rank's part
        return ranks * of_moments(*moments)

    reduction = "mean" if form == "center" else "global"
    for _ in range(2):
        for batch in loader:
            if loop == "round":
                pace.round(batch, function, reduction, scaler)
            elif weighted:  # under the hook
                pace.weighted(function(*batch), reduction).backward()
            else:
                pace.backward(function(*batch), reduction, scaler)
            pace.step(optimizer, scaler)
    pace.host.flush()
    pace.host.detach()
    expected, losses = one_process(form, COUNT // BATCH * BATCH if form == "known" else COUNT)
    if form == "in place":  # the loss of each rank has the weight that DDP's mean takes away
        losses = [ranks * loss for loss in losses]
    found = [p.full_tensor().detach() if sharded else p.detach() for p in net.parameters()]  # type: ignore[operator]
    return max(float((p - q).abs().max() / q.abs().max()) for p, q in zip(found, expected, strict=True)), max(
        abs(r.loss / right - 1) for r, right in zip(results, losses, strict=True)
    )


def refused(
    rank: int, ranks: int, given: dict[str, Any], idle: int | None, local: bool = False, **options: Any
) -> str:
    """The error message for a loss over all ranks; rank ``idle`` has no samples, and its filler is not left out."""
    net, handle = model(), LocalSGD if local else Pace
    ddp: nn.Module = net if handle is LocalSGD else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    limits = [(0, 0 if one == idle else None) for one in range(ranks)]
    pace: Any = handle(ddp, BATCH, "equal", **({} if idle is None else {"limits": limits}), **options)
    try:
        for batch in pace.loader(Pictures(), seed=5):
            if options.get("loop") == "round":
                pace.round(batch, lambda x, y, _: (ddp(x) - y).square().sum(), "global")
            else:
                pace.backward((ddp(batch[0]) - batch[1]).square().sum(), "global", **given)
            pace.step(optimizer)
            if rank != idle and idle is not None:
                break
    except PacelineError as error:
        return str(error)
    finally:
        pace.host.detach()
    return ""


def counted_by_hook(rank: int, ranks: int, how: str) -> str:
    """The error message where a loss with a count, under the hook, is weighted but not divided by the round's."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    pace = Pace(ddp, BATCH, "equal", weigh="hook")
    try:
        for x, y, boxes in pace.loader(Pictures(), seed=5):
            loss = boxed(ddp(x), y, boxes) / boxes.sum()
            pace.weighted(loss, count=boxes.sum()).backward()
            optimizer.step() if how == "own" else pace.step(optimizer)
    except PacelineError as error:
        unchanged = all(map(torch.equal, net.parameters(), model().parameters()))
        return str(error) if unchanged else "it has stepped"
    finally:
        pace.host.detach()
    return ""


def forward_method(rank: int, ranks: int, through: str) -> tuple[str, float]:
    """Train by ``ddp.forward(x)``, or by a forward pass that is not DDP's: the error message, and the difference from
    one process."""
    net = model()
    ddp = DistributedDataParallel(net)
    call = {"forward": ddp.forward, "call": ddp, "module": ddp.module, "module.forward": ddp.module.forward}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    pace = Pace(ddp, BATCH, "equal", limits=[(20, 20), (2, 2), (2, 2)])
    loader, drawn = pace.loader(Pictures(), seed=5, drop_last=True), 0
    try:
        for _ in range(2):
            for x, y, _ in loader:
                pace.backward((call[through](x) - y).square().sum() / len(x))
                pace.step(optimizer)
                drawn += 1
    except PacelineError as error:
        return str(error), 0.0
    finally:
        pace.host.detach()
    expected, _ = one_process("known", COUNT // BATCH * BATCH)
    return "", max(
        float((p.detach() - q).abs().max()) for p, q in zip(net.parameters(), expected, strict=True)
    )
