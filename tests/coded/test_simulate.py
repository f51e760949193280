import dataclasses
import itertools
import sys

import numpy as np
import pytest
from scipy import stats

from paceline import PacelineError
from paceline.coded import plan, random_problem
from paceline.coded.coded_plan import finish
from paceline.coded.deadline import never_done
from paceline.coded.simulate import Completion, simulate, stretched, work_queue
from support.problems import problem_of


def test_one_worker_is_a_shifted_exponential():
    made = plan(problem_of([[2.0]], rows=100.0), "uniform", coded=False)
    done = simulate(made, 50_000, np.random.default_rng(0))
    assert done.mean().low < 100 * (0.5 + 0.5) < done.mean().high
    assert done.quantile(0.9).low < 100 * (0.5 + np.log(10) / 2) < done.quantile(0.9).high
    at = done.probability(120.0)
    assert at.low < 1 - np.exp(-2 * (1.2 - 0.5)) < at.high


def test_coded_completion_is_enumerated_by_hand():
    """Against P[done by t] as a sum over the sets of workers whose loads reach L."""
    problem = random_problem(1, 6, 60, np.random.default_rng(1))
    made = plan(problem)
    t = made.t_star[0] * 1.2
    loads = made.rows_assigned[0]
    chance = problem.delay.cdf(t / loads[None])[0]
    expected = sum(
        np.prod(np.where(arrived, chance, 1 - chance))
        for arrived in itertools.product([False, True], repeat=6)
        if loads[list(arrived)].sum() >= 60
    )
    found = simulate(made, 100_000, np.random.default_rng(2)).probability(t)
    assert found.low < expected < found.high


def test_probabilistic_draws_may_never_finish():
    """k = 1/2 everywhere: the probability that the workers drawn hold too few rows, by enumeration."""
    problem = random_problem(2, 8, 1000, np.random.default_rng(3))
    phi, rate = problem.delay.peak()
    made = finish(problem, "even", np.full((2, 8), 0.5), True, phi, rate)
    loads = made.rows_assigned[0]
    never = np.mean([loads[list(drawn)].sum() < 1000 for drawn in itertools.product([False, True], repeat=8)])
    assert never_done(made)[0] == pytest.approx(never)
    found = simulate(made, 100_000, np.random.default_rng(4))
    assert found.never(0) == pytest.approx(never, abs=0.005)
    assert found.mean(0).value == np.inf
    assert np.isfinite(found.quantile(0.5, 0).value)


def test_a_drawn_worker_serves_one_master_only():
    problem = problem_of(np.ones((2, 2)), rows=1.0)
    phi, rate = problem.delay.peak()
    k = np.array([[1.0, 0.5], [0.0, 0.5]])
    made = finish(problem, "shared", k, True, phi, rate)
    assert made.rows_assigned[1, 1] >= 1
    found = simulate(made, 40_000, np.random.default_rng(5))
    assert found.never(1) == pytest.approx(0.5, abs=0.01)  # master y waits for w alone


@pytest.mark.parametrize("assign", ["uniform", "iterated"])
def test_parts_as_they_arrive_come_between_the_whole_loads_and_the_work_queue(assign):
    made = plan(random_problem(2, 12, 20_000, np.random.default_rng(6)), assign)
    means = [simulate(made, 4000, np.random.default_rng(7), messages=m).mean().value for m in (1, 4, 64)]
    assert means[0] > means[1] > means[2] > work_queue(made, 4000, np.random.default_rng(7)).mean().value


def test_the_reference_figures_of_the_large_setting():
    """4 x 50, u in [1, 5]: mean system time in s of an independent reference over 20 draws.

    Sun et al., Fig. 3.
    """
    expected = {"uncoded": 24.4, "uniform": 11.0, "simple": 7.66, "iterated": 7.60, "probabilistic": 7.59}
    means = {name: [] for name in expected}
    for seed in range(20):
        problem = random_problem(4, 50, 1e5, np.random.default_rng([9, seed]))
        for name in expected:
            made = plan(problem, "uniform", coded=False) if name == "uncoded" else plan(problem, name)
            means[name].append(simulate(made, 2000, np.random.default_rng(seed)).mean().value / 1000)
    for name, value in expected.items():
        spread = np.std(means[name], ddof=1) / np.sqrt(20)
        assert abs(np.mean(means[name]) - value) < 4 * spread * np.sqrt(2)  # both are means of 20 draws


def test_latency_comes_once_a_message():
    problem = problem_of([[2.0, 2.0]], rows=100.0, latency=np.array([[30.0, 30.0]]))
    bare = dataclasses.replace(problem, latency=None)
    for coded, messages in ((False, 1), (True, 1), (True, 4)):
        made = finish(bare, "uniform", np.ones((1, 2)), coded, *bare.delay.peak())
        late, plain = (
            simulate(dataclasses.replace(made, problem=each), 500, np.random.default_rng(0), messages).times
            for each in (problem, bare)
        )
        np.testing.assert_allclose(late, plain + 30)


def test_drawing_in_parts_changes_nothing_but_the_draws(monkeypatch):
    made = plan(random_problem(2, 10, 1000, np.random.default_rng(0)))
    whole = simulate(made, 20_000, np.random.default_rng(1)).mean()
    monkeypatch.setattr(sys.modules["paceline.coded.simulate"], "CHUNK", 1000)
    parts = simulate(made, 20_000, np.random.default_rng(1)).mean()
    assert abs(parts.value - whole.value) < 2 * (whole.high - whole.low)


def test_quantile_intervals_have_their_coverage():
    rng = np.random.default_rng(8)
    held = 0
    for _ in range(400):
        q = Completion(rng.exponential(size=(500, 1))).quantile(0.8)
        held += q.low <= -np.log(0.2) <= q.high
    assert held >= 400 * 0.92


def test_same_seed_same_times():
    made = plan(random_problem(2, 6, 100, np.random.default_rng(0)), "probabilistic")
    first, second = (simulate(made, 100, np.random.default_rng(1)).times for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_cdf_ends_at_one_and_bad_numbers_are_refused():
    made = plan(random_problem(1, 3, 10, np.random.default_rng(0)))
    done = simulate(made, 1000, np.random.default_rng(0))
    t, portion = done.cdf(50)
    assert portion[-1] == 1
    assert (np.diff(t) >= 0).all()
    with pytest.raises(PacelineError, match="runs=0: expected a whole number, 1 to"):
        simulate(made, 0, np.random.default_rng(0))
    with pytest.raises(PacelineError, match=r"q=1\.5: expected a portion between 0 and 1"):
        done.quantile(1.5)


def test_mean_has_the_normal_interval_of_its_runs():
    times = np.array([[1.0, 5.0], [2.0, 4.0], [6.0, 3.0]])
    done = Completion(times)
    assert done.system.tolist() == [5.0, 4.0, 6.0]
    for master, each in ((None, [5.0, 4.0, 6.0]), (0, [1.0, 2.0, 6.0]), (1, [5.0, 4.0, 3.0])):
        low, high = stats.norm.interval(0.95, np.mean(each), stats.sem(each))
        assert tuple(done.mean(master)) == pytest.approx((np.mean(each), low, high), abs=1e-6)
    two = Completion(times[:2, :1]).mean()
    assert two.high == pytest.approx(1.5 + 1.959964 * 0.5)
    assert tuple(Completion(times[:1]).mean()) == (5.0, -np.inf, np.inf)
    late = Completion(np.array([[1.0, np.inf], [2.0, 4.0]]))
    assert tuple(late.mean()) == (np.inf,) * 3
    assert (late.never(), late.never(0), late.never(1)) == (0.5, 0.0, 0.5)
    assert done.probability(5.0).value == pytest.approx(2 / 3)
    t, portion = done.cdf(2)
    assert (t.tolist(), portion.tolist()) == ([4.0, 6.0], [1 / 3, 1.0])


def stretch(loads, probability=None, **options):
    made = plan(random_problem(1, 3, 10, np.random.default_rng(0)))
    given = np.ones((1, 3)) if probability is None else np.array([probability])
    made = dataclasses.replace(made, loads=np.array([loads], float), probability=given)
    return stretched(made, **options)


@pytest.mark.parametrize(
    ("loads", "options", "found"),
    [
        ([6, 4, 2], {"redundancy": 1.8}, [9, 6, 3]),
        ([6, 4, 2], {"redundancy": 1.0}, [5, 10 / 3, 5 / 3]),
        ([6, 4, 2], {"redundancy": 2.4}, [10, 28 / 3, 14 / 3]),  # at most L rows for each
        ([6, 4, 0], {"redundancy": 2.0}, [10, 10, 0]),
        ([6, 4, 2], {"survive": 1}, [10, 20 / 3, 10 / 3]),  # without the largest, the others hold 10
        ([6, 4, 2], {"survive": 2}, [10, 10, 10]),
        ([9, 9, 9], {"survive": 1}, [9, 9, 9]),  # they hold enough, and none is taken from them
        ([6, 4, 2], {}, [6, 4, 2]),
        ([6, 4, 2], {"redundancy": 1.0, "survive": 1}, [10, 20 / 3, 10 / 3]),
    ],
)
def test_stretched_loads_by_hand(loads, options, found):
    made = stretch(loads, **options)
    assert made.loads[0].tolist() == pytest.approx(found, rel=1e-9)
    assert made.survive == options.get("survive", 0)


def test_plans_are_stretched_only_as_far_as_workers_can_hold():
    for options, words in (
        ({"redundancy": 0.99}, "redundancy=0.99: expected at least 1"),
        ({"redundancy": np.inf}, "redundancy=inf: expected at least 1"),
        ({"redundancy": 3.1}, "redundancy=3.1: master 'master0' has 3 workers of at most L rows each"),
        ({"survive": 3}, "survive=3: master 'master0' has 3 workers"),
        ({"survive": -1}, "survive=-1"),
        ({"survive": 1, "probability": [0.5, 1, 1]}, "only dedicated workers may be lost"),
    ):
        with pytest.raises(PacelineError, match=words):
            stretch([6, 4, 2], **options)
    drawn = [0.5, 1, 1]
    assert stretch([6, 4, 2], redundancy=1.5, probability=drawn).loads[0] @ drawn == pytest.approx(15)
    uncoded = plan(random_problem(1, 3, 10, np.random.default_rng(0)), "uniform", coded=False)
    with pytest.raises(PacelineError, match="only a coded plan can be stretched"):
        stretched(uncoded, 1.5)
