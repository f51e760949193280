import math

import numpy as np
import pytest

from paceline import Cluster, PacelineError, Round
from paceline.costs import Linear, Saturating
from paceline.rounds import Gradients, Plan, RoundResult, measurable


def test_limits_default_to_none_and_the_batch():
    cluster = Cluster(3, 100)
    np.testing.assert_array_equal(cluster.least, [0, 0, 0])
    np.testing.assert_array_equal(cluster.most, [100, 100, 100])
    assert not cluster.limited
    assert Cluster(3, 100, most=[40, 40, 40]).limited
    assert Cluster(2, 10, realizations=(5,)).shape == (5, 2)


def test_fractional_limits_are_cut_to_the_whole_samples_within():
    cluster = Cluster(2, 10, least=[1.5, 0], most=[9.5, 20])
    np.testing.assert_array_equal(cluster.least, [2, 0])
    np.testing.assert_array_equal(cluster.most, [9, 10])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"workers": 0, "global_batch": 4}, "workers=0: expected a whole number, 1 to"),
        ({"workers": 2, "global_batch": 0}, "global_batch=0: expected a whole number, 1 to"),
        ({"workers": 1.5, "global_batch": 4}, "workers=1.5: expected a whole number"),
        ({"workers": 2, "global_batch": float("nan")}, "global_batch=nan: expected a whole number"),
        (
            {"workers": 2, "global_batch": 10, "least": [6, 7]},
            "sum to 13, 3 more than the global batch of 10",
        ),
        ({"workers": 2, "global_batch": 10, "most": [3, 4]}, "sum to 7, 3 short of the global batch of 10"),
        ({"workers": 2, "global_batch": 10, "least": [0, 5], "most": [10, 4]}, "worker 1: least 5, most 4"),
        ({"workers": 2, "global_batch": 10, "least": [np.nan, 0]}, "worker 0"),
        ({"workers": 2, "global_batch": 10, "least": [-1, 0]}, "worker 0: least -1"),
        ({"workers": 2, "global_batch": 10, "least": [1, 2, 3]}, r"least=\[1, 2, 3\]: .* of the 2 workers"),
        ({"workers": 2, "global_batch": 10, "most": {}}, "most={}: .* of the 2 workers"),
        ({"workers": 1, "global_batch": 2**53 + 1}, "global_batch=9007199254740993: expected a whole number"),
    ],
)
def test_impossible_clusters_raise(given, words):
    with pytest.raises(PacelineError, match=words):
        Cluster(**given)


def test_a_round_knows_who_was_there():
    seen = Round(np.array([0.5, 0.5]), np.array([1.0, np.nan]), 8)
    np.testing.assert_array_equal(seen.present, [True, False])
    np.testing.assert_array_equal(seen.overhead, [0, 0])
    np.testing.assert_array_equal(seen.loads, [4, 4])


def test_limits_that_hold_the_batch_exactly_are_allowed():
    cluster = Cluster(2, 10, least=[4, 6], most=[4, 6])
    np.testing.assert_array_equal(cluster.least_shares, [0.4, 0.6])
    np.testing.assert_array_equal(cluster.most_shares, [0.4, 0.6])
    assert Cluster(1, 2**53).global_batch == 2**53  # all whole numbers up to this one are floats
    assert Cluster(3, 10, least=1).limited
    assert not Cluster(3, 10, most=10).limited


def test_worker_whose_report_is_old_is_not_fresh():
    seconds = np.array([1.0, np.nan, 2.0])
    assert Round(np.full(3, 1 / 3), seconds, 9).fresh.tolist() == [True, False, True]
    late = Gradients(math.nan, np.array([False, False, True]))
    seen = Round(np.full(3, 1 / 3), seconds, 9, gradients=late, present=np.array([True, True, False]))
    assert seen.fresh.tolist() == [True, False, False]
    assert seen.present.tolist() == [True, True, False]


def test_seconds_are_cut_to_what_has_a_square_and_a_reciprocal():
    seconds = np.array([0.0, np.nan, 1e-300, 0.5, 2.0, 1e300])
    np.testing.assert_array_equal(measurable(seconds), [0.0, np.nan, 1e-15, 0.5, 2.0, 1e15])
    seen = Round(np.full(2, 0.5), np.ones(2), 4, overhead=np.array([1e-300, 0.25]))
    np.testing.assert_array_equal(seen.overhead, [1e-15, 0.25])


def test_costs_of_a_plan_end_all_its_shares_at_the_same_time():
    costs = Plan(np.array([0.25, 0.75, 0.0])).by_shares()
    np.testing.assert_array_equal(costs.seconds_per_sample, [4.0, 4 / 3, np.inf])
    np.testing.assert_array_equal(costs.overhead, 0.0)


def test_plan_without_absent_workers_keeps_the_others_in_proportion():
    present, slopes, overhead = np.array([True, False, True]), np.array([1.0, 2.0, 3.0]), np.full(3, 0.5)
    plan = Plan(np.array([0.2, 0.3, 0.5]), costs=Linear(slopes, overhead)).among(present)
    np.testing.assert_allclose(plan.shares, [2 / 7, 0.0, 5 / 7], rtol=1e-15)
    assert isinstance(plan.costs, Linear)
    np.testing.assert_array_equal(plan.costs.seconds_per_sample, [1.0, np.inf, 3.0])
    np.testing.assert_array_equal(plan.costs.overhead, overhead)


def test_plan_without_shares_or_costs_of_those_present_divides_equally():
    present, without = np.array([False, True, True]), np.array([1.0, np.inf, np.inf])
    plan = Plan(np.array([1.0, 0.0, 0.0])).among(present)
    np.testing.assert_array_equal(plan.shares, [0.0, 0.5, 0.5])
    assert plan.costs is None
    shares = np.array([0.5, 0.25, 0.25])
    assert Plan(shares, costs=Linear(without, np.zeros(3))).among(present).costs is None
    other = Saturating(np.ones(3), np.zeros(3), np.ones(3), np.full(3, 9.0))
    assert Plan(shares, costs=other).among(present).costs is other
    assert Plan(shares).among(present).costs is None


def test_result_begins_with_epoch_zero():
    one = np.ones(1)
    assert (
        RoundResult(step=3, batch=1, loads=one, compute=one, overhead=one, seconds=1, shares=one).epoch == 0
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            {"seconds": [[1.0], [1.0, 2.0]]},
            r"seconds=\[\[1.0\], \[1.0, 2.0\]\], .*: expected arrays of numbers",
        ),
        ({"seconds": [1, 2]}, r"seconds=\[1, 2\], overhead=None: expected arrays of numbers"),
        ({"seconds": np.array(["a", "b"])}, "expected arrays of numbers"),
        ({"seconds": np.ones(2), "overhead": "none"}, "overhead='none': expected arrays of numbers"),
    ],
)
def test_round_without_numbers_raises(given, words):
    with pytest.raises(PacelineError, match=words):
        Round(np.array([0.5, 0.5]), batch=8, **given)
