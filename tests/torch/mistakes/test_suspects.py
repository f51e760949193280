"""Losses that train another model where loads differ are warned of, once, with file and line; others are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.guarantees import guarantee
from support.pictures import Pictures, boxed, model, of_moments
from support.ranks import run_cases, run_ranks
from support.scripted import Script

pytestmark = pytest.mark.processes

BATCH = 24
LIMITS = [(16, 16), (5, 5), (3, 3)]
CHANGING = ((8, 8, 8), (16, 4, 4), (4, 16, 4), (2, 2, 20), (12, 8, 4), (6, 12, 6))
Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, Part, dict[str, Any]], Any]


class Inject(torch.autograd.Function):
    """Puts the gradient of an auxiliary loss into the graph, whatever the loss is."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, aux: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, torch.tensor(0.5, dtype=grad.dtype)


class Scale(torch.autograd.Function):
    """Multiplies by a number that needs a gradient."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out, by)
        return out * by

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        out, by = ctx.saved_tensors
        return grad * by, (grad * out).sum()


def _total(value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    value = value.detach().clone()
    dist.all_reduce(value, op)
    return value


def injected(net: nn.Module, part: Part, _: Any) -> Any:
    out = net(part[0])
    return (Inject.apply(out, out.square().mean()) - part[1]).square().mean()


def scaled(net: nn.Module, part: Part, _: Any) -> Any:
    out = net(part[0])
    return (Scale.apply(out, out.square().mean()) - part[1]).square().mean()


def normalised(net: nn.Module, part: Part, _: Any) -> Any:
    return boxed(net(part[0]), *part[1:]) / (_total(part[2].sum()) / dist.get_world_size())


def as_a_number(net: nn.Module, part: Part, _: Any) -> Any:
    boxes = torch.clamp(_total(part[2].sum()) / dist.get_world_size(), min=1).item()
    each = net(part[0]) - part[1]
    return 2.0 * (each.square().sum(1) * part[2]).sum() / boxes + each.abs().mean()


def gathered(net: nn.Module, part: Part, _: Any) -> Any:
    boxes = [torch.zeros((), dtype=torch.float64) for _ in range(dist.get_world_size())]
    dist.all_gather(boxes, part[2].sum())
    return boxed(net(part[0]), *part[1:]) * (dist.get_world_size() / sum(boxes))


def in_place(net: nn.Module, part: Part, _: Any) -> Any:
    out = net(part[0])
    moments = torch.stack([out.sum(0), out.square().sum(0)]) / BATCH
    dist.all_reduce(moments)
    return of_moments(*moments)


def own_center(net: nn.Module, part: Part, kept: dict[str, Any]) -> Any:
    x, out = part[0], net(part[0])
    loss = (out - kept.get("center", 0.0)).square().sum(1).mean()
    total = out.detach().sum(0)
    dist.all_reduce(total)
    kept["center"] = 0.5 * total / (len(x) * dist.get_world_size())
    return loss


def own_center_of_a_shape(net: nn.Module, part: Part, kept: dict[str, Any]) -> Any:
    out = net(part[0])
    loss = (out - kept.get("center", 0.0)).square().sum(1).mean()
    total = out.detach().sum(0)
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    total.div_(out.shape[0] * dist.get_world_size())
    kept["center"] = total
    return loss


def summed_by_a_helper(value: torch.Tensor) -> None:
    dist.all_reduce(value)


def by_sinkhorn(net: nn.Module, part: Part, _: Any) -> Any:
    """SwAV's assignment to prototypes, in which the number of samples cancels out only if all ranks have as many."""
    out = net(part[0])
    with torch.no_grad():
        q = out.exp().t()
        batch = q.shape[1] * dist.get_world_size()
        rows = q.sum(1, keepdim=True)
        summed_by_a_helper(rows)
        q /= rows
        q /= q.sum(0, keepdim=True)
        q /= batch
    return -(q.t() * out.log_softmax(1)).sum(1).mean()


def sum_of_entropies(net: nn.Module, part: Part, _: Any) -> Any:
    return nn.functional.cross_entropy(net(part[0]), part[1].argmax(1), reduction="sum")


def sum_of_rows(net: nn.Module, part: Part, _: Any) -> Any:
    return -(net(part[0]) * part[1]).sum(1).sum()


def sum_of_means(net: nn.Module, part: Part, _: Any) -> Any:
    """As many outputs as a rank has samples, each with a mean over them."""
    return ((net(part[0]) - part[1]).square() + 1).mean(0).mul(2).sum()


def sum_by_a_constant(net: nn.Module, part: Part, _: Any) -> Any:
    return (net(part[0]) - part[1]).square().sum(1).sum() / BATCH


def mean_by_its_samples(net: nn.Module, part: Part, _: Any) -> Any:
    return 0.5 * nn.functional.cross_entropy(net(part[0]), part[1].argmax(1)) * len(part[0]) / BATCH


def mean_by_an_annealed_number(net: nn.Module, part: Part, kept: dict[str, Any]) -> Any:
    kept["step"] = kept.get("step", 0) + 1
    return (net(part[0]) - part[1]).square().mean() * (kept["step"] / 10) + (
        net(part[0]).square().mean() * 0.1
    )


def logs(net: nn.Module, part: Part, kept: dict[str, Any]) -> Any:
    """Averaged and gathered metrics, a barrier, and the largest loss: none of them enters the loss."""
    x, y, _boxes = part
    out = net(x)
    loss = (out - y).square().mean()
    reduced = torch.stack([loss.detach(), (out.detach() > 0).double().mean()])
    dist.all_reduce(reduced)
    kept["averages"] = reduced / dist.get_world_size()
    shown = loss.clone()  # with its graph
    dist.all_reduce(shown)
    kept["largest"] = _total(loss, dist.ReduceOp.MAX)
    right = _total((out.argmax(1) == y.argmax(1)).sum().double()) / _total(torch.tensor(float(len(x))))
    dist.barrier()
    kept["right"] = right.item()
    return loss


def right_center(net: nn.Module, part: Part, kept: dict[str, Any]) -> Any:
    out = net(part[0])
    loss = (out - kept.get("center", 0.0)).square().sum(1).mean()
    kept["center"] = 0.5 * _total(out.sum(0)) / _total(torch.tensor(float(len(out))))
    return loss


def differentiable(net: nn.Module, part: Part, _: Any) -> Any:
    out = net(part[0])
    return of_moments(*all_reduce(torch.stack([out.sum(0), out.square().sum(0)]) / BATCH))


def penalised(net: nn.Module, part: Part, _: Any) -> Any:
    penalty = sum(p.square().sum() for p in net.parameters())
    return (net(part[0]) - part[1]).square().mean() + 1e-4 * penalty


def divided(net: nn.Module, part: Part, _: Any) -> Any:
    return (net(part[0]) - part[1]).square().sum(1).sum() / len(part[0])


def divided_entropies(net: nn.Module, part: Part, _: Any) -> Any:
    return sum_of_entropies(net, part, _) / len(part[0])


def by_one(net: nn.Module, part: Part, _: Any) -> Any:
    """A sum that the program divides by the number of its accumulated steps, which is 1."""
    return sum_of_entropies(net, part, _) / 1


def counted(net: nn.Module, part: Part, _: Any) -> Any:
    return boxed(net(part[0]), *part[1:]) / part[2].sum(), {"count": part[2].sum()}


def globally(net: nn.Module, part: Part, _: Any) -> Any:
    return normalised(net, part, _), {"reduction": "global"}


def summed(net: nn.Module, part: Part, _: Any) -> Any:
    return sum_of_entropies(net, part, _), {"reduction": "sum"}


def normalised_summed(net: nn.Module, part: Part, _: Any) -> Any:
    return normalised(net, part, _), {"reduction": "sum"}


WRONG: dict[LossOf, str] = {
    injected: "test_suspects.Inject adds a gradient that does not come from the loss",
    **dict.fromkeys(
        (normalised, normalised_summed, as_a_number, gathered),
        "sums a number over the ranks, and the loss is divided by it",
    ),
    in_place: "sums a tensor of the loss over the ranks",
    **dict.fromkeys(
        (own_center, own_center_of_a_shape, by_sinkhorn),
        "is divided by this rank's own number of samples times the ranks",
    ),
    **dict.fromkeys((sum_of_entropies, sum_of_rows, by_one), "the loss is a sum, and counts as a mean over"),
}
RIGHT = (
    *(scaled, logs, right_center, differentiable, penalised, divided, counted, globally, summed),
    divided_entropies,
    sum_of_means,
)


def told(
    rank: int,
    ranks: int,
    loss_of: LossOf,
    changing: bool = False,
    counted_too: bool = False,
    **options: Any,
) -> list[tuple[str, str]]:
    """The warnings of two epochs with this loss, each with the line that it names, without spaces."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer, kept = torch.optim.SGD(net.parameters(), lr=1e-3), dict[str, Any]()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loads: dict[str, Any] = {"policy": Script(CHANGING)} if changing else {"limits": LIMITS}
        pace = Pace(ddp, BATCH, **(loads | options))
        for _ in range(2):
            for part in pace.loader(Pictures(), seed=5, drop_last=True):
                found = loss_of(ddp, part, kept)
                loss, how = found if isinstance(found, tuple) else (found, {})
                with FlopCounterMode(display=False) if counted_too else nullcontext():
                    pace.backward(loss, **how)
                pace.step(optimizer)
        pace.host.detach()
    return [
        (str(one.message), f"{one.filename.rpartition('/')[2]}:{one.lineno}")
        for one in caught
        if one.category is RuntimeWarning
    ]


def each_told(losses: Iterable[LossOf], **options: Any) -> Iterator[tuple[LossOf, list[tuple[str, str]]]]:
    """Each loss with what it is ``told`` on each of three ranks."""
    cases = {loss_of.__name__: {"loss_of": loss_of, **options} for loss_of in losses}
    for name, ranks in run_cases(3, told, cases).items():
        for warned in ranks:
            yield cases[name]["loss_of"], warned


@guarantee(
    "A loss that trains another model where loads differ causes one warning with file and line; correct "
    "losses cause none."
)
def test_wrong_loss_warns_once() -> None:
    lines = Path(__file__).read_text().splitlines()
    for loss_of, warned in each_told(WRONG):
        assert [WRONG[loss_of] in words for words, _ in warned] == [True], (loss_of, warned)
        words, where = warned[0]
        assert where.startswith("test_suspects.py:")
        if "over the ranks" in words:  # it names the collective, too
            line = int(words.partition("test_suspects.py:")[2].split()[0])
            assert "all_reduce(" in lines[line - 1] or "all_gather(" in lines[line - 1]


def test_loss_that_grows_with_its_samples_warns_once() -> None:
    for counted_too in (False, True):
        growing = [mean_by_its_samples] if counted_too else [sum_by_a_constant, mean_by_its_samples]
        for loss_of, warned in each_told(growing, changing=True, counted_too=counted_too):
            (one,) = warned
            assert "the loss grows with this rank's samples" in one[0], loss_of


def test_right_loss_of_changing_loads_does_not_warn() -> None:
    for loss_of, warned in each_told([*RIGHT, mean_by_an_annealed_number], changing=True):
        assert warned == [], loss_of


@guarantee(
    "A loss that trains another model where loads differ causes one warning with file and line; correct "
    "losses cause none."
)
def test_right_loss_does_not_warn() -> None:
    for loss_of, warned in each_told(RIGHT):
        assert warned == [], loss_of


def test_sum_over_a_single_sample_divided_by_one_does_not_warn() -> None:
    for loads in (((BATCH - 2, 1, 1),), ((BATCH - 5, 3, 2),)):
        options = {"policy": Script(loads), "loop": "pieces", "micro_batch": 2}
        for loss_of, warned in each_told([divided_entropies, divided], limits=[(1, None)] * 3, **options):
            assert warned == [], (loss_of, loads)


def test_wrong_loss_of_equal_loads_does_not_warn() -> None:
    for loss_of, warned in each_told([normalised, in_place, own_center], limits=[(8, 8)] * 3):
        assert warned == [], loss_of


def test_injected_gradient_under_the_hook_does_not_warn() -> None:
    assert [warned for _, warned in each_told([injected], weigh="hook")] == [[], [], []]


def averaged(rank: int, ranks: int, loop: str, right: bool) -> tuple[str, list[Any]]:
    """Update an average of the parameters in each micro-step, or after each step: the error message, the average."""
    net = model()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    original = AveragedModel.update_parameters
    pace = Pace(ddp, BATCH, limits=LIMITS, loop=loop, **({"micro_batch": 4} if loop != "whole" else {}))
    said = ""
    try:
        for batch in pace.loader(Pictures(), seed=5):
            if loop == "round":
                pace.round(batch, lambda x, y, _: (ddp(x) - y).square().mean())
            else:
                pace.backward((ddp(batch[0]) - batch[1]).square().mean())
            if pace.step(optimizer) or not right:
                average.update_parameters(net)
    except PacelineError as error:
        said = str(error)
    finally:
        pace.host.detach()
    assert AveragedModel.update_parameters is original
    return said, [p.tolist() for p in average.module.parameters()]


@guarantee(
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or raises "
    "before the step."
)
@pytest.mark.parametrize("loop", ["pieces", "round"])
def test_average_updated_within_a_round_raises(loop: str) -> None:
    right: list[Any] = run_ranks(3, averaged, loop, True)
    assert [said for said, _ in right] == [""] * 3
    for _, average in right:
        assert average == right[0][1]
    if loop == "pieces":
        for said, _ in run_ranks(3, averaged, loop, False)[:1]:
            assert (
                "AveragedModel.update_parameters() was called within round 0, before its optimizer step"
                in said
            )


def test_average_of_whole_rounds_is_updated_in_each() -> None:
    found = run_ranks(3, averaged, "whole", False)
    assert [said for said, _ in found] == [""] * 3
