"""The cost of samples by hand: models, the parts of micro-batches, and lengths that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline import PacelineError
from paceline.samples import CostModel, SampleCosts
from paceline.samples.cost import batch_parts, cost_of

GUARANTEES = (
    "Costs that are not positive and finite, too few, or different between ranks raise one error on every "
    "rank.",
)

LENGTHS = np.array([1.0, 2.0, 3.0])  # mean 2, mean square 14 / 3


def test_cost_of_a_sample_is_linear_and_quadratic_in_its_length() -> None:
    assert CostModel(0.5, 0.25).of(np.array([2.0, 4.0])).tolist() == [2.0, 6.0]
    assert CostModel(0.5).of(np.array([[2.0], [4.0]])).tolist() == [[1.0], [2.0]]
    assert (CostModel(0.5).launch, CostModel(0.5).padded) == (None, False)


def test_mean_sample_costs_one_in_every_model() -> None:
    costs = SampleCosts.checked(LENGTHS, 3)
    assert (costs.mean, costs.mean_square) == (2.0, 14 / 3)
    for model in (costs.model(), costs.model(0.3), costs.model(1.0), costs.with_alpha(0.5)):
        assert model.of(LENGTHS).mean() == pytest.approx(1.0)
    half = costs.model(0.5, 0.75, True)
    assert (half.linear, half.quadratic) == pytest.approx((0.25, 1.5 / 14))
    assert (half.launch, half.padded) == (0.75, True)
    alpha = costs.with_alpha(0.5, 0.75, True)  # in proportion to L + L^2 / 2
    assert alpha.quadratic / alpha.linear == pytest.approx(0.5)
    assert (alpha.launch, alpha.padded) == (0.75, True)
    for model in (costs.model(), costs.with_alpha(0.5)):
        assert (model.launch, model.padded) == (None, False)
    assert costs.model().quadratic == 0.0


def test_parts_of_micro_batches_are_sums_of_what_they_hold_or_pad() -> None:
    lengths, sizes = np.array([3.0, 1.0, 2.0, 2.0, 4.0]), np.array([2, 3])
    assert batch_parts(lengths, sizes, padded=False).tolist() == [12.0, 34.0, 2.0]
    assert batch_parts(lengths, sizes, padded=True).tolist() == [2 * 3 + 3 * 4, 2 * 9 + 3 * 16, 2.0]
    assert batch_parts(np.zeros(0), np.zeros(0, np.int64), padded=True).tolist() == [0.0, 0.0, 0.0]
    parts = np.array([[12.0, 34.0, 2.0], [18.0, 66.0, 2.0]])
    assert cost_of(CostModel(0.5, 0.25, 10.0), parts).tolist() == [34.5, 45.5]
    assert cost_of(CostModel(0.5, 0.25), parts).tolist() == [14.5, 25.5]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0, "a", 2.0], "cost: expected one number for each sample, but could not convert"),
        ({}, "cost: expected one number for each sample, but"),
        (3.0, "cost=3: expected one number for each sample; leave it out"),
        ([[1.0, 2.0, 3.0]], r"an array of shape \(3,\); got shape \(1, 3\)"),
        ([[1.0], [2.0], [3.0]], r"an array of shape \(3,\); got shape \(3, 1\)"),
        ([1.0, 2.0], "cost: got 2 numbers for the data set's 3 samples; expected one for each"),
        ([1.0, 0.0, 2.0], "cost: sample 1 has 0; expected positive, finite numbers"),
        ([1.0, -2.0, np.nan], "cost: sample 1 has -2, and 1 others like it; expected"),
        ([1e100, 1.1e100, np.inf], r"cost: sample 1 has 1\.1e\+100, and 1 others like it"),
    ],
)
def test_lengths_that_are_no_positive_number_for_each_sample_raise(values: Any, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        SampleCosts.checked(values, 3)


def test_lengths_are_copied_and_stay() -> None:
    given = np.array([1.0, 2.0, 1e100])
    costs = SampleCosts.checked(given, 3, "tokens")
    given[0] = 9.0
    assert costs.lengths.tolist() == [1.0, 2.0, 1e100]
    assert not costs.lengths.flags.writeable
    with pytest.raises(PacelineError, match="tokens: got 3 numbers"):
        SampleCosts.checked(given, 4, "tokens")
