import numpy as np
import pytest

from paceline import Cluster, PacelineError, Round


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
        ({"workers": 2, "global_batch": 10, "least": [6, 7]}, "3 more than the global batch of 10"),
        ({"workers": 2, "global_batch": 10, "most": [3, 4]}, "3 short of the global batch of 10"),
        ({"workers": 2, "global_batch": 10, "least": [0, 5], "most": [10, 4]}, "worker 1: least 5, most 4"),
        ({"workers": 2, "global_batch": 10, "least": [np.nan, 0]}, "worker 0"),
        ({"workers": 2, "global_batch": 10, "least": [-1, 0]}, "worker 0: least -1"),
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


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"seconds": [1, 2]}, r"seconds=\[1, 2\], overhead=None: expected arrays of numbers"),
        ({"seconds": np.array(["a", "b"])}, "expected arrays of numbers"),
        ({"seconds": np.ones(2), "overhead": "none"}, "overhead='none': expected arrays of numbers"),
    ],
)
def test_round_without_numbers_raises(given, words):
    with pytest.raises(PacelineError, match=words):
        Round(np.array([0.5, 0.5]), batch=8, **given)
