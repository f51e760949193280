import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

from paceline import PacelineError
from paceline.coded import Empirical, ShiftedExponential, Transmitted, Weibull
from paceline.coded.delay import log1p_gap, shifted_exponential_level


def test_closed_form_equals_lambert_w_from_one_millionth_to_one_thousand():
    """Sun et al., Theorem 1."""
    c = np.logspace(-6, 3, 60)
    with mpmath.workdps(400 + 50):
        exact = [-mpmath.lambertw(-mpmath.exp(-mpmath.mpf(float(x)) - 1), -1) - 1 for x in c]
        expected = np.array([float(mpmath.re(x)) for x in exact])
    np.testing.assert_allclose(shifted_exponential_level(c), expected, rtol=1e-13)


def test_the_paper_s_setting_has_two_thirds_of_the_rows_in_time():
    phi, rate = ShiftedExponential(np.array([3.0]), np.array([1 / 3])).peak()
    assert phi[0] * 3 == pytest.approx(2.14619, abs=1e-5)
    assert rate[0] / 3 == pytest.approx(1 / 3.14619, abs=1e-6)


@pytest.mark.parametrize(
    "delay",
    [
        ShiftedExponential(np.array([2.0, 0.1, 5.0]), np.array([0.3, 4.0, 1e-3])),
        Weibull(np.array([2.0, 0.5, 1.0]), np.array([0.3, 1.0, 0.2]), np.array([0.6, 1.0, 3.0])),
        Transmitted(np.array([2.0, 0.5, 1.0]), np.array([0.3, 1.0, 0.2]), np.array([2.0, 5.0, 0.1])),
    ],
)
def test_peak_is_where_a_search_finds_it(delay):
    phi, rate = delay.peak()
    for i in range(3):
        one = delay.take(np.array([i]))

        def lost(log_z, one=one):
            z = np.exp(np.array([log_z]))
            return -(one.cdf(z) / z)[0]

        found = min(
            (minimize_scalar(lost, bounds=(b, b + 0.5), method="bounded") for b in np.arange(-8, 5, 0.5)),
            key=lambda r: r.fun,
        )
        assert rate[i] == pytest.approx(-found.fun, rel=1e-9)
        assert phi[i] == pytest.approx(np.exp(found.x), rel=1e-3)


@pytest.mark.parametrize(
    "delay",
    [
        ShiftedExponential(np.array([2.0]), np.array([0.3])),
        Weibull(np.array([2.0]), np.array([0.3]), np.array([0.7])),
        Transmitted(np.array([2.0]), np.array([0.3]), np.array([2.0])),
        Empirical(np.array([np.array([0.5, 0.7, 2.0]), None], object)[:1]),
    ],
)
def test_samples_follow_the_distribution_and_its_mean(delay):
    """Sun et al., eq. (1)."""
    draws = delay.sample(np.random.default_rng(0), 200_000)[:, 0]
    assert draws.mean() == pytest.approx(delay.mean()[0], rel=0.02)
    for z in (0.4, 0.65, 0.9, 1.7):
        assert (draws <= z).mean() == pytest.approx(delay.cdf(np.array([z]))[0], abs=0.006)


def test_transmission_of_no_time_is_the_shifted_exponential():
    u, a = np.array([1.0, 3.0]), np.array([0.5, 0.2])
    np.testing.assert_allclose(Transmitted(u, a, u * 1e9).peak(), ShiftedExponential(u, a).peak(), rtol=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_empirical_peak_is_the_best_measurement(times):
    one = np.empty((1,), object)
    one[0] = np.array(times)
    phi, rate = Empirical(one).peak()
    every = [(sum(t <= z for t in times) / len(times)) / z for z in times]
    assert rate[0] == pytest.approx(max(every))
    assert phi[0] in times


def test_one_pair_of_measured_times_can_be_taken():
    every = np.empty((1, 2), object)
    every[0, 0], every[0, 1] = np.array([1.0, 3.0]), np.array([2.0, 4.0, 9.0])
    assert Empirical(every).take((0, 1)).mean() == 5.0
    assert Empirical(every).take(0).mean().tolist() == [2.0, 5.0]


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf, 1e308, 1e-308])
def test_parameters_that_are_not_positive_are_refused(bad):
    with pytest.raises(PacelineError, match="positive, finite"):
        ShiftedExponential(np.array([[1.0, bad]]), np.array([[1.0, 1.0]]))
    with pytest.raises(PacelineError, match="positive, finite"):
        ShiftedExponential(np.array([[1.0, 1.0]]), np.array([[1.0, bad]]))


@pytest.mark.parametrize(
    "delay",
    [
        ShiftedExponential(np.array([2.0, 0.1]), np.array([0.3, 4.0])),
        Weibull(np.array([2.0, 0.5]), np.array([0.3, 1.0]), np.array([2.6, 1.5])),
        Transmitted(np.array([2.0, 0.5]), np.array([0.3, 1.0]), np.array([2.0, 5.0])),
    ],
)
def test_density_is_the_derivative_of_the_distribution_and_zero_before_the_least_time(delay):
    for beyond in (0.1, 0.5, 2.0, 9.0):
        z, step = delay.a + beyond, 1e-6
        slope = (delay.cdf(z + step) - delay.cdf(z - step)) / (2 * step)
        np.testing.assert_allclose(delay.pdf(z), slope, rtol=1e-5, atol=1e-9)
    for early in (1e-3, 0.2, delay.a):
        np.testing.assert_array_equal(delay.pdf(delay.a - early), 0.0)
        np.testing.assert_array_equal(delay.cdf(delay.a - early), 0.0)


def test_density_of_the_shifted_exponential_begins_with_its_rate():
    assert ShiftedExponential(np.array([3.0]), np.array([0.5])).pdf(np.array([0.5])).tolist() == [3.0]
    assert Weibull(*np.ones((3, 1))).pdf(np.array([1.0])).tolist() == [0.0]


def test_distribution_of_measured_times_counts_those_up_to_each_time():
    every = np.empty(2, object)
    every[0], every[1] = np.array([3.0, 1.0]), np.array([2.0, 4.0, 9.0, 9.5])
    delay = Empirical(every)
    assert delay.shape == (2,)
    np.testing.assert_array_equal(delay.cdf(np.array([1.0, 4.0])), [0.5, 0.5])
    np.testing.assert_array_equal(delay.cdf(np.array([[0.9], [9.0]])), [[0, 0], [1, 0.75]])
    phi, rate = delay.peak()  # one of two in 1 ms, and four of four in 9.5 ms
    np.testing.assert_allclose((phi, rate), [[1.0, 2.0], [0.5, 0.125]])
    for wrong in ([], [0.0, 1.0], [np.inf]):
        every[1] = np.array(wrong)
        with pytest.raises(PacelineError, match=r"measured times of pair \(1,\): expected positive"):
            Empirical(every)


def test_gap_of_the_logarithm_does_not_cancel():
    s = np.array([0.0, 1e-8, 1e-3, 0.0999, 0.1, 0.5, 30.0])
    with mpmath.workdps(60):
        exact = [float(mpmath.mpf(float(x)) - mpmath.log1p(mpmath.mpf(float(x)))) for x in s]
    np.testing.assert_allclose(log1p_gap(s), exact, rtol=1e-13)
