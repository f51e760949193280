"""Losses that compare the samples of a batch with each other are told from means of a loss of each sample."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from doctor.test_findings import diagnosis, forward
from paceline.doctor.hooks import Hooks, compares
from paceline.torch import leave
from support.ranks import run_ranks

GUARANTEES = ("The doctor reports a loss that compares samples or chooses among them.",)

LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def distances(y: torch.Tensor) -> torch.Tensor:
    """Of all pairs in a batch, but for those of a sample with itself."""
    apart = (y[:, None] - y[None]).square().sum(-1)
    return apart[~torch.eye(len(y), dtype=torch.bool)].sqrt()


OF_EACH: dict[str, Any] = {
    "cross entropy": lambda y: F.cross_entropy(y, LABELS),
    "its sum": lambda y: F.cross_entropy(y, LABELS, reduction="sum"),
    "squares": lambda y: y.square().mean(),
    "linear": lambda y: y.sum(),
    "hinge": lambda y: F.multi_margin_loss(y, LABELS),
    "focal": lambda y: ((1 - F.log_softmax(y, 1).exp()) ** 2 * -F.log_softmax(y, 1)).mean(),
    "cosine to a target": lambda y: 1 - F.cosine_similarity(y, torch.ones_like(y)).mean(),
    "no second derivative": lambda y: Once.apply(y),
    "distances in each sample": lambda y: torch.cdist(y[..., None], torch.ones(2, 1)).amin(2).mean(),
    "largest of each sample": lambda y: y.max(1).values.mean(),
    "of something else": lambda y: torch.ones(3, requires_grad=True).sum(),
}
OF_PAIRS: dict[str, Any] = {
    "in-batch negatives": lambda y: F.cross_entropy(
        F.normalize(y, dim=1) @ F.normalize(y.roll(1, 0), dim=1).T, LABELS
    ),
    "triplets": lambda y: F.triplet_margin_loss(y, y.roll(1, 0), y.roll(3, 0), margin=9.0),
    "contrastive": lambda y: distances(y).mean(),
    "variance": lambda y: -y.var(0).sum(),
    "hardest samples": lambda y: F.cross_entropy(y, LABELS, reduction="none").topk(2).values.mean(),
    "distances whose slope torch cannot derive": lambda y: torch.cdist(y, y.flip(0)).mean(),
    "bound on a mean": lambda y: F.cross_entropy(y, LABELS).clamp(min=0.1),
    "covariance": lambda y: (y.T @ y).square().mean(),
}


class Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: torch.Tensor) -> torch.Tensor:
        return y.sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(8, 3).clone()


@pytest.mark.parametrize("name", [*OF_EACH, *OF_PAIRS])
def test_second_derivative_shows_a_loss_that_compares_samples(name: str) -> None:
    torch.manual_seed(0)
    y = torch.randn(8, 3, requires_grad=True) * 1.0
    loss = (OF_EACH | OF_PAIRS)[name](y)
    before = torch.random.get_rng_state()
    assert compares(loss, y) is (name in OF_PAIRS)
    assert torch.equal(before, torch.random.get_rng_state())
    loss.backward()  # the graph is still there


kept: list[torch.nn.Module] = []  # a module's last work may abort a process that lets go of it


def comparing(rank: int, ranks: int) -> list[tuple[bool, bool]]:
    """For a loss of each sample, and for one of pairs: whether it is found to compare them, and whether the
    parameters are those of a training that nobody watches."""
    found = []
    for pairs in (False, True):
        ended = []
        for watches in (False, True):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(torch.nn.Linear(4, 3).double())
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            hooks = Hooks(ddp, lambda: None) if watches else None
            for _ in range(4):
                y = ddp(torch.randn(8, 4, dtype=torch.float64))
                ((y[:4] - y[4:]).square().sum(1).sqrt().mean() if pairs else y.square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            ended.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist())
            kept.append(ddp)
            if hooks is not None:
                hooks.remove()
        assert hooks is not None
        found.append((hooks.compares, ended[0] == ended[1]))
    leave(ddp)
    return found


@pytest.mark.processes
def test_watch_of_a_comparing_loss_leaves_the_training_as_it_is() -> None:
    for found in run_ranks(2, comparing):
        assert found == [(False, True), (True, True)]


def test_warning_appears_once(tmp_path: Path) -> None:
    found = diagnosis(tmp_path / "0", forward(0.01, 0.04), compares=True)
    assert sum("The loss compares the samples" in each for each in found.sentences) == 1
    found = diagnosis(tmp_path / "1", forward(0.01, 0.04))
    assert "The loss compares" not in " ".join(found.sentences)
