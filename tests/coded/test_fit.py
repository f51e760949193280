import numpy as np
import pytest
from scipy.stats import expon, weibull_min

from paceline import PacelineError
from paceline.coded import ShiftedExponential, Weibull, fit, read_times


def times_of(delay, count, rng):
    draws = delay.sample(rng, count)
    kept = np.empty(delay.shape, object)
    for index in np.ndindex(delay.shape):
        kept[index] = draws[(slice(None), *index)]
    return kept


def test_shifted_exponential_equals_scipy_s_maximum_likelihood():
    rng = np.random.default_rng(1)
    times = times_of(ShiftedExponential(np.array([[2.0]]), np.array([[0.4]])), 500, rng)
    found = fit(times)
    location, scale = expon.fit(times[0, 0])
    assert found.delay.a[0, 0] == pytest.approx(location)
    assert found.delay.u[0, 0] == pytest.approx(1 / scale)
    assert found.log_likelihood == pytest.approx(expon.logpdf(times[0, 0], location, scale).sum())


def test_standard_errors_are_the_spread_of_repeated_fits():
    rng = np.random.default_rng(2)
    many = ShiftedExponential(np.full((1, 600), 2.0), np.full((1, 600), 0.4))
    found = fit(times_of(many, 200, rng))
    assert found.delay.u.std() == pytest.approx(found.standard_errors["u"].mean(), rel=0.1)
    assert found.delay.a.std() == pytest.approx(found.standard_errors["a"].mean(), rel=0.15)


def test_cancelled_work_counts_as_longer_than_it_ran():
    rng = np.random.default_rng(3)
    z = 0.5 + rng.exponential(1 / 3, 5000)
    done = z < 0.75
    seen, flags = np.empty((1, 1), object), np.empty((1, 1), object)
    seen[0, 0], flags[0, 0] = np.minimum(z, 0.75), done
    assert fit(seen, finished=flags).delay.u[0, 0] == pytest.approx(3, rel=0.06)
    seen[0, 0] = z[done]
    assert fit(seen).delay.u[0, 0] > 6  # what leaving them out makes of it


@pytest.mark.parametrize("shape", [0.7, 1.5, 3.0])
def test_weibull_recovers_the_distribution_and_matches_scipy_s_likelihood(shape):
    rng = np.random.default_rng(4)
    true = Weibull(np.array([[2.0]]), np.array([[0.4]]), np.array([[shape]]))
    times = times_of(true, 4000, rng)
    found = fit(times, "weibull")
    assert np.abs(found.delay.cdf(z := np.linspace(0.3, 3, 50)) - true.cdf(z)).max() < 0.02
    d = found.delay
    of_scipy = weibull_min.logpdf(times[0, 0], d.k[0, 0], d.a[0, 0], 1 / d.u[0, 0]).sum()
    assert found.log_likelihood == pytest.approx(of_scipy)
    if shape > 1:  # below 1 the likelihood has no maximum, and a is kept off the least time
        assert found.log_likelihood > weibull_min.logpdf(times[0, 0], shape, 0.4, 0.5).sum()


def test_weibull_standard_errors_are_the_spread_of_repeated_fits():
    rng = np.random.default_rng(5)
    many = Weibull(np.full((1, 150), 2.0), np.full((1, 150), 0.4), np.full((1, 150), 0.8))
    found = fit(times_of(many, 400, rng), "weibull")
    for name in ("u", "k"):
        spread = getattr(found.delay, name).std()
        assert spread == pytest.approx(found.standard_errors[name].mean(), rel=0.25)


def test_empirical_keeps_the_measurements():
    times = np.empty((1, 1), object)
    times[0, 0] = [3.0, 1.0, 2.0]
    np.testing.assert_array_equal(fit(times, "empirical").delay.times[0, 0], [1, 2, 3])


def test_times_are_read_fitted_and_normalised_by_their_rows(tmp_path):
    file = tmp_path / "times.csv"
    file.write_text("master,worker,rows,milliseconds\nm,w,10,10\nm,w,20,60\nm,w,1,2\n")
    problem, found = read_times(file, 100)
    assert found.delay.a[0, 0] == 1.0
    assert found.delay.u[0, 0] == pytest.approx(1.0)  # excesses 0, 2, 1
    assert problem.rows[0] == 100


def test_lines_in_any_order_reach_their_pair(tmp_path):
    rng = np.random.default_rng(6)
    lines = [(m, w, r, r * rng.uniform(1, 2)) for m in "xy" for w in "abc" for r in (1, 5, 9)]
    file = tmp_path / "times.csv"
    rng.shuffle(lines)
    file.write_text(
        "master,worker,rows,milliseconds\n" + "\n".join(",".join(map(str, x)) for x in lines) + "\n"
    )
    problem, found = read_times(file, 100, "empirical")
    for m, master in enumerate(problem.masters):
        for n, worker in enumerate(problem.workers):
            mine = sorted(float(t) / int(r) for a, w, r, t in lines if (a, w) == (master, worker))
            np.testing.assert_allclose(found.delay.times[m, n], mine)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m,w,10,10\n", "1 times"),
        ("m,w,10,10\nm,w,20,20\n", "two that differ"),
        ("m,w,10,-1\nm,w,1,1\n", "line 2: milliseconds"),
        ("m,w,0,1\nm,w,1,1\n", "line 2: rows"),
        ("m,w,1,1\nm,w,1,2\nn,v,1,1\nn,v,1,2\n", "no times for master 'm' and worker 'v'"),
        ("", "no lines below"),
    ],
)
def test_bad_times_raise_one_error(tmp_path, text, says):
    file = tmp_path / "times.csv"
    file.write_text("master,worker,rows,milliseconds\n" + text)
    with pytest.raises(PacelineError, match=says):
        read_times(file, 100)


def test_unknown_family_and_cancelled_weibull_are_refused():
    times = np.empty((1, 1), object)
    times[0, 0] = [1.0, 2.0]
    with pytest.raises(PacelineError, match="expected one of"):
        fit(times, "gauss")
    with pytest.raises(PacelineError, match="cancelled"):
        fit(times, "weibull", finished=times)
