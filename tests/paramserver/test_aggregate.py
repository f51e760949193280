"""Gradients added one by one, against sums written out; SGD with momentum against torch's rule."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.paramserver.aggregate import Parameters, Sum, WorkerGradient, aggregate


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from([1.0, 0.5, 1 / 3])), min_size=1, max_size=6),
    st.sampled_from([np.float32, np.float64]),
    st.one_of(st.none(), st.integers(1, 200)),
    st.integers(0, 9),
)
def test_any_weights_in_any_order(weights, kind, batch, seed):
    """LB-BSP, eq. (8); DBW, eqs. (4), (10)."""
    rng = np.random.default_rng(seed)
    gradients = rng.normal(1.0, 2.0, (len(weights), 70_000)).astype(kind)
    losses = rng.normal(size=len(weights))
    parts = [WorkerGradient(g, loss, *each) for g, loss, each in zip(gradients, losses, weights, strict=True)]
    found = aggregate([parts[i] for i in rng.permutation(len(parts))], batch)
    counts = np.array([samples * weight for samples, weight in weights])
    exact = gradients.astype(np.float64)
    mean = counts @ exact / counts.sum()
    divisor = counts.sum() if batch is None else batch
    # A sum of n products, rounded n + 2 times: what rounding can do at most (Higham 2002, section 3.1).
    most = (len(parts) + 2) * np.finfo(kind).eps * (counts @ np.abs(exact)) / divisor
    assert np.all(np.abs(found.step - counts @ exact / divisor) <= most)
    assert found.step.dtype == kind
    samples = [samples for samples, _ in weights]
    assert found.loss == pytest.approx(np.average(losses, weights=samples), abs=1e-12)
    assert found.norm2 == pytest.approx(mean @ mean, rel=1e-5)
    if len(parts) > 1:
        spread = counts @ ((exact - mean) ** 2).sum(1) / counts.sum()
        assert found.variance == pytest.approx(spread * len(parts) / (len(parts) - 1), rel=1e-4)
    else:
        assert np.isnan(found.variance)


def test_statistics_change_no_bit_of_the_sum():
    rng = np.random.default_rng(3)
    parts = [
        WorkerGradient(rng.normal(size=140_001).astype(np.float32), 0.0, samples, weight)
        for samples, weight in ((8, 1.0), (8, 1.0), (5, 0.5))
    ]
    steps = []
    for statistics in (False, True):
        total = Sum(statistics)
        for part in parts:
            total.add(part)
        steps.append(total.take(20).step)
    np.testing.assert_array_equal(*steps)


def test_a_sum_is_used_again_and_can_be_cleared():
    total, one = Sum(), np.ones(3, np.float32)
    total.add(WorkerGradient(one, 1.0, 2))
    total.add(WorkerGradient(3 * one, 1.0, 2))
    first = total.take().step
    assert first.tolist() == [2, 2, 2]
    total.add(WorkerGradient(100 * one, 1.0, 2))
    total.clear()
    total.add(WorkerGradient(one, 1.0, 5))
    assert total.take().step.tolist() == [1, 1, 1]
    assert first.tolist() == [1, 1, 1]  # the same memory, as it says
    assert one.tolist() == [1, 1, 1]


@pytest.mark.parametrize("in_place", [False, True])
def test_momentum_and_who_still_reads(in_place):
    parameters = Parameters(np.zeros(2), momentum=0.5, in_place=in_place)
    before = parameters.values
    for step in ([1.0, 2.0], [1.0, 0.0]):
        parameters.move(np.array(step), 0.1)
    assert parameters.values == pytest.approx([-0.1 - 0.15, -0.2 - 0.1])
    assert (before is parameters.values) == in_place
    assert in_place or before.tolist() == [0, 0]
