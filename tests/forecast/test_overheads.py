"""Overhead and speed told apart, also where the loads follow the measurements."""

import numpy as np
import pytest

from paceline.costs import Linear
from paceline.forecast import overheads
from paceline.shares import water_level

BATCH, N, RUNS = 512, 4, 40
BASE = np.array([1.0, 1.0, 1.0, 4.0]) * 1e-3


def closed_loop(slopes, overhead, noise, rounds, seed=0):
    """Every round's fit, where a balancer divides the batch by the fit of the round before."""
    rng = np.random.default_rng(seed)
    fit, loads, out = overheads.start((RUNS, N)), np.full((RUNS, N), BATCH / N), []
    for t in range(rounds):
        seconds = overhead + slopes(t) * loads * np.exp(noise * rng.standard_normal((RUNS, N)))
        fit = overheads.update(fit, loads, seconds)
        out.append(fit)
        loads = water_level(Linear(fit.seconds_per_sample, fit.overhead), BATCH).loads
    return out


def moving(t):
    slopes = np.full(N, 1e-3)
    slopes[(t // 40) % N] = 4e-3
    return slopes


def test_overhead_is_nothing_until_the_load_has_varied():
    fit = overheads.start((2,))
    for _ in range(5):
        fit = overheads.update(fit, np.array([10.0, 20.0]), np.array([0.11, 0.12]))
    np.testing.assert_array_equal(fit.overhead, 0)
    np.testing.assert_allclose(fit.seconds_per_sample, [0.011, 0.006])


def test_two_loads_separate_overhead_and_speed():
    fit = overheads.start((2,))
    for loads in ([100.0, 100], [50, 200], [100, 100], [50, 200]):
        fit = overheads.update(fit, np.array(loads), 0.02 + 1e-3 * np.array(loads))
    np.testing.assert_allclose(fit.overhead, 0.02, rtol=0.1)
    np.testing.assert_allclose(fit.seconds_per_sample, 1e-3, rtol=0.03)


def test_a_lasting_change_of_speed_is_followed_at_once_and_not_taken_for_overhead():
    for overhead in (0.0, 0.02):
        fits = closed_loop(moving, overhead, 0.0, 200)
        for change in (40, 80, 120, 160):
            np.testing.assert_allclose(
                fits[change].seconds_per_sample * np.ones((RUNS, N)),
                moving(change) * np.ones((RUNS, N)),
                rtol=0.05,
            )
        np.testing.assert_allclose(fits[-1].overhead, overhead, atol=1e-3)


def test_noise_does_not_bias_the_overhead():
    for overhead in (0.0, 0.02):
        fits = closed_loop(moving, overhead, 0.03, 240)
        assert np.median(fits[-1].overhead) == pytest.approx(overhead, abs=3e-3)
        ratio = fits[-1].seconds_per_sample / moving(239)
        assert np.quantile(np.abs(ratio - 1), 0.9) < 0.06


def test_a_drifting_speed_is_not_taken_for_overhead():
    """The balancer keeps every worker's seconds the same as its speed drifts: a regression would see no slope."""
    rng = np.random.default_rng(2)
    path = [np.zeros((RUNS, N))]
    for _ in range(300):
        path.append(0.9 * path[-1] + 0.05 * rng.standard_normal((RUNS, N)))
    fits = closed_loop(lambda t: BASE * np.exp(path[t]), 0.0, 0.0, 300)
    assert np.median(fits[299].overhead) < 0.012  # of a round of 0.157 s
    assert np.median(fits[299].overhead) < np.median(fits[20].overhead) + 2e-3  # and does not grow


def test_a_spike_of_one_round_leaves_both_numbers_as_they_were():
    before = closed_loop(moving, 0.02, 0.01, 100)[-1]
    loads = np.full((RUNS, N), 120.0)
    settled = overheads.update(before, loads, 0.02 + moving(99) * loads)
    spiked = overheads.update(settled, loads, 10 * (0.02 + moving(99) * loads))
    after = overheads.update(spiked, loads, 0.02 + moving(99) * loads)
    np.testing.assert_allclose(after.overhead, settled.overhead, atol=2e-3)
    np.testing.assert_allclose(after.seconds_per_sample, settled.seconds_per_sample, rtol=0.05)


@pytest.mark.parametrize("flat", [0.0, 0.5, 0.85])
@pytest.mark.parametrize("then", [6.0, 8.0, 20.0])
def test_a_spike_does_not_teach_that_there_is_no_overhead(flat, then):
    """The balancer gives less for the spike, and with less load the seconds are the usual ones: what they differ by
    from the spike's says nothing about the overhead."""

    def seconds(load):
        return flat + (1 - flat) * load / 16

    fit = overheads.start((1,))
    for load in (16.0, 17.0, 17.0):
        fit = overheads.update(fit, np.array([load]), np.array([seconds(load)]))
    fit = overheads.update(fit, np.array([17.0]), 3.3 * np.array([seconds(17)]))
    fit = overheads.update(fit, np.array([then]), np.array([seconds(then)]))
    for load in (10.0, 16.0, 12.0, 17.0) * 3:
        fit = overheads.update(fit, np.array([load]), np.array([seconds(load)]))
    assert fit.overhead == pytest.approx(flat, abs=0.05)


def test_absence_and_idleness_teach_nothing():
    fit = overheads.update(overheads.start((3,)), np.array([10.0, 10, 0]), np.array([1.0, np.nan, 0.5]))
    np.testing.assert_array_equal(np.isnan(fit.seconds_per_sample), [False, True, True])
    again = overheads.update(fit, np.array([0.0, 0, 0]), np.array([0.1, np.nan, 0.1]))
    for old, new in zip(fit, again, strict=True):
        np.testing.assert_array_equal(old, new)


def test_what_the_engine_measured_itself_is_left_out():
    known = np.array([0.05])
    fit = overheads.start((1,))
    for load in (100.0, 50.0, 100.0, 50.0):
        fit = overheads.update(fit, np.array([load]), known + 1e-3 * load, known)
    assert fit.overhead == pytest.approx(0, abs=1e-4)
    assert fit.seconds_per_sample == pytest.approx(1e-3, rel=1e-2)


def test_workers_are_fitted_each_by_itself():
    fits = closed_loop(moving, 0.02, 0.05, 60)
    alone = overheads.start((N,))
    rng = np.random.default_rng(0)
    loads = np.full((RUNS, N), BATCH / N)
    for t in range(60):
        seconds = 0.02 + moving(t) * loads * np.exp(0.05 * rng.standard_normal((RUNS, N)))
        alone = overheads.update(alone, loads[7], seconds[7])
        loads = water_level(Linear(fits[t].seconds_per_sample, fits[t].overhead), BATCH).loads
    np.testing.assert_allclose(alone.overhead, fits[-1].overhead[7])


def test_only_the_certain_part_of_an_overhead_counts():
    np.testing.assert_array_equal(overheads.certain(overheads.start((2, 3))), 0)
    for noise, most in ((0.0, 0.021), (0.03, 0.024), (0.1, 0.03)):
        fit = closed_loop(moving, 0.02, noise, 240)[-1]
        least = overheads.certain(fit)
        assert np.all((least >= 0) & (least <= fit.overhead))
        doubt = overheads.DOUBT * np.sqrt(fit.overhead_var)
        np.testing.assert_allclose(least, np.maximum(fit.overhead - doubt, 0))
        assert np.mean(least <= most) > 0.9
    assert np.median(overheads.certain(closed_loop(moving, 0.02, 0.0, 240)[-1])) > 0.018
