import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.costs import (
    Increasing,
    Linear,
    Only,
    Saturating,
    derivative,
    halfway,
    line_through,
    numbers,
    outside,
)
from paceline.errors import PacelineError

N = 3
LINEAR = Linear(np.array([1.0, 2.0, 0.5]), np.array([0.0, 1.0, 4.0]))
GPU = Saturating(
    np.array([1.0, 2.0, 0.5]), np.array([0.0, 1.0, 4.0]), np.full(N, 3.0), np.array([9.0, 8.0, 7.0])
)
CURVED = Increasing(lambda load: np.array([1.0, 2.0, 3.0]) * load**2 + 1, np.full(N, 50.0))
STAIRS = Increasing(lambda load: np.floor(load) + np.array([0.0, 1.0, 2.0]), np.full(N, 50.0))


@pytest.mark.parametrize("cost", [LINEAR, GPU, CURVED, STAIRS], ids=["linear", "gpu", "curved", "stairs"])
@given(seconds=st.floats(0, 40))
def test_load_at_is_the_largest_load_within_the_time(cost, seconds):
    load = cost.load_at(np.array([seconds]))
    assert load.shape == (N,)
    possible = cost.seconds(np.zeros(N)) <= seconds
    assert np.all(load[~possible] == 0)
    assert np.all(cost.seconds(load)[possible] <= seconds * (1 + 1e-12) + 1e-12)
    most = getattr(cost, "most", np.inf)
    more = cost.seconds(np.minimum(load * (1 + 1e-9) + 1e-9, most))
    assert np.all((more > seconds) | (load >= most))


def test_saturating_is_flat_then_linear_then_impossible():
    loads = np.array([[0.0, 3, 8], [3, 4, 7], [9, 8, 7.5]])
    np.testing.assert_array_equal(GPU.seconds(loads), [[3, 7, np.inf], [3, 9, 7.5], [9, 17, np.inf]])
    np.testing.assert_array_equal(GPU.load_at(np.array([2.9])), [0, 0, 0])
    np.testing.assert_array_equal(GPU.load_at(np.array([7.0])), [7, 3, 6])
    np.testing.assert_array_equal(GPU.load_at(np.array([1e9])), [9, 8, 7])


def test_a_worker_that_is_gone_costs_its_overhead_only_without_load():
    gone = Linear(np.array([np.inf, 1.0]), np.array([0.5, 0.5]))
    np.testing.assert_array_equal(gone.seconds(np.array([0.0, 2.0])), [0.5, 2.5])
    np.testing.assert_array_equal(gone.seconds(np.array([1.0, 2.0])), [np.inf, 2.5])
    np.testing.assert_array_equal(gone.load_at(np.array([4.0])), [0, 3.5])


def test_flat_cost_fits_any_load_from_its_overhead_on():
    slope, overhead = np.array([0.0, 0.0, 2.0]), np.full(N, 0.5)
    most = np.finfo(float).max
    flat, limited = Linear(slope, overhead), Saturating(slope, overhead, np.ones(N), np.full(N, 9.0))
    for level in (0.5, np.nextafter(0.5, 1)):
        np.testing.assert_array_equal(flat.load_at(np.array([level]))[:2], most)
        np.testing.assert_array_equal(limited.load_at(np.array([level])), [9, 9, 0])
        np.testing.assert_array_equal(flat.seconds(np.array([most, most, 0])), overhead)
    for cost in (flat, limited):
        np.testing.assert_array_equal(cost.load_at(np.array([np.nextafter(0.5, 0)])), 0)


def test_only_leaves_the_others_out():
    part = Only(LINEAR, np.array([True, False, True]))
    np.testing.assert_array_equal(part.seconds(np.array([1.0, 1.0, 2.0])), [1, np.inf, 5])
    np.testing.assert_array_equal(part.seconds(np.zeros(3)), [0, 1, 4])
    np.testing.assert_array_equal(part.load_at(np.array([5.0])), [5, 0, 2])


def test_derivative_is_that_of_calculus():
    loads = np.array([2.0, 5.0, 7.0])
    np.testing.assert_array_equal(derivative(LINEAR, loads), [1, 2, 0.5])
    np.testing.assert_array_equal(derivative(GPU, loads), [0, 2, 0.5])
    np.testing.assert_array_equal(derivative(GPU, np.full(N, 3.0)), [1, 2, 0.5])  # the knee: the slope above
    np.testing.assert_allclose(derivative(CURVED, loads), np.array([2.0, 4.0, 6.0]) * loads, rtol=1e-9)
    np.testing.assert_array_equal(derivative(Only(GPU, np.array([True, True, False])), loads), [0, 2, 0.5])
    np.testing.assert_allclose(derivative(STAIRS, np.array([2.5, 3.2, 0.0])), 0)
    ended = Increasing(lambda load: np.where(load <= 7, 3 * load, np.inf), np.full(N, 7.0))
    np.testing.assert_allclose(derivative(ended, np.array([0.0, 1.0, 7.0])), 3)  # more than 7 is impossible


@given(low=st.floats(0, 1e300), high=st.floats(0, np.inf))
def test_halfway_ends_between_any_two_floats(low, high):
    low, high = sorted((low, high))
    left, right = np.array([low]), np.array([high])
    for _ in range(64):
        middle = halfway(left, right)
        assert left <= middle <= right
        left = middle
    assert halfway(left, right) == left


def test_line_through_keeps_what_it_cannot_measure():
    loads, seconds = np.array([10.0, 0, 5]), np.array([2.0, 0.5, np.nan])
    slope = line_through(loads, seconds, np.array([1.0, 0.5, 0]), np.array([9.0, 8.0, 7.0]))
    np.testing.assert_allclose(slope, [0.1, 8, 7])


def test_line_through_keeps_growth_that_is_rounding_of_the_seconds():
    """A billionth of the seconds: at 100 s and 0.01 s, 1e-7 s and 1e-11 s."""
    seconds, beyond = np.array([100.0, 100.0, 0.01, 0.01]), np.array([0.5e-7, 2e-7, 0.5e-11, 2e-11])
    slope = line_through(np.full(4, 2.0), seconds, seconds - beyond, -1.0)
    np.testing.assert_allclose(slope, [-1, 1e-7, -1, 1e-11], rtol=1e-3)
    np.testing.assert_array_equal(line_through(np.array([0.0, 1.0]), np.ones(2), np.zeros(2), 7.0), [7, 1])


def test_seconds_outside_of_what_a_clock_measures_are_found():
    seconds = [1e-12, 1e9, 0.9e-12, 1.1e9, 0.0, -1.0, np.nan, np.inf]
    assert outside(seconds).tolist() == [False, False, True, True, True, True, True, True]
    assert outside(seconds, least=0.0).tolist() == [False, False, False, True, False, True, True, True]


def test_numbers_are_floats_not_below_the_least():
    assert numbers("least", [1, 2], "numbers").dtype == np.float64
    assert numbers("least", 3, "a number", least=3.0) == 3.0
    wrong = (([1, "a"], None), (object(), None), ([[1], [1, 2]], None), ([3, 2.9], 3.0), (np.nan, 0.0))
    for given_, least in wrong:
        with pytest.raises(PacelineError, match=r"least=.*: expected numbers"):
            numbers("least", given_, "numbers", least)
    assert np.isnan(numbers("least", np.nan, "a number"))


def test_increasing_cost_is_inverted_to_the_last_bit():
    twice = Increasing(lambda load: 2 * load, np.array([8.0, 4.0, 0.1]))
    np.testing.assert_array_equal(twice.load_at(np.array([8.0])), [4, 4, 0.1])
    np.testing.assert_array_equal(twice.load_at(np.array([[0.0], [16.0]])), [[0, 0, 0], [8, 4, 0.1]])
    flat = Increasing(lambda load: np.full_like(load, 2.0), np.array([5.0]))
    assert flat.load_at(np.array([2.0])) == 5
    assert flat.load_at(np.array([1.9])) == 0


def test_halfway_halves_the_number_of_floats_on_both_sides_of_zero():
    def middle(low, high):
        return halfway(np.array([low]), np.array([high]))[0]

    tiny = np.nextafter(0.0, 1.0)
    assert middle(1.0, 4.0) == 2.0  # as many floats lie in 1 to 2 as in 2 to 4
    assert middle(-4.0, -1.0) == -2.0
    assert middle(-3.0, 3.0) == 0.0
    assert middle(0.0, 2 * tiny) == tiny
    assert middle(tiny, 3 * tiny) == 2 * tiny
    assert middle(-2 * tiny, 0.0) == -tiny
    assert middle(-3 * tiny, -tiny) == -2 * tiny
    assert middle(5.0, 5.0) == 5.0
    assert middle(np.nextafter(1.0, 0.0), 1.0) == np.nextafter(1.0, 0.0)


def test_saturating_derivative_and_possible_loads_have_exact_ends():
    np.testing.assert_array_equal(derivative(GPU, np.full(N, np.nextafter(3.0, 0))), 0)
    np.testing.assert_array_equal(GPU.seconds(np.array([9.0, 8.0, 7.0])), [9, 17, 7.5])
    np.testing.assert_array_equal(GPU.seconds(np.nextafter([9.0, 8.0, 7.0], 10)), np.inf)


def test_numeric_derivative_uses_a_hundred_thousandth_of_the_load_to_each_side():
    """A cost of degree three: ((b + h)^3 - (b - h)^3) / 2 h = 3 b^2 + h^2, with h = 1e-5 b, and 1e-5 below b = 1."""
    cubic = Increasing(lambda load: load**3, np.full(2, 1e9))
    np.testing.assert_allclose(
        derivative(cubic, np.array([1000.0, 2.0])), [3e6 + 1e-4, 12 + 4e-10], rtol=1e-9
    )
    edge = Increasing(lambda load: load**2, np.full(1, 1e9))
    np.testing.assert_allclose(derivative(edge, np.zeros(1)), 1e-5, rtol=1e-9)  # one side alone: h
    np.testing.assert_allclose(derivative(edge, np.array([0.5e-5])), 1.5e-5, rtol=1e-6)  # from 0 to 1.5 h
