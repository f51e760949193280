"""Losses that compare the samples of a micro-batch are warned of, once; ordinary losses and models are not."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.torch import Pace, leave
from paceline.torch.mistakes import comparing
from paceline.torch.mistakes.comparing import Comparisons
from paceline.torch.mistakes.suspects import LossWatch
from paceline.torch.plan import Piece, RoundPlan
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.small_net import CLASSES, FEATURES, Samples, fresh

BATCH, LENGTH = 64, 5
FIVE = pytest.param(5, marks=pytest.mark.nightly)  # 9 is odd, too
SIZES = [2, FIVE, 9, 12]
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
entropy = F.cross_entropy
draw = torch.Generator()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=draw)


def layers(width: int = CLASSES) -> nn.Sequential:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, width))


def piece(size: int, step: int = 0) -> Piece:
    return Piece(RoundPlan(step, np.array([size, BATCH - size]), BATCH), size, True, True)


def told(loss_of: Callable[[int, torch.Tensor], torch.Tensor], size: int) -> list[str]:
    """The warnings of two micro-steps of this many samples, with labels. Their backward passes run."""
    torch.manual_seed(size)
    draw.manual_seed(size)
    watch = LossWatch(lambda: None, 2, False, comparisons=Comparisons())
    watch.iteration(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            loss = loss_of(size, torch.arange(size) % CLASSES)
            watch.weighs(loss, piece(size, step), "mean", None, True)
            if loss.requires_grad:
                loss.backward()
    return [str(one.message) for one in caught if "compares" in str(one.message)]


def of_a_model(loss_of: Loss) -> Callable[[int, torch.Tensor], torch.Tensor]:
    model = layers()
    return lambda size, y: loss_of(model(normal(size, FEATURES)), y)


# -- losses ----------------------------------------------------------------------------------------------------


def dice(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    target, found = F.one_hot(y, CLASSES), out.softmax(1)
    return 1 - (2 * (found * target).sum(0) / (found + target).sum(0)).mean()


def agreement(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One less Lin's concordance coefficient."""
    a, b = out[:, 0], y.float()
    a, b = a - a.mean(), b - b.mean()
    return 1 - 2 * (a * b).mean() / (a.square().mean() + b.square().mean() + 0.1)


def correlation(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    b = torch.arange(len(y)) + 0.5 * y
    return 1 - F.cosine_similarity(out[:, 0] - out[:, 0].mean(), b - b.mean(), dim=0)


def supervised_contrast(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    z = F.normalize(out, dim=1)
    alike = (y[:, None] == y[None]).float()
    return -(alike * F.log_softmax(z @ z.T / 0.5, 1)).sum(1).div(alike.sum(1)).mean()


def triplets(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    apart, alike = (out[:, None] - out[None]).square().sum(-1), y[:, None] == y[None]
    far, near = (apart * alike).amax(1), (apart + 1e3 * alike).amin(1)
    return F.relu(far - near + 1e4).mean()


def nearest_of_others(apart: torch.Tensor) -> torch.Tensor:
    return F.relu(apart.amax(1) - (apart + 1e3 * torch.eye(len(apart))).amin(1) + 1e2).mean()


def each(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return entropy(out, y, reduction="none")


def hardest(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return each(out, y).topk(len(y) // 2 + 1, -1).values.mean()


def hardest_unmasked(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of elements some of which are left out, so that samples differ in their number."""
    errors = out.square().flatten()
    kept = errors[torch.arange(len(errors)) % 5 != 2]
    return kept.topk(len(kept) // 2).values.mean()


def largest_group(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    groups = [torch.arange(len(y)) % 2 == 0, torch.arange(len(y)) % 2 == 1]
    return torch.stack([(each(out, y) * group).sum() / group.sum() for group in groups]).max()


def lovasz(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """As the Lovász extension of the Jaccard loss, whose errors are sorted over all samples."""
    errors = (F.one_hot(y, CLASSES) - out.softmax(1)).abs().unbind(1)
    falling = torch.linspace(1.0, 0.1, len(y))
    return torch.stack([(one.sort(descending=True).values * falling).sum() for one in errors]).mean()


def entropy_by_hand(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The largest number of all is subtracted before the exponentials, and added again."""
    sums = (out - out.max()).exp().sum(1).log() + out.max()
    return (sums - out.gather(1, y[:, None]).squeeze(1)).mean()


COMPARES: dict[str, Loss] = {
    "dice of each class": dice,
    "root of a mean": lambda out, y: F.mse_loss(out, F.one_hot(y, CLASSES).float()).sqrt(),
    "norm": lambda out, y: (out - F.one_hot(y, CLASSES)).norm(),
    "entropy of the mean": lambda out, y: (
        entropy(out, y) + (out.softmax(1).mean(0) * out.softmax(1).mean(0).log()).sum()
    ),
    "concordance": agreement,
    "correlation": correlation,
    "discrepancy": lambda out, y: (
        entropy(out, y) + (-(out[:, None] - out[None]).square().sum(-1)).exp().mean()
    ),
    "variance": lambda out, y: entropy(out, y) + F.relu(9 - (out.var(0) + 1e-4).sqrt()).mean(),
    "supervised contrast": supervised_contrast,
    "triplets": triplets,
    "log of a mean": lambda out, y: F.mse_loss(out, F.one_hot(y, CLASSES).float()).log(),
    "product of means": lambda out, y: entropy(out, y) * out.square().mean(),
    "batch norm by hand": lambda out, y: entropy((out - out.mean(0)) / (out.var(0) + 0.1).sqrt(), y),
    "weights that are learned": lambda out, y: (each(out, y) * out[:, 0].exp()).sum() / out[:, 0].exp().sum(),
    "hardest samples": hardest,
    "sorted errors": lovasz,
    "largest loss of samples, and a mean": lambda out, y: entropy(out, y) + 0.1 * each(out, y).max(),
    "values above a quantile": lambda out, y: F.relu(each(out, y) - each(out, y).quantile(0.5)).mean(),
    "hardest pixels": lambda out, y: out.square().flatten().topk(3).values.mean(),
    "stacked parts": lambda out, y: torch.stack([entropy(out, y), dice(out, y)]).sum(),
    "distances": lambda out, y: (-torch.cdist(out, out)).exp().mean(),
    "distances between two halves": lambda out, y: (
        (-torch.cdist(out, out[1:].detach() + out[:-1])).exp().mean()
    ),
    "distances of pairs": lambda out, y: (-F.pdist(out)).exp().mean(),
    "hardest triplets by distances": lambda out, y: nearest_of_others(
        torch.cdist(F.normalize(out, dim=1), out)
    ),
    "hardest triplets by one-norms": lambda out, y: nearest_of_others(torch.cdist(out, out, p=1)),
    "root of a mean, beside distances in each sample": lambda out, y: (
        out.square().mean().sqrt() + torch.cdist(out[:, :, None], torch.ones(2, 1)).square().mean()
    ),
    "root of a mean of distances": lambda out, y: (
        torch.cdist(out[:, :, None], torch.ones(2, 1)).mean().sqrt()
    ),
    "root of a mean, beside margins": lambda out, y: out.square().mean().sqrt() + F.multi_margin_loss(out, y),
    "flooding": lambda out, y: (entropy(out, y) - 0.5).abs() + 0.5,
    "flooding above the loss": lambda out, y: (entropy(out, y) - 9).abs() + 9,
    "free nats": lambda out, y: entropy(out, y) + torch.max(out.square().mean(), torch.tensor(0.01)),
    "free nats above the divergence": lambda out, y: entropy(out, y) + out.square().mean().clamp(min=99),
    "free nats of each feature": lambda out, y: out.square().mean(0).clamp(min=0.3).sum(),
    "absolute mean": lambda out, y: (out.mean(0) - 1).abs().sum(),
    "margin of means": lambda out, y: F.relu(out[:, 0].mean() - out[:, 1].mean() + 9),
    "linear part of a Huber loss of means": lambda out, y: F.huber_loss(
        out.mean(0), torch.full([CLASSES], 9.0)
    ),
    "largest group": largest_group,
    "one order for all samples": lambda out, y: torch.stack([out[:, 0].mean(), out[:, 1].mean()]).min(),
    "hardest samples, beside none": lambda out, y: hardest(out, y) + F.relu(out[y > CLASSES]).sum(),
    "smaller mean": lambda out, y: torch.minimum(out[:, 0].mean(), out[:, 1].mean()),
    "hardest of those that are not left out": hardest_unmasked,
    "larger of neighbours": lambda out, y: torch.maximum(out, out.flip(0)).mean(),
}

ORDINARY: dict[str, Loss] = {
    "cross entropy": entropy,
    "its sum": functools.partial(entropy, reduction="sum"),
    "a sum by a constant": lambda out, y: each(out, y).sum() / BATCH,
    "ignored targets": functools.partial(entropy, ignore_index=0, label_smoothing=0.1),
    "class weights": lambda out, y: entropy(out, y, torch.tensor([0.2, 1.0, 3.0])),
    "weights of samples": lambda out, y: (each(out, y) * (1.0 + y)).sum() / (1.0 + y).sum(),
    "weights by the losses": lambda out, y: (each(out, y) * each(out, y).detach().softmax(0)).sum(),
    "left-out losses": lambda out, y: each(out, y)[y != 0].mean(),
    "focal": lambda out, y: ((1 - torch.exp(-each(out, y))) ** 2 * each(out, y)).mean(),
    "divergence": lambda out, y: F.kl_div(
        F.log_softmax(out, 1), 0.9 * F.one_hot(y, CLASSES) + 0.1 / 3, reduction="batchmean"
    ),
    "squares": lambda out, y: out.square().mean(),
    "hinge": lambda out, y: F.multi_margin_loss(out, y),
    "smooth": lambda out, y: F.smooth_l1_loss(out, F.one_hot(y, CLASSES).float()),
    "cosine": lambda out, y: 1 - F.cosine_similarity(out, torch.ones_like(out)).mean(),
    "norm of each": lambda out, y: (out - F.one_hot(y, CLASSES)).norm(dim=1).mean(),
    "dice of each sample": lambda out, y: 1 - (out[:, 0].sigmoid() / (out.sigmoid().sum(1) + 1)).mean(),
    "divided by its own value": lambda out, y: entropy(out, y) / entropy(out, y).detach(),
    "advantages": lambda out, y: -(
        F.log_softmax(out, 1)[:, 0] * (y - y.float().mean()) / (y.float().std() + 1)
    ).mean(),
    "several heads": lambda out, y: torch.stack([entropy(out, y), out.square().mean(), out.exp().mean()]).sum(),
    "sum of each sample's": lambda out, y: torch.stack([entropy(o[None], t[None]) for o, t in zip(out, y)]).mean(),  # noqa: B905
    "linear": lambda out, y: out.sum(),
    "largest of each": lambda out, y: out.amax(1).mean(),
    "next to the largest": lambda out, y: F.relu(out.topk(2, -1).values[:, 1] - out[:, 0] + 1).mean(),
    "hardest class of each": lambda out, y: torch.stack([one.max() for one in out]).mean(),
    "cross entropy by hand": entropy_by_hand,
    "rectified cross entropy by hand": lambda out, y: (
        F.relu((out - out.max()).exp().sum(1).log() + out.max() + 1).mean()
    ),
    "distances in each": lambda out, y: torch.cdist(out[:, :, None], torch.ones(2, 1)).amin(2).amax(1).mean(),
    "distances within each": lambda out, y: (
        torch.cdist(out[:, :2, None], out[:, :, None]).amin(2).mean()
        + torch.cdist(out[:, :2, None], out[:, :, None], p=1).square().mean()
    ),
    "distances to what is given": lambda out, y: torch.cdist(out, torch.ones(30, CLASSES)).amin(1).mean(),
    "margins": lambda out, y: F.multi_margin_loss(out, y),
    "absolute errors": lambda out, y: (out - 1).abs().mean() + F.l1_loss(out, out.detach() - 1),
    "Huber": lambda out, y: F.huber_loss(out, F.one_hot(y, CLASSES).float(), delta=0.1),
    "rectified": lambda out, y: F.relu(out.sum(1) + 1).mean() + F.leaky_relu(out).sum(1).clamp(-1, 1).mean(),
    "larger of two heads": lambda out, y: torch.maximum(out[:, 0], out[:, 1]).mean(),
    "smaller loss of two orders": lambda out, y: (
        torch.stack([out[:, :2].sum(1).square(), out[:, 1:].sum(1).square()]).amin(0).mean()
    ),
    "left-out largest of each": lambda out, y: out[y != 0].topk(2, 1).values.mean() + out[y == 0].sum() / len(y),
    "largest of one": lambda out, y: entropy(out, y).view(1).max(),
    "dropout": lambda out, y: entropy(F.dropout(out, 0.5), y),
    "none that needs a gradient": lambda out, y: out.detach().var(),
    "nothing": lambda out, y: out.sum() * 0,
}  # fmt: skip


@guarantee("A loss that compares the samples of a micro-batch while loads differ causes one warning.")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COMPARES)
def test_loss_that_compares_samples_warns_once(name: str, size: int) -> None:
    (said,) = told(of_a_model(COMPARES[name]), size)
    assert "the loss compares the samples of a micro-batch with each other" in said
    assert "see docs/porting.md (Losses that compare samples)" in said


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_loss_does_not_warn(name: str, size: int) -> None:
    assert told(of_a_model(ORDINARY[name]), size) == []


# -- models ----------------------------------------------------------------------------------------------------

Program = Callable[[int, torch.Tensor], torch.Tensor]


def of_two_views(loss_of: Loss, joined: bool) -> Program:
    """A loss of two views of each sample, which run through the model together or one after the other."""
    model = layers()

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        first, second = normal(size, FEATURES), normal(size, FEATURES)
        both = model(torch.cat([first, second])).chunk(2) if joined else (model(first), model(second))
        return loss_of(*both)

    return program


def alternating(loss_of: Loss) -> Program:
    """A loss of two views of each sample, whose outputs follow each other."""
    model = layers()
    return lambda size, y: loss_of(*model(normal(2 * size, FEATURES)).view(size, 2, -1).unbind(1))


def penalised(size: int, y: torch.Tensor) -> torch.Tensor:
    """A penalty of each sample's gradient."""
    x = normal(size, FEATURES).requires_grad_()
    out = layers()(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return entropy(out, y) + (slope.norm(dim=1) - 1).square().mean()


def with_penalties(size: int, y: torch.Tensor) -> torch.Tensor:
    """Penalties of weights, one of which has as many rows as the batch has samples."""
    first, second = nn.Linear(FEATURES, size), nn.Linear(size, CLASSES)
    weight = F.normalize(first.weight, dim=1)
    other = (weight @ weight.T - torch.eye(size)).square().sum() + (first.weight @ first.weight.T).norm()
    return (
        entropy(second(first(normal(size, FEATURES)).tanh()), y)
        + other
        + first.weight.norm()
        + first.weight.var()
    )


def of_tokens(time_first: bool, length: int = LENGTH, contrast: bool = False) -> Program:
    """A product of the probabilities of a sequence's tokens, by attention or a recurrent layer."""
    model, inner, last = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.LSTM(8, 8), nn.Linear(8, 4)

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        x = normal(size, length, 8)
        if time_first:
            each = F.logsigmoid(last(inner(x.transpose(0, 1))[0])[..., 0].sum(0))
            return -each.mean()
        out = last(model(x))
        if contrast:
            return entropy(out.mean(1) @ out.mean(1).T, torch.arange(size))
        return -F.logsigmoid(out.log_softmax(-1)[..., 0].sum(1)).mean()

    return program


def largest_token(time_first: bool, length: int) -> Program:
    """Each sequence's largest values, and the two largest of them."""
    inner, last = nn.LSTM(8, 8, batch_first=not time_first), nn.Linear(8, 4)
    dim = int(not time_first)

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        x = normal(length, size, 8) if time_first else normal(size, length, 8)
        out = last(inner(x)[0])
        return out.amax(dim).mean() + out.topk(2, dim).values.square().mean()

    return program


def hardest_tokens(time_first: bool, length: int) -> Program:
    """The largest losses of all tokens of all sequences."""
    inner, last = nn.LSTM(8, 8, batch_first=not time_first), nn.Linear(8, 4)

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        x = normal(length, size, 8) if time_first else normal(size, length, 8)
        losses = last(inner(x)[0]).reshape(-1, 4).square().sum(1)
        return losses.topk(len(losses) // 3).values.mean()

    return program


def pairs_of_preferences(size: int, y: torch.Tensor) -> torch.Tensor:
    """The chosen texts, then the rejected ones, each as long as the batch."""
    scores = nn.Linear(8, 4)(normal(2 * size, size, 8)).log_softmax(-1)[..., 0].sum(1)
    return -F.logsigmoid(scores[:size] - scores[size:]).mean()


def normalised(last: bool, both: bool = False) -> Program:
    """A model with batch norm, at its end or within, and a loss that also takes what goes into it."""
    norm, second = nn.BatchNorm1d(8, affine=not last), nn.Linear(8, CLASSES)
    first = nn.Linear(FEATURES, 8)

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        inner = first(normal(size, FEATURES))
        if last:
            return entropy(norm(inner), y)
        loss = entropy(second(norm(inner).relu()), y) + inner.square().mean()
        return loss + triplets(inner, y) if both else loss

    return program


class Once(torch.autograd.Function):
    """A function without a second derivative."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(out)
        return out.square()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return 2 * out * grad


def checkpointed(reentrant: bool, compares: bool = False, whole: bool = False) -> Program:
    model = layers()

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        x = normal(size, FEATURES).requires_grad_()
        if whole:
            return checkpoint(lambda z: dice(model(z), y), x, use_reentrant=reentrant)  # type: ignore[no-any-return]
        out = checkpoint(model, x, use_reentrant=reentrant)
        return dice(out, y) if compares else entropy(out, y)

    return program


def mixed_precision(loss_of: Loss) -> Program:
    model, scaler = layers(), torch.amp.GradScaler("cpu")

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(normal(size, FEATURES)), y)
        scaled: torch.Tensor = scaler.scale(loss)
        return scaled

    return program


def compiled(loss_of: Loss) -> Program:
    model = torch.compile(layers(), backend="aot_eager")
    return lambda size, y: loss_of(model(normal(size, FEATURES)), y)


def embedded(loss_of: Loss) -> Program:
    users, items = (nn.Embedding(20, 8, sparse=True) for _ in range(2))
    return lambda size, y: loss_of(users(torch.arange(size)), items(torch.arange(size)))


def frozen(size: int, y: torch.Tensor) -> torch.Tensor:
    """Features of a frozen model, which normalizes by hand, of what a trained one makes."""
    first, last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES).requires_grad_(False)
    out = first(normal(size, FEATURES))
    return last((out - out.mean(0)) / (1 + out.var(0))).square().mean()


def recurrent(size: int, y: torch.Tensor) -> torch.Tensor:
    cell, state = nn.GRUCell(FEATURES, 8), torch.zeros(size, 8)
    for _ in range(4):
        state = cell(normal(size, FEATURES), state)
    return state.tanh().square().sum(1).exp().mean()


def packed(classes: int, largest: bool) -> Program:
    """Samples of several rows each, of one row more in each second one, and as many classes as samples, or twice."""

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        lengths = [3 + number % 2 for number in range(size)]
        lengths[-1] += sum(lengths) % size == 0
        rows = layers(classes * size)(normal(sum(lengths), FEATURES)).split(lengths)
        return entropy(torch.stack([one.amax(0) if largest else one.mean(0) for one in rows]), y)

    return program


def packed_channels(size: int, y: torch.Tensor) -> torch.Tensor:
    """Samples of several crops each, as many channels as samples."""
    out = nn.Conv1d(2, size, 3)(normal(2 * size + 1, 2, 8)).mean(2).split([3] + [2] * (size - 1))
    return entropy(torch.stack([one.amax(0) for one in out]), y)


def best_of_views(size: int, y: torch.Tensor) -> torch.Tensor:
    """The smaller loss of each sample's two views; the second views follow all first ones."""
    out = layers()(normal(2 * size, FEATURES))
    return entropy(out, y.repeat(2), reduction="none").view(2, size).amin(0).mean()


def best_of_neighbours(size: int, y: torch.Tensor) -> torch.Tensor:
    """The smaller loss of each sample's two views, which follow each other."""
    out = layers()(normal(2 * size, FEATURES))
    return entropy(out, y.repeat_interleave(2), reduction="none").view(size, 2).amin(1).mean()


def graph_of_nodes(size: int, y: torch.Tensor) -> torch.Tensor:
    """Links within graphs that have several nodes each, as many as a multiple of the samples."""
    z = layers()(normal(4 * size, FEATURES))
    return F.softplus(-(z[:-1] * z[1:]).sum(1)).mean()


def of_bags(added: bool) -> Program:
    """Each sample is a bag, some with as many rows as the batch has samples; weights are learned."""
    model = layers(2)

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        bags = (model(normal(size * (1 + number % 2), FEATURES)) for number in range(size))
        losses = [-F.logsigmoid((out[:, 0].softmax(0) * out[:, 1]).sum()) for out in bags]
        return sum(losses) / size if added else torch.stack(losses).mean()  # type: ignore[return-value]

    return program


def with_features(loss_of: Loss) -> Program:
    """A classifier's loss and one of its features."""
    first, last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def program(size: int, y: torch.Tensor) -> torch.Tensor:
        features = first(normal(size, FEATURES))
        return entropy(last(features.relu()), y) + 0.5 * loss_of(features, y)

    return program


def similar(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 1 - F.cosine_similarity(a, b).mean()


def ranked(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return entropy(F.normalize(a, dim=1) @ F.normalize(b, dim=1).T, torch.arange(len(a)))


COMPARING: dict[str, Callable[[], Program]] = {
    "joined views": lambda: of_two_views(ranked, True),
    "two views": lambda: of_two_views(ranked, False),
    "alternating views": lambda: alternating(ranked),
    "embeddings": lambda: embedded(ranked),
    "features beside a classifier": lambda: with_features(triplets),
    "features before batch norm": lambda: normalised(False, True),
    "sequences": lambda: of_tokens(False, contrast=True),
    "mixed precision": lambda: mixed_precision(dice),
    "behind a checkpoint": lambda: checkpointed(False, True),
    "behind a reentrant checkpoint": lambda: checkpointed(True, True),
    "within a checkpoint": lambda: checkpointed(False, whole=True),
    "behind a compiled model": lambda: compiled(dice),
    "hardest views": lambda: of_two_views(
        lambda a, b: (a - b).square().sum(1).topk(len(a) // 2).values.mean(), True
    ),
    **{
        f"hardest of {length} tokens, {'time' if first else 'samples'} first": functools.partial(
            hardest_tokens, first, length
        )
        for length, first in itertools.product((7, 8, 11, 18, 20, 24), (False, True))
    },
}

PLAIN: dict[str, Callable[[], Program]] = {
    "joined views": lambda: of_two_views(similar, True),
    "two views": lambda: of_two_views(similar, False),
    "alternating views": lambda: alternating(similar),
    "embeddings": lambda: embedded(lambda a, b: F.softplus((a * b).sum(1)).mean()),
    "gradient penalty": lambda: penalised,
    "penalties of weights": lambda: with_penalties,
    "attention": lambda: of_tokens(False),
    "recurrent": lambda: of_tokens(True),
    "cell": lambda: recurrent,
    "preferences": lambda: pairs_of_preferences,
    "batch norm": lambda: normalised(False),
    "batch norm at the end": lambda: normalised(True),
    "features beside a classifier": lambda: with_features(lambda z, y: z.square().mean()),
    "no second derivative": lambda: of_a_model(lambda out, y: Once.apply(out).mean()),  # type: ignore[no-untyped-call]
    "mixed precision": lambda: mixed_precision(entropy),
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
    "compiled": lambda: compiled(entropy),
    "frozen": lambda: frozen,
    "nodes": lambda: graph_of_nodes,
    "bags": lambda: of_bags(False),
    "packed rows": lambda: packed(1, False),
    "packed rows, twice the classes": lambda: packed(2, False),
    "largest of packed rows": lambda: packed(1, True),
    "packed channels": lambda: packed_channels,
    "best of views": lambda: best_of_views,
    "best of views that follow each other": lambda: best_of_neighbours,
    "added losses of bags": lambda: of_bags(True),
    "paths": lambda: (
        lambda size, y: F.ctc_loss(
            nn.Linear(4, 4)(normal(8, size, 4)).log_softmax(-1),
            torch.ones(size, 2, dtype=torch.int64),
            torch.full((size,), 8),
            torch.full((size,), 2),
        )
    ),
    **{
        f"{length} tokens, {'time' if first else 'samples'} first": functools.partial(
            of_tokens, first, length
        )
        for length, first in itertools.product((2, 3, 9, 10, 12, 18, 20, 24), (False, True))
    },
    **{
        f"largest of {length} tokens, {'time' if first else 'samples'} first": functools.partial(
            largest_token, first, length
        )
        for length, first in itertools.product((9, 10, 24), (False, True))
    },
}


SLOW = "behind a compiled model"  # each size compiles anew; the other programs have them all


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.nightly if size == 5 or (name, size) == (SLOW, 9) else ())
        for name, size in itertools.product(COMPARING, (5, 9, 12))
    ],
)
def test_program_that_compares_samples_warns_once(name: str, size: int) -> None:
    torch.manual_seed(0)
    assert len(told(COMPARING[name](), size)) == 1


@guarantee(
    "Losses of single samples cause no warning of a comparison, whatever the model and its passes are."
)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PLAIN)
def test_program_of_single_samples_does_not_warn(name: str, size: int) -> None:
    torch.manual_seed(0)
    assert told(PLAIN[name](), size) == []


# -- what the test leaves alone --------------------------------------------------------------------------------


def test_gradients_hooks_and_random_numbers_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model, called = layers(), list[str]()
    for parameter in model.parameters():
        parameter.register_hook(lambda _: called.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda _: called.append("accumulated"))
    inner = model[0](normal(8, FEATURES))
    inner.register_hook(lambda _: called.append("inner"))  # of the model, and not behind a layer of the loss
    loss = dice(model[2](inner.tanh()), torch.arange(8) % CLASSES)
    state = torch.random.get_rng_state()
    assert Comparisons().found(loss, piece(8))
    assert torch.equal(state, torch.random.get_rng_state())
    assert called == []
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert called.count("accumulated") == 4


def test_gradients_of_distances_stay_as_they_are() -> None:
    torch.manual_seed(0)
    out = layers()(normal(8, FEATURES)).detach().requires_grad_()
    loss = nearest_of_others(torch.cdist(out * 2, out * 3)) + F.pdist(out * 2).square().sum()
    (expected,) = torch.autograd.grad(loss, out, retain_graph=True)
    layer = nn.Linear(CLASSES, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(CLASSES))
        layer.bias.zero_()
    loss = (lambda z: nearest_of_others(torch.cdist(z * 2, z * 3)) + F.pdist(z * 2).square().sum())(
        layer(out)
    )
    assert Comparisons().found(loss, piece(8))
    loss.backward()
    torch.testing.assert_close(out.grad, expected)


@pytest.mark.parametrize("kept", [True, False])
def test_loss_whose_tensors_have_hooks_is_not_tested(kept: bool) -> None:
    found = layers()(normal(8, FEATURES)).softmax(1)
    if kept:
        found.retain_grad()
    else:
        found.register_hook(lambda grad: pytest.fail("called") if grad.requires_grad else None)
    loss = found.square().mean().sqrt()
    assert not Comparisons().found(loss, piece(8))
    loss.backward()


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda out: (
            functools.reduce(lambda a, _: (a + 1).sqrt(), range(600), out).var().sqrt()
        ),  # a long graph
        lambda out: out.repeat(1, 1 << 20).var().sqrt() if out.size(1) > 4 else out.var().sqrt(),
    ],
)
def test_large_losses_are_not_tested(loss_of: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(comparing, "ELEMENTS", 64)
    monkeypatch.setattr(comparing, "HEAD", 500)
    assert not Comparisons().found(loss_of(layers(9)(normal(8, FEATURES)).abs()), piece(8))


def test_loss_whose_collectives_were_not_looked_at_is_not_tested() -> None:
    watch = LossWatch(lambda: None, 2, False, comparisons=Comparisons())
    watch.iteration(0)
    watch.close()  # as after too many collectives
    loss = dice(layers()(normal(8, FEATURES)), torch.arange(8) % CLASSES)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not watch.weighs(loss, piece(8), "mean", None, True)


def test_two_losses_of_a_run_are_tested(monkeypatch: Any) -> None:
    tested = list[int]()
    monkeypatch.setattr(comparing, "mixes", lambda *_: tested.append(1))
    watch = Comparisons()
    for _ in range(4):
        watch.found(layers()(normal(8, FEATURES)).square().mean(), piece(8))
    assert len(tested) == 2


# -- ranks -----------------------------------------------------------------------------------------------------

ROWS, LIMITS = 90, [(16, 16), (5, 5), (3, 3)]


def trained(
    rank: int, ranks: int, loss_of: Loss, options: dict[str, Any], ddp: dict[str, Any], watched: bool
) -> tuple[list[str], list[float]]:
    """The warnings of two epochs, and the parameters."""
    if not watched:
        comparing.TESTS = 0
    model = fresh(torch.float64)
    wrapped = DistributedDataParallel(model, **ddp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pace = Pace(wrapped, 24, **options)
        for _ in range(2):
            for x, y, _ in pace.loader(Samples(ROWS), seed=5, drop_last="equal" not in str(options)):
                pace.backward(loss_of(wrapped(x), y))
                pace.step(optimizer)
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    leave(wrapped)
    return [f"{one.filename}: {one.message}" for one in caught if one.category is RuntimeWarning], parameters


@pytest.mark.processes
@pytest.mark.parametrize("ddp", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_ranks_of_uneven_loads_warn_once_and_train_on(ddp: dict[str, Any]) -> None:
    plain = run_ranks(3, trained, dice, {"limits": LIMITS}, ddp, False)
    for (said, parameters), (silent, expected) in zip(
        run_ranks(3, trained, dice, {"limits": LIMITS}, ddp, True), plain, strict=True
    ):
        assert silent == []
        assert ["the loss compares the samples of a micro-batch" in one for one in said] == [True], said
        assert "test_comparing.py: round 0" in said[0]
        assert parameters == expected


@pytest.mark.processes
@pytest.mark.parametrize(
    ("loss_of", "options"),
    [
        (entropy, {"limits": LIMITS}),
        (dice, {"limits": [(8, 8)] * 3}),
        (dice, {"policy": "equal"}),
    ],
    ids=["each sample", "equal loads", "equal policy"],
)
def test_ranks_of_right_losses_and_equal_loads_do_not_warn(loss_of: Loss, options: dict[str, Any]) -> None:
    assert [said for said, _ in run_ranks(3, trained, loss_of, options, {}, True)] == [[], [], []]
