"""Losses that are means over something else than samples, tokens or pixels are warned of; ordinary ones are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from paceline.torch.mistakes.suspects import LossWatch
from paceline.torch.plan import Piece, RoundPlan
from support.guarantees import guarantee

BATCH, CLASSES, WIDTH = 64, 4, 6
CHANGING = (12, 7, 9, 10, 7, 12, 9, 11, 10, 12, 7, 9, 14, 9, 11, 10)
SIZES = [(9,) * 16, CHANGING]
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 5.0], dtype=torch.float64)
layer = torch.nn.Linear(WIDTH, CLASSES).double()
draw = torch.Generator()
Loss = Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]
entropy = F.cross_entropy


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw, dtype=torch.float64)


def told(loss_of: Loss, sizes: tuple[int, ...], seed: int = 3) -> list[str]:
    """The warnings of micro-steps of these sizes; the third argument of a loss is their number."""
    draw.manual_seed(seed)
    watch = LossWatch(lambda: None, 2, False)
    watch.iteration(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, size in enumerate(sizes):
            plan = RoundPlan(step, np.array([size, BATCH - size]), BATCH)
            y = torch.randint(CLASSES, (size,), generator=draw)
            loss = loss_of(layer(normal(size, WIDTH)), y, step)
            watch.weighs(loss, Piece(plan, size, True, True), "mean", None, True)
    return [str(one.message) for one in caught]


def each(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(out, y, reduction="none")


def ignoring(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(out, y, ignore_index=0)


WRONG: dict[str, Loss] = {
    "masked sum by the mask": lambda out, y, _: (each(out, y) * (y != 0)).sum() / (y != 0).sum().clamp(min=1),
    "masked losses": lambda out, y, _: each(out, y)[y != 0].mean(),
    "selected losses": lambda out, y, _: torch.masked_select(each(out, y), y != 0).mean(),
    "masked outputs": lambda out, y, _: entropy(out[y != 0], y[y != 0]),
    "masked squares": lambda out, y, _: F.mse_loss(out[y != 0], out[y != 0].detach() + 1),
    "masked outputs beside a penalty": lambda out, y, _: (
        entropy(out[y != 0], y[y != 0]) + 0.1 * layer.weight.square().mean()
    ),
    "weighted sum by the weights": lambda out, y, _: (each(out, y) * WEIGHT[y]).sum() / WEIGHT[y].sum(),
    "nanmean": lambda out, y, _: torch.where(y != 0, each(out, y), torch.nan).nanmean(),
    "product with the mask": lambda out, y, _: (each(out, y) @ (y != 0).double()) / (y != 0).sum(),
    "weights by einsum": lambda out, y, _: (
        torch.einsum("i,i->", each(out, y), WEIGHT[y]) / torch.einsum("i->", WEIGHT[y])
    ),
    "weights by a product of matrices": lambda out, y, _: (
        (WEIGHT[y][None] @ each(out, y)[:, None]).squeeze() / WEIGHT[y].sum()
    ),
    "summed loss by the mask": lambda out, y, _: (
        entropy(out, y, ignore_index=0, reduction="sum") / (y != 0).sum()
    ),
    "samples that the collate function left out": lambda out, y, _: entropy(
        layer(normal(n := len(out) - int(y[0]), WIDTH)), y[:n]
    ),
    "stacked": lambda out, y, _: torch.stack([ignoring(out, y), out.square().mean()]).sum(),
    "averaged heads": lambda out, y, _: torch.stack([ignoring(out, y), ignoring(2 * out, y)]).mean(),
    "joined heads": lambda out, y, _: torch.cat(
        [ignoring(out, y).view(1), ignoring(-out, y).reshape(1)]
    ).sum(),
    "gathered from replicas": lambda out, y, _: ignoring(out, y).unsqueeze(0).mean(),
    "weighted": lambda out, y, _: entropy(out, y, WEIGHT),
}


def boxes(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """A mean over the boxes that the samples have, which not every batch has."""
    loss, has = out.square().mean(), y == 0
    return loss + (out[has] - 1).abs().mean() if has.any() and step % 3 else loss


def boxes_of_anchors(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """The same of boxes among three anchors of each sample, by a list of theirs."""
    anchors = torch.stack([out, 2 * out, 3 * out], 1).flatten(0, 1)
    chosen = (y.repeat_interleave(3) == 0).nonzero().squeeze(1)
    loss = entropy(out, y)
    return loss + F.smooth_l1_loss(anchors[chosen], anchors[chosen].detach() + 1) if step % 4 else loss


def tokens(out: torch.Tensor, y: torch.Tensor, length: int) -> torch.Tensor:
    """A mean over this many tokens of each sample."""
    return entropy(out.unsqueeze(1).expand(-1, length, -1).flatten(0, 1), y.repeat_interleave(length))


def boxes_of_each(out: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """For each sample the mean over its boxes, whose number differs; none for a sample without."""
    return [(row * normal(many + 1, 1)).square().mean() for row, many in zip(out, y.tolist(), strict=True)]


def picks_of_each(out: torch.Tensor, y: torch.Tensor, step: int) -> torch.Tensor:
    """For some samples the mean over those of its six anchors that have a box: at most two samples have any."""
    loss = out.sum() * 0
    for row, many in list(zip(out, y.tolist(), strict=True))[: 1 + step % 2]:
        has = torch.arange(6) < many + 1
        loss = loss + (row.repeat(6, 1)[has] * normal(many + 1, 1)).square().mean()
    return loss / len(out)


def contrastive(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    return entropy(out @ normal(len(out), CLASSES).T, torch.arange(len(out)))


def of_pairs(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    """A mean over all pairs, as many as m (m - 1) / 2."""
    upper = torch.triu_indices(len(out), len(out), 1)
    return (out @ out.T)[upper[0], upper[1]].square().mean()


def of_alike_pairs(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    """A mean over the pairs of equal labels: no number makes it one over samples."""
    return (out @ out.T)[y[:, None] == y[None]].mean()


def of_triplets(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    """A mean over mined triplets."""
    anchor, other = (y[:, None] != y[None]).nonzero().T
    return F.relu((out[anchor] - out[other]).square().sum(1) - 0.3).mean()


def of_distances(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    apart = torch.cdist(out, out)
    return apart[apart > 1].mean()


def hard(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    """A mean over the hardest three tenths."""
    return each(out, y).topk(int(0.3 * len(out)) + 1).values.mean()


def dice(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    target, found = F.one_hot(y, CLASSES).double(), out.sigmoid()
    return 1 - 2 * (found * target).sum() / (found.sum() + target.sum())


def of_all_ranks(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    """A mean over what was gathered from all ranks."""
    return torch.cat([out, normal(BATCH - len(out), CLASSES)]).square().mean()


def of_the_others(out: torch.Tensor, y: torch.Tensor, _: int) -> torch.Tensor:
    """A mean over what was gathered from the other ranks."""
    return (out.mean() * normal(BATCH - len(out), CLASSES)).square().mean()


ORDINARY: dict[str, Loss] = {
    "product by the samples": lambda out, y, _: (each(out, y) @ WEIGHT[y]) / len(y),
    "einsum by the samples": lambda out, y, _: torch.einsum("i,i->", each(out, y), WEIGHT[y]) / len(y),
    "samples": lambda out, y, _: entropy(out, y),
    "tokens of a constant length": lambda out, y, _: tokens(out, y, 5),
    "tokens of padded lengths": lambda out, y, _: tokens(out, y, 2 + int(y[0])),
    "pixels": lambda out, y, _: (out[:, :, None, None] * normal(len(out), 1, 3, 3)).square().mean(),
    "auxiliary heads": lambda out, y, _: entropy(out, y) + 0.4 * entropy(2 * out, y) + 0.4 * entropy(-out, y),
    "a mean over parameters": lambda out, y, _: entropy(out, y) + layer.weight.abs().mean(),
    "a norm of parameters": lambda out, y, _: entropy(out, y) + 1e-4 * layer.weight.square().sum() / 7,
    "in-batch negatives": contrastive,
    "pairs": of_pairs,
    "alike pairs": of_alike_pairs,
    "triplets": of_triplets,
    "distances": of_distances,
    "label smoothing": lambda out, y, _: entropy(out, y, label_smoothing=0.1),
    "stacked tasks": lambda out, y, _: torch.stack(
        [entropy(out, y), out.square().mean(), out.abs().mean()]
    ).sum(),
    "a stack of as many tasks as samples": lambda out, y, _: torch.stack([out.square().mean()] * 9).sum(),
    "all ranks": of_all_ranks,
    "the other ranks": of_the_others,
    "boxes of each sample": lambda out, y, _: torch.stack(boxes_of_each(out, y)).mean(),
    "added boxes of each sample": lambda out, y, _: sum(boxes_of_each(out, y)) / len(out),  # type: ignore[return-value]
    "boxes of samples that have any": lambda out, y, _: (
        sum((one for one, many in zip(boxes_of_each(out, y), y, strict=True) if many), out.sum() * 0)
        / len(out)
    ),
    "ignored tokens of each sample": lambda out, y, _: torch.stack(
        [
            entropy(row * normal(5, 1), torch.tensor([0, 1, 2, 3, int(label)]), ignore_index=2)
            for row, label in zip(out, y, strict=True)
        ]
    ).mean(),
    "annealed": lambda out, y, step: out.square().sum() / len(out) * (step / 7) + entropy(out, y),
    "annealed divisor": lambda out, y, step: out.square().sum() / (len(out) * (1.5 + step / 7)),
    "picks of each sample": picks_of_each,
    "the hardest": hard,
    "half of the batch": lambda out, y, _: out[: len(out) // 2].square().mean(),
    "differences of neighbours": lambda out, y, _: (out[1:] - out[:-1]).square().mean(),
    "unbiased variance": lambda out, y, _: (out - out.mean(0)).square().sum() / (len(out) - 1),
    "dice": dice,
    "a part that counts for nothing": lambda out, y, _: entropy(out, y) + 0.0 * ignoring(out, y),
    "masked mean over all": lambda out, y, _: (each(out, y) * (y != 0)).mean(),
}


@guarantee(
    "Losses with class weights, ignored targets or left-out samples are exact with `count=`; without it, "
    "Paceline raises or warns once."
)
@pytest.mark.parametrize("sizes", SIZES, ids=["constant", "changing"])
@pytest.mark.parametrize("name", WRONG)
def test_mean_over_something_else_than_samples_warns_once(name: str, sizes: tuple[int, ...]) -> None:
    (said,) = told(WRONG[name], sizes)
    assert "the loss is a mean over" in said
    assert "counts as one over" in said
    assert "count=" in said


@guarantee(
    "A loss that trains another model where loads differ causes one warning with file and line; correct "
    "losses cause none."
)
@pytest.mark.parametrize("sizes", SIZES, ids=["constant", "changing"])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_mean_does_not_warn(name: str, sizes: tuple[int, ...]) -> None:
    assert [one for one in told(ORDINARY[name], sizes) if "mean over" in one] == []


@pytest.mark.parametrize("loss_of", [boxes, boxes_of_anchors])
def test_mean_that_only_some_batches_have_warns_once(loss_of: Loss) -> None:
    (said,) = told(loss_of, CHANGING)
    assert "the loss is a mean over" in said


def test_stack_of_the_only_samples_loss_does_not_warn() -> None:
    assert told(ORDINARY["ignored tokens of each sample"], (1,) * 16) == []


def test_stack_of_each_samples_loss_that_is_summed_warns_as_a_sum() -> None:
    said = told(lambda out, y, _: torch.stack([one.square().sum() for one in out]).sum(), CHANGING)
    assert ["the loss is a sum" in one for one in said] == [True]
