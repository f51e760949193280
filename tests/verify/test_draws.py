"""Random numbers that belong to a sample are the same whichever rank runs it, and in whatever batch."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from paceline.verify.draws import Collated, RowwiseDraws, Seeded

X = torch.arange(96.0).view(12, 8) / 96
Draw = Callable[[torch.Tensor], torch.Tensor]


def attended(x: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)


def masked(x: torch.Tensor) -> torch.Tensor:
    """Attention with a mask of each sample, in one kernel without dropout."""
    mask = (x[:, None, :4, None] * x[:, None, None, :4]).contiguous()
    parts = x.view(-1, 1, 4, 2)
    return F.scaled_dot_product_attention(parts, parts, parts, attn_mask=mask).reshape(-1, 8)


BY_SAMPLE: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "dropout of tokens in one dimension": lambda x: F.dropout(x.reshape(-1, 2), 0.5).view(-1, 8),
    "noise": lambda x: x + torch.randn_like(x),
    "noise in place": lambda x: x.clone().normal_(),
    "a time for each sample": lambda x: x + torch.randint(0, 1000, (len(x),))[:, None],
    "a drawn class": lambda x: torch.multinomial(x + 0.1, 3).float(),
    "time first": lambda x: F.dropout(x.view(len(x), 4, 2).transpose(0, 1), 0.5).transpose(0, 1).reshape(-1, 8),
    "a generator of its own": lambda x: torch.rand(len(x), 8, generator=torch.Generator().manual_seed(len(x) * 0)),
    "attention with a mask": masked,
    "dropout in attention": lambda x: attended(x.view(-1, 1, 4, 2)).reshape(-1, 8),
}  # fmt: skip


def whole(function: Draw, *cuts: int) -> torch.Tensor:
    """The results for all samples, which are run in parts of so many."""
    found, first = [], 0
    with RowwiseDraws(lambda *_: None, {}) as draws:
        for many in cuts:
            draws.begin(7, range(first, first + many), True)
            found.append(function(X[first : first + many]))
            first += many
    return torch.cat(found)


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_draws_belong_to_samples_for_any_parts(name: str) -> None:
    one = whole(BY_SAMPLE[name], 12)
    assert not torch.equal(one[0], one[1])
    assert torch.equal(one, whole(BY_SAMPLE[name], 3, 9))
    assert torch.equal(one, whole(BY_SAMPLE[name], 7, 5))


def test_a_draw_without_a_row_for_each_sample_is_alike_and_reported() -> None:
    found: list[tuple[object, ...]] = []
    with RowwiseDraws(lambda *one: found.append(one), {}) as draws:
        drawn = []
        for rows in (range(4), range(4, 11)):
            draws.begin(7, rows, True)
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert found[0][:3] == ("draw", "rand", 3)
    assert found[0][3] == (__file__, found[0][3][1])


@pytest.mark.parametrize(
    ("name", "draw"),
    [("randperm", torch.randperm), ("multinomial", lambda many: torch.multinomial(torch.ones(many), many))],
)
def test_a_choice_among_the_samples_is_alike_and_reported(
    name: str, draw: Callable[[int], torch.Tensor]
) -> None:
    found: list[tuple[object, ...]] = []
    with RowwiseDraws(lambda *one: found.append(one), {}) as draws:
        drawn = []
        for rows in (range(5), range(5, 10)):
            draws.begin(7, rows, True)
            drawn.append(draw(5))
    assert torch.equal(*drawn)
    assert sorted(drawn[0].tolist()) == list(range(5))
    assert found[0][:3] == ("draw", name, 5)


def test_a_pass_that_is_repeated_for_a_checkpoint_drops_the_same() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8))

    def gradient(again: bool) -> torch.Tensor:
        net.zero_grad()
        with RowwiseDraws(lambda *_: None, {}) as draws:
            draws.begin(1, range(12), True)
            out = checkpoint(net, X, use_reentrant=False) if again else net(X)
            out.pow(2).sum().backward()
        return net[0].weight.grad.clone()

    assert torch.equal(gradient(False), gradient(True))


class Noisy(torch.utils.data.Dataset):
    """Draws from every kind of generator."""

    def __init__(self) -> None:
        self.own = {"list": [np.random.default_rng(), random.Random(), torch.Generator()]}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        numpy, python, generator = self.own["list"]
        drawn = (numpy.random(), python.random(), random.random(), np.random.rand(), torch.rand(1).item())  # noqa: NPY002
        return torch.tensor([*drawn, torch.rand(1, generator=generator).item()])


def test_sample_is_the_same_in_any_order_and_generators_continue() -> None:
    with RowwiseDraws(lambda *_: None, {}) as draws:
        data = Seeded(Noisy(), draws)
        torch.manual_seed(3)
        random.seed(3)
        before = torch.get_rng_state(), random.getstate()
        first = [data[index] for index in range(12)]
        again = [data[index] for index in reversed(range(12))][::-1]
        assert torch.equal(before[0], torch.get_rng_state())
        assert random.getstate() == before[1]
    assert torch.equal(torch.stack(first), torch.stack(again))
    assert len({float(each) for sample in first for each in sample}) == 72


def test_a_collate_function_draws_by_sample() -> None:
    def masked(samples: list[torch.Tensor]) -> torch.Tensor:
        batch = torch.stack(samples)
        return batch * torch.bernoulli(torch.full(batch.shape, 0.5))

    def batches(*cuts: int) -> torch.Tensor:
        with RowwiseDraws(lambda *_: None, {}) as draws:
            data = Seeded(torch.utils.data.TensorDataset(X + 1), draws)
            collate = Collated(lambda samples: masked([x for (x,) in samples]), data, draws)
            order = iter(range(12))
            return torch.cat([collate([data[next(order)] for _ in range(many)]) for many in cuts])

    assert torch.equal(batches(12), batches(5, 7))
