"""Models that come to differ between ranks cause a warning, whatever has made them differ."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace
from paceline.torch.mistakes.diverged import Fingerprint
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.small_net import Net, Samples

DIFFER = "the ranks' models differ in round"


def model(dtype: torch.dtype = torch.float32, width: int = 5) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)).to(dtype)


def numbers(*models: nn.Module) -> tuple[Fingerprint, list[float]]:
    """The fingerprint of the first, and the numbers of all."""
    prints = [Fingerprint(list(each.parameters()), joins=False) for each in models]
    return prints[0], [float(each.take()) for each in prints]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_model_that_a_rank_moves_by_itself_warns_once(dtype: torch.dtype) -> None:
    other = model(dtype)
    with torch.no_grad():
        other[0].weight[4] += 0.5
    fingerprint, found = numbers(model(dtype), other)
    with pytest.warns(RuntimeWarning, match=DIFFER + r" 7, by [0-9.]+ % of their norm: the program changes"):
        fingerprint.compare(7, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fingerprint.compare(8, found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rounding_and_absent_ranks_do_not_warn(dtype: torch.dtype) -> None:
    other = model(dtype)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1 + torch.finfo(dtype).eps)
    fingerprint, found = numbers(model(dtype), other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fingerprint.compare(7, [*found, float("nan")])
        fingerprint.compare(7, [float("nan")] * 2)


def test_parameters_that_get_another_place_are_looked_at_there() -> None:
    own = model()
    fingerprint = Fingerprint(list(own.parameters()), joins=False)
    before = fingerprint.take()
    own[0].weight.data = own[0].weight.data + 1.0
    assert fingerprint.take() != before
    own[0].weight.data = own[0].weight.data - 1.0
    assert float(fingerprint.take()) == pytest.approx(float(before))


def test_large_models_are_looked_at_by_a_few_elements_of_all_parts() -> None:
    deep = nn.Sequential(*(nn.Linear(50, 50) for _ in range(200)))
    fingerprint, _ = numbers(deep)
    assert len(fingerprint._views) <= 64
    assert max(map(len, fingerprint._views)) <= 16
    for first in range(0, 200, 4):
        before = fingerprint.take()
        with torch.no_grad():
            for p in deep[first : first + 4].parameters():
                p.mul_(1.5)
        assert fingerprint.take() != before, f"layers {first} to {first + 3}"


@pytest.mark.parametrize(
    "parameters",
    [[], [nn.Parameter(torch.zeros(0))], [nn.Parameter(torch.zeros(3, 2).T)], [nn.UninitializedParameter()]],
    ids=["none", "empty", "transposed", "lazy"],
)
def test_nothing_to_look_at_gives_no_number(parameters: list[nn.Parameter]) -> None:
    fingerprint = Fingerprint(parameters, joins=False)
    assert fingerprint.take() != fingerprint.take()  # NaN
    fingerprint.compare(0, [1.0, 2.0])


def train(rank: int, ranks: int, own: str) -> list[str]:
    """The warnings of a program that changes gradients by what its rank alone knows, or not."""
    torch.manual_seed(0)
    net = Net().double()
    ddp = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings(record=True) as said, Pace(ddp, 12, "equal") as pace:
        warnings.simplefilter("always")
        norm = 1.0
        for x, y, _ in pace.loader(Samples(96), seed=1):
            loss = nn.functional.cross_entropy(ddp(x), y)
            pace.backward(loss)
            if own == "running loss":
                norm = 0.9 * norm + 0.1 * loss.item()
                for p in net.parameters():
                    p.grad /= norm
            pace.step(optimizer)
            if own == "noise":
                with torch.no_grad():
                    net.second.weight.add_(torch.randn(net.second.weight.shape) * 0.01 * (rank + 1))
    return [str(each.message) for each in said if DIFFER in str(each.message)]


@guarantee(
    "Models that come to differ between ranks cause one warning on each, whatever has made them differ."
)
@pytest.mark.processes
@pytest.mark.parametrize("own", ["running loss", "noise"])
def test_changes_by_what_one_rank_knows_warn(own: str) -> None:
    for said in run_ranks(2, train, own):
        assert len(said) == 1
        assert "such as pace.mean(loss)" in said[0]


@pytest.mark.processes
def test_program_without_such_changes_does_not_warn() -> None:
    assert run_ranks(2, train, "") == [[], []]
