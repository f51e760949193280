"""The forms that a loss may have: already normalised over all ranks, or a function of a statistic of the batch."""

from __future__ import annotations

import re
import warnings
from functools import cache, partial
from typing import Any

import pytest
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
from support.guarantees import guarantee
from support.pictures import BATCH, COUNT, OUT, Pictures, boxed, model, of_moments
from support.ranks import errors_of, run_cases, run_ranks
from support.sharding import possible, sharded_over, whole
from support.small_net import UNEVEN, difference

pytestmark = pytest.mark.processes

LOOSE = {"policy": UNEVEN, "limits": ((0, None),) * 3}
CASES: dict[str, dict[str, Any]] = {
    **{form: {"form": form, **LOOSE} for form in ("divided", "differentiable", "in place", "center")},
    "by hook": {"form": "divided", **LOOSE, "weigh": "hook"},
    "a differentiable sum by hook": {"form": "differentiable", **LOOSE, "weigh": "hook"},
    "weighted by hook": {"form": "divided", **LOOSE, "weigh": "hook", "weighted": True},
    "empty batches": {"form": "divided", **LOOSE, "fill": False},
    "scaled": {"form": "divided", **LOOSE, "scaled": True},
    "by round, accumulated": {"form": "known", **LOOSE, "loop": "round", "micro_batch": 3},
    "by round, moving": {"form": "known", "policy": "factoring", "loop": "round"},
    "by round, scaled": {"form": "known", **LOOSE, "loop": "round", "micro_batch": 3, "scaled": True},
    "pieces, moving": {"form": "known", "policy": "factoring:portion=0.3", "loop": "pieces"},
    "the same bits": {
        "form": "known", "policy": "factoring", "loop": "round", "deterministic": True, "quantum": 2,
    },
    "by hook, accumulated": {
        "form": "known", **LOOSE, "weigh": "hook", "loop": "round", "micro_batch": 3, "fill": False,
    },
    "sharded": {"form": "divided", **LOOSE, "sharded": True},
    "sharded, accumulated": {
        "form": "known", **LOOSE, "sharded": True, "loop": "round", "micro_batch": 5,
    },
}  # fmt: skip
CASES = possible(CASES)


def statistic(form: str, out: torch.Tensor, y: torch.Tensor, boxes: torch.Tensor, center: Any) -> Any:
    """The loss of a whole batch in one process."""
    if form == "divided":
        return boxed(out, y, boxes) / boxes.sum()
    if form == "known":
        return (out - y).square().sum() / BATCH
    if form == "center":
        return (out - y - center).square().sum(1).mean()
    return of_moments(out.mean(0), out.square().mean(0))


@cache
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


def _summed(value: torch.Tensor) -> torch.Tensor:
    total = value.detach().clone()
    dist.all_reduce(total)
    return total


def trained(
    rank: int,
    ranks: int,
    form: str,
    loop: str = "whole",
    sharded: bool = False,
    scaled: bool = False,
    weighted: bool = False,
    **options: Any,
) -> tuple[float, float]:
    """The largest relative difference of the parameters and of the losses from one process."""
    warnings.simplefilter("ignore")  # of torch, for a sum over ranks within the graph
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
    found = [whole(p) for p in net.parameters()]
    return difference(found, expected), max(
        abs(r.loss / right - 1) for r, right in zip(results, losses, strict=True)
    )


@guarantee(
    'Losses over the samples of all ranks (`reduction="global"`, gathered keys) train the model of one '
    "process."
)
def test_global_losses_train_the_model_of_one_process() -> None:
    for name, ranks in run_cases(3, trained, CASES).items():
        for parameters, losses in ranks:
            assert parameters < 1e-12, f"{name}: relative difference {parameters:.1e}"
            assert losses < 1e-12, f"{name}: losses differ by {losses:.1e}"


def refused(
    rank: int, ranks: int, given: dict[str, Any], idle: int | None, local: bool = False, **options: Any
) -> None:
    """A loss over all ranks; rank ``idle`` has no samples, and its filler is not left out."""
    net, handle = model(), LocalSGD if local else Pace
    ddp: nn.Module = net if handle is LocalSGD else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    limits = [(0, 0 if one == idle else None) for one in range(ranks)]
    pace: Any = handle(ddp, BATCH, "equal", **({} if idle is None else {"limits": limits}), **options)
    for batch in pace.loader(Pictures(), seed=5):
        if options.get("loop") == "round":
            pace.round(batch, lambda x, y, _: (ddp(x) - y).square().sum(), "global")
        else:
            pace.backward((ddp(batch[0]) - batch[1]).square().sum(), "global", **given)
        pace.step(optimizer)
        if rank != idle and idle is not None:
            break


@guarantee(
    'Forms of a loss that the chosen options cannot weight (`"global"` with `drop=`, `weighted` with '
    "`count=` under the hook) raise before the step."
)
@pytest.mark.parametrize(
    ("given", "idle", "options", "words"),
    [
        ({"count": 3}, None, {}, "it is already normalised, so leave count= out"),
        ({}, 2, {}, "a filler sample counts for nothing, and would count in a sum over ranks"),
        ({}, None, {"local": True}, "with LocalSGD each rank steps "),
        (
            {},
            None,
            {"loop": "round", "micro_batch": 2, "drop": 9.0},
            "drop= leaves out samples that the loss was normalised with",
        ),
    ],
)
def test_unsupported_global_loss_raises(
    given: dict[str, Any], idle: int | None, options: dict[str, Any], words: str
) -> None:
    said = errors_of(3, partial(refused, given=given, idle=idle, **options))
    for rank, sentence in enumerate(said):
        assert words in sentence or (idle is not None and rank != idle)


def counted_by_hook(rank: int, ranks: int, how: str) -> None:
    """A loss with a count, under the hook, is weighted but not divided by the round's."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    pace = Pace(ddp, BATCH, "equal", weigh="hook")

    def train() -> None:
        for x, y, boxes in pace.loader(Pictures(), seed=5):
            loss = boxed(ddp(x), y, boxes) / boxes.sum()
            pace.weighted(loss, count=boxes.sum()).backward()
            optimizer.step() if how == "own" else pace.step(optimizer)

    words = "is not divided by the count of all ranks; call pace.backward(loss, count=...)"
    with pytest.raises(PacelineError, match=re.escape(words)):
        train()
    assert all(map(torch.equal, net.parameters(), model().parameters()))


@guarantee(
    'Forms of a loss that the chosen options cannot weight (`"global"` with `drop=`, `weighted` with '
    "`count=` under the hook) raise before the step."
)
@pytest.mark.parametrize("how", ["own", "pace"])
def test_weighted_loss_with_count_under_the_hook_raises_before_a_step(how: str) -> None:
    run_ranks(3, counted_by_hook, how)


def forward_method(rank: int, ranks: int, through: str) -> float:
    """Train by ``ddp.forward(x)``, or by a forward pass that is not DDP's: the difference from one process."""
    net = model()
    ddp = DistributedDataParallel(net)
    call = {"forward": ddp.forward, "call": ddp, "module": ddp.module, "module.forward": ddp.module.forward}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    pace = Pace(ddp, BATCH, "equal", limits=[(20, 20), (2, 2), (2, 2)])
    loader = pace.loader(Pictures(), seed=5, drop_last=True)
    for _ in range(2):
        for x, y, _ in loader:
            pace.backward((call[through](x) - y).square().sum() / len(x))
            pace.step(optimizer)
    pace.host.detach()
    return difference(net.parameters(), one_process("known", COUNT // BATCH * BATCH)[0])


@guarantee(
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop."
)
def test_forward_method_of_ddp_trains_the_model_of_one_process() -> None:
    for far in run_cases(
        3, forward_method, {each: {"through": each} for each in ("call", "forward")}
    ).values():
        assert max(far) < 1e-12


@pytest.mark.parametrize("through", ["module", "module.forward"])
def test_forward_pass_around_ddp_raises(through: str) -> None:
    for said in errors_of(3, forward_method, through):
        assert "expected one of its own forward pass" in said
