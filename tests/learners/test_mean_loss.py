"""Which losses are plain means over the samples, by their values of halves."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.nn import functional

from paceline.errors import PacelineError
from paceline.learners.mean_loss import LOOKS, MeanLoss, check_loss

X = torch.randn(11, 3, generator=torch.Generator().manual_seed(1))
Y = torch.arange(11) % 3
WEIGHTS = torch.tensor([1.0, 2.0, 4.0])


def smooth(x, y):
    return functional.cross_entropy(x, y, label_smoothing=0.1) + 0.01


def weighted(x, y):
    """By class weights, but divided by the number of samples."""
    return (WEIGHTS[y] * functional.cross_entropy(x, y, reduction="none")).mean()


def of_two(outputs, y):
    return functional.cross_entropy(outputs["a"], y) + outputs["b"][0].square().mean()


def noisy(x, y):
    return (functional.cross_entropy(x, y, reduction="none") * torch.rand(len(y))).mean()


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        (functional.cross_entropy, X),
        (functional.cross_entropy, X.double()),
        (smooth, X),
        (weighted, X),
        (of_two, {"a": X, "b": (X, X)}),
        (noisy, X),
    ],
    ids=["float32", "float64", "with-constant", "weighted", "nested", "random"],
)
def test_means_are_accepted_and_unchanged(loss, outputs):
    checked = MeanLoss(loss)
    for many in (11, 2, 1):
        cut = {"a": X[:many], "b": (X[:many],)} if isinstance(outputs, dict) else outputs[:many]
        torch.manual_seed(5)
        expected = loss(cut, Y[:many])
        torch.manual_seed(5)
        assert torch.equal(checked(cut, Y[:many]), expected)


def test_outputs_without_a_row_for_each_sample_are_not_cut():
    MeanLoss(lambda x, y: x.square().mean().sqrt())(X.T, Y)


def class_weights(x, y):
    return functional.cross_entropy(x, y, weight=WEIGHTS)


def contrastive(x, y):
    return functional.cross_entropy(x @ x.T, torch.arange(len(x)))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        class_weights,
        contrastive,
        lambda x, y: x.square().mean().sqrt(),
        lambda x, y: functional.cross_entropy(x, torch.where(y == 2, -100, y)),
    ],
    ids=["sum", "class-weights", "comparison", "root", "ignored"],
)
def test_other_losses_raise_with_both_values(loss):
    said = r"^the loss of 11 samples is [\d.]+, and of its halves [\d.]+ and [\d.]+; expected a plain mean over the s"
    with pytest.raises(PacelineError, match=said):
        MeanLoss(loss)(X, Y)


def test_later_batches_show_what_the_first_do_not():
    checked = MeanLoss(class_weights)
    for _ in range(LOOKS - 1):
        checked(X[:6], torch.zeros(6, dtype=torch.long))  # of one class: its weight cancels
    with pytest.raises(PacelineError, match="expected a plain mean"):
        checked(X, Y)


def test_only_the_first_losses_are_looked_at():
    calls = []

    def counted(x, y):
        calls.append(len(y))
        return functional.cross_entropy(x, y)

    checked = MeanLoss(counted)
    for _ in range(LOOKS):
        checked(X, Y)
    calls.clear()
    checked(X, Y)
    assert calls == [11]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"returned a tensor of shape \(11,\); expected one number"),
        (lambda x, y: 0.5, "returned 0.5; expected one number, the mean over the samples"),
    ],
)
def test_loss_that_is_no_number_raises(loss, said):
    with pytest.raises(PacelineError, match=said):
        MeanLoss(loss)(X, Y)


def test_loss_with_parameters_raises():
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.zeros(3))

    with pytest.raises(
        PacelineError, match=r"^the loss Centers has parameters, and only those of the model are tr"
    ):
        check_loss(Centers())
    check_loss(nn.CrossEntropyLoss(weight=WEIGHTS))
    check_loss(None)
