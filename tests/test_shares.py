"""Divisions of a batch against brute force, SciPy and cvxpy."""

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from paceline import PacelineError, Plan
from paceline.costs import Increasing, Linear, Saturating
from paceline.shares import project, proportional, water_level, whole_samples
from support.programmes import soonest


@st.composite
def problems(draw, workers=8, batch=300):
    """A linear cost of speeds far apart, a batch, and limits that hold it and often bind."""
    n = draw(st.integers(1, workers))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slopes = 10 ** rng.uniform(-4, 1, n)
    overheads = rng.choice([0.0, 1.0], n) * 10 ** rng.uniform(-3, 1, n)
    total = float(draw(st.integers(n, batch)))
    low = rng.dirichlet(np.ones(n)) * total * rng.choice([0.0, 0.5, 0.99])
    high = np.minimum(low + rng.dirichlet(np.ones(n)) * total * rng.uniform(1, 4), total)
    assume(high.sum() >= total)
    return Linear(slopes, overheads), total, low, high


@given(problem=problems())
def test_water_level_is_the_optimum_of_the_linear_programme(problem):
    cost, total, low, high = problem
    found = water_level(cost, total, low, high)
    assert found.loads.sum() == pytest.approx(total, rel=1e-12)
    assert np.all((found.loads >= low) & (found.loads <= high))
    _, least = soonest(cost.seconds_per_sample, cost.overhead, total, low, high)
    assert cost.seconds(found.loads).max() == pytest.approx(least, rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(problem=problems())
def test_water_level_by_bisection_is_the_same(problem):
    cost, total, low, high = problem
    general = Increasing(cost.seconds, np.full(len(low), total))
    found, exact = water_level(general, total, low, high), water_level(cost, total, low, high)
    np.testing.assert_allclose(found.loads, exact.loads, rtol=1e-6, atol=1e-7 * total)


@given(problem=problems(), guess=st.floats(0, 100))
def test_a_guess_changes_nothing_but_the_way(problem, guess):
    cost, total, low, high = problem
    exact = water_level(cost, total, low, high)
    guessed = water_level(cost, total, low, high, guess=guess)
    np.testing.assert_allclose(guessed.loads, exact.loads, rtol=1e-9, atol=1e-9 * total)


def test_water_level_by_hand():
    found = water_level(Linear(np.array([1.0, 1.0, 4.0]), np.array([0.0, 0.0, 100.0])), 60)
    assert found.seconds == 30
    np.testing.assert_array_equal(found.loads, [30, 30, 0])  # the third would not even start in time
    limited = water_level(Linear(np.ones(3), np.zeros(3)), 60, most=[10, 60, 60])
    np.testing.assert_array_equal(limited.loads, [10, 25, 25])
    knee = Saturating(np.ones(2), np.zeros(2), np.full(2, 5.0), np.full(2, 20.0))
    np.testing.assert_allclose(water_level(knee, 16).loads, [8, 8])
    flat = water_level(knee, 4)  # both need 5 seconds for anything up to 5 samples
    assert flat.loads.sum() == pytest.approx(4)
    assert flat.seconds == 5


def test_row_without_a_worker_that_ends_takes_its_batch():
    alone = Linear(np.array([[np.inf], [1.0], [np.inf]]), np.zeros((3, 1)))
    assert water_level(alone, 145, 72, [[252], [224], [359]]).loads.tolist() == [[145]] * 3
    pair = Linear(np.array([[np.inf, np.inf], [1.0, np.inf]]), np.zeros((2, 2)))
    assert water_level(pair, 4).loads.tolist() == [[2, 2], [4, 0]]


def test_a_million_workers_are_divided_exactly():
    rng = np.random.default_rng(0)
    cost = Linear(rng.uniform(1, 5, 10**6), rng.uniform(0, 20, 10**6))
    found = water_level(cost, 2e6)
    ends = cost.seconds(found.loads)[found.loads > 0]
    np.testing.assert_allclose(ends, found.seconds, rtol=1e-9)
    assert np.all(cost.overhead[found.loads == 0] >= found.seconds)
    assert found.loads.sum() == pytest.approx(2e6, rel=1e-12)


@settings(max_examples=30)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8), st.integers(0, 2**32 - 1))
def test_projection_is_the_nearest_feasible_point(y, seed):
    """The variational inequality that characterises it: (y - x) . (z - x) <= 0 for every feasible z."""
    y = np.array(y)
    rng = np.random.default_rng(seed)
    low = rng.dirichlet(np.ones(len(y))) * rng.choice([0.0, 0.6])
    high = np.minimum(low + rng.dirichlet(np.ones(len(y))) * 2, 1.0)
    assume(high.sum() >= 1)
    x = project(y, low, high)
    assert x.sum() == pytest.approx(1, abs=1e-12)
    assert np.all((x >= low) & (x <= high))
    for towards in np.eye(len(y)):  # the extreme feasible points in many directions
        for sign in (-1, 1):
            noise = rng.standard_normal(len(y))
            goal, limits = sign * towards + 0.1 * noise, np.c_[low, high]
            z = linprog(goal, A_eq=np.ones((1, len(y))), b_eq=[1], bounds=limits).x
            assert (y - x) @ (z - x) <= 1e-7


def test_projection_by_the_papers_formula():
    y = np.random.default_rng(0).standard_normal(30)
    down = np.sort(y)[::-1]
    slack = (np.cumsum(down) - 1) / np.arange(1, 31)
    rho = np.flatnonzero(down - slack > 0).max()
    np.testing.assert_allclose(project(y), np.maximum(y - slack[rho], 0), atol=1e-12)


def test_proportional_cuts_at_the_limits_and_shares_the_rest():
    np.testing.assert_allclose(proportional([1, 1, 2]), [0.25, 0.25, 0.5])
    np.testing.assert_allclose(proportional([1, 1, 2], most=[1, 1, 0.2]), [0.4, 0.4, 0.2])
    np.testing.assert_allclose(proportional([1, 0, 1]), [0.5, 0, 0.5])
    np.testing.assert_allclose(proportional([1, 0, 0], most=[0.4, 1, 1]), [0.4, 0.3, 0.3])
    np.testing.assert_allclose(proportional(np.zeros((2, 4))), np.full((2, 4), 0.25))


class Steps:
    """A step up with every ``width`` samples, so that many samples end together."""

    def __init__(self, slope, overhead, width):
        self.slope, self.overhead, self.width = slope, overhead, width

    def seconds(self, load):
        return self.overhead + self.slope * np.ceil(load / self.width)

    def load_at(self, seconds):
        return np.maximum(self.width * np.floor((seconds - self.overhead) / self.slope), 0.0)


def brute_force(cost, batch, low, high):
    """The least time of all whole divisions."""
    ranges = [range(int(a), int(b) + 1) for a, b in zip(low, high, strict=True)]
    return min(cost.seconds(np.array(b, float)).max() for b in itertools.product(*ranges) if sum(b) == batch)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whole_samples_are_as_quick_as_brute_force(data):
    n = data.draw(st.integers(1, 4))
    numbers = {k: data.draw(st.lists(v, min_size=n, max_size=n)) for k, v in {
        "slope": st.sampled_from([0.1, 0.5, 1.0, 2.0, 3.0]),  # many ties
        "overhead": st.sampled_from([0.0, 1.0, 2.0]),
        "low": st.integers(0, 2),
        "extra": st.integers(0, 7),
    }.items()}  # fmt: skip
    slope, overhead, low, extra = (np.array(v, float) for v in numbers.values())
    high = low + extra
    batch = data.draw(st.integers(int(low.sum()), int(high.sum())))
    for cost in (
        Linear(slope, overhead),
        Saturating(slope, overhead, np.full(n, 2.0), np.full(n, 9.0)),
        Steps(slope, overhead, 3),
    ):
        loads = whole_samples(cost, batch, low, high)
        assert loads.dtype == np.int64
        assert loads.sum() == batch
        assert np.all((loads >= low) & (loads <= high))
        assert cost.seconds(loads.astype(float)).max() <= brute_force(cost, batch, low, high) * (1 + 1e-12)


def one_by_one(cost, batch, low, high):
    """The greedy rule as it stands: one sample at a time, the lowest rank of equals."""
    loads = np.array(low, float)
    while loads.sum() < batch:
        ends = np.where(loads < high, cost.seconds(loads + 1), np.inf)
        loads[np.argmin(ends)] += 1
    return loads


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.booleans())
def test_steps_taken_together_are_the_steps_one_by_one(seed, n, ties):
    rng = np.random.default_rng(seed)
    slope = rng.choice([1.0, 2.0, 4.0], n) if ties else 10 ** rng.uniform(-2, 1, n)
    cost = Linear(slope, rng.choice([0.0, 1.0, 8.0], n))
    batch = int(rng.integers(0, 5 * n))
    low, high = np.zeros(n), np.full(n, float(max(batch, 1)))
    best = one_by_one(cost, batch, low, high)
    np.testing.assert_array_equal(whole_samples(cost, batch), best)
    # A plan's shares are where the search begins, as good as they are.
    near = water_level(cost, batch).loads / batch if batch else np.full(n, 1 / n)
    for shares in (near, np.full(n, 1 / n), rng.dirichlet(np.ones(n))):
        np.testing.assert_array_equal(whole_samples(Plan(shares, costs=cost), batch), best)


def test_whole_samples_of_shares_favour_who_is_least_over_its_share():
    # A second for the first would be 10 to 6.7.
    assert whole_samples(Plan(np.array([0.2, 0.2, 0.6])), 6).tolist() == [1, 1, 4]
    assert whole_samples(Plan(np.array([1.0, 0.0])), 3).tolist() == [3, 0]
    assert whole_samples(Plan(np.full(4, 0.25)), 6).tolist() == [2, 2, 1, 1]  # the lowest ranks of equals
    assert whole_samples(Plan(np.full((2, 2), 0.5)), 3).tolist() == [[2, 1], [2, 1]]


def test_a_short_batch_relaxes_the_least_loads_in_proportion():
    plan = Plan(np.full(3, 1 / 3))
    assert whole_samples(plan, 100, least=[20, 40, 0]).tolist() == [30, 40, 30]
    short = whole_samples(plan, 12, least=[20, 40, 0])
    assert short.sum() == 12
    assert short[0] >= 4
    assert short[1] >= 8
    assert whole_samples(plan, 0, least=[20, 40, 0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("batch", [10, 100])
def test_workers_that_never_end_get_only_what_others_may_not_take(batch):
    gone = Linear(np.array([1.0, np.inf, 1.0]), np.zeros(3))
    some = whole_samples(gone, batch, most=[0.4 * batch, batch, 0.2 * batch])
    np.testing.assert_array_equal(some, [0.4 * batch, 0.4 * batch, 0.2 * batch])
    assert whole_samples(gone, batch).tolist() == [batch / 2, 0, batch / 2]


def test_loads_come_in_units_where_asked():
    cost = Linear(np.array([1.0, 1.0, 4.0]), np.array([0.0, 8.0, 0.0]))
    loads = whole_samples(cost, 64, unit=8)
    assert loads.tolist() == [32, 24, 8]  # ends at 32; the overhead counts in samples, not in units
    with_rest = whole_samples(cost, 67, unit=8)
    assert with_rest.sum() == 67
    assert (with_rest % 8 > 0).sum() == 1
    assert whole_samples(cost, 64, unit=8, most=[20, 64, 64]).tolist() == [16, 40, 8]
    assert whole_samples(Plan(np.full((2, 2), 0.5)), 48, unit=16).tolist() == [[32, 16], [32, 16]]


def test_a_plan_that_gives_nothing_needs_no_least():
    """An absent worker's least load is not forced upon it."""
    assert whole_samples(Plan(np.array([0.0, 0.5, 0.5])), 10, least=[2, 2, 2]).tolist() == [0, 5, 5]


def test_a_hundred_thousand_workers_get_whole_samples():
    rng = np.random.default_rng(0)
    cost = Linear(rng.uniform(1, 5, 10**5), rng.uniform(0, 20, 10**5))
    loads = whole_samples(cost, 777_777)
    assert loads.sum() == 777_777
    end = cost.seconds(loads.astype(float))[loads > 0].max()
    assert np.all(cost.seconds(loads + 1.0) >= end)  # nobody could have taken the last one sooner


TWO = Linear(np.ones(2), np.zeros(2))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: water_level(TWO, 10, most=[3, 4]), "3 of 10 without a place"),
        (lambda: water_level(TWO, 10, least=[6, 7]), "3 more than the 10"),
        (lambda: whole_samples(TWO, 10, most=[3, 4]), "3 of 10 without a place"),
        (lambda: whole_samples(TWO, 14, most=[7, 7], unit=4), "4 of 12 without a"),
        (lambda: water_level([1, 2], 10), r"cost=\[1, 2\]: expected a cost"),
        (lambda: water_level(TWO, "ten"), "batch='ten': expected a number"),
        (lambda: water_level(TWO, 10, "no"), "least='no': expected a number"),
        (lambda: water_level(TWO, 10, 0, "all"), "most='all': expected a number"),
        (lambda: water_level(TWO, 10, [1, 2, 3]), "for each of 2 workers"),
        (lambda: whole_samples([0.5, 0.5], 10), "expected a cost"),
        (lambda: whole_samples(Plan(np.array([0.5, 0.5])), "ten"), "batch='ten': expected a whole number"),
        (lambda: whole_samples(Plan(np.array([0.5, 0.5])), 10, "no"), "least='no': expected a number"),
        (lambda: project("x"), "y='x': expected one number for each worker"),
        (lambda: project([1, 2], [0, 0, 0]), "for each of 2 workers"),
        (lambda: proportional(["a", "b"]), "weights=.*: expected one number for each worker"),
        (lambda: whole_samples(TWO, 3, fewest="two"), "fewest='two': expected a whole number"),
        (lambda: whole_samples(TWO, 3, fewest=0), "fewest=0: expected a whole number"),
    ],
)
def test_what_cannot_be_divided_raises(call, words):
    with pytest.raises(PacelineError, match=words):
        call()


class Counted:
    """Another cost, whose evaluations are counted; the first beyond ``most`` raises."""

    def __init__(self, cost, most):
        self.cost, self.left = cost, most

    def _evaluated(self):
        self.left -= 1
        assert self.left >= 0, "too many evaluations of a cost"

    def seconds(self, load):
        self._evaluated()
        return self.cost.seconds(load)

    def load_at(self, seconds):
        self._evaluated()
        return self.cost.load_at(seconds)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(2, 3))
def test_rows_are_divided_each_by_itself(seed, n, rows):
    rng = np.random.default_rng(seed)
    shape = (rows, n)
    slope, overhead = 10 ** rng.uniform(-2, 1, shape), rng.choice([0.0, 1.0, 30.0], shape)
    batch = int(rng.integers(1, 400))
    low = np.floor(rng.dirichlet(np.ones(n), rows) * batch * rng.choice([0.0, 0.9]))
    high = low + rng.integers(0, 400, shape) + batch // n + 1
    for kind, more in ((Linear, ()), (Steps, (3,)), (Steps, (90,))):
        together, alone = (
            kind(slope, overhead, *more),
            [kind(*each, *more) for each in zip(slope, overhead, strict=True)],
        )
        level, whole = water_level(together, batch, low, high), whole_samples(together, batch, low, high)
        units = whole_samples(together, batch, unit=4)
        for row, cost in enumerate(alone):
            found = water_level(cost, batch, low[row], high[row])
            np.testing.assert_allclose(level.loads[row], found.loads, rtol=1e-9, atol=1e-9)
            assert level.seconds[row] == pytest.approx(found.seconds, rel=1e-9)
            assert whole[row].tolist() == whole_samples(cost, batch, low[row], high[row]).tolist()
            assert units[row].tolist() == whole_samples(cost, batch, unit=4).tolist()
    weights = rng.integers(0, 3, shape)
    part_low, part_high = rng.dirichlet(np.ones(n), rows) * 0.5, rng.uniform(0.6, 1, shape)
    parts, near = proportional(weights, part_low, part_high), project(slope, part_low, part_high)
    plan = whole_samples(Plan(parts), batch)
    for row in range(rows):
        alone = proportional(weights[row], part_low[row], part_high[row])
        np.testing.assert_allclose(parts[row], alone, rtol=1e-9, atol=1e-12)
        alone = project(slope[row], part_low[row], part_high[row])
        np.testing.assert_allclose(near[row], alone, rtol=1e-9, atol=1e-12)
        assert plan[row].tolist() == whole_samples(Plan(parts[row]), batch).tolist()


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.sampled_from([3, 40, 200]), st.booleans())
def test_samples_that_end_together_go_to_the_lowest_ranks(seed, n, width, plain):
    """Against the greedy rule, one sample at a time, with a thousand samples in few steps of the cost."""
    rng = np.random.default_rng(seed)
    cost = Steps(rng.choice([1.0, 2.0, 4.0], n), rng.choice([0.0, 1.0, 8.0], n), width)
    batch = int(rng.integers(0, 1000))
    low = np.zeros(n) if plain else np.floor(rng.dirichlet(np.ones(n)) * batch * 0.5)
    more = batch if plain else rng.integers(0, 2 * batch // n + 2, n)
    high = np.minimum(low + more, batch)
    assume(high.sum() >= batch)
    found = whole_samples(cost, batch, low, high)
    assert found.tolist() == one_by_one(cost, batch, low, high).tolist()


@pytest.mark.parametrize(
    ("cost", "most"),
    [
        (Linear(np.array([1.0, 2.0, 3.0, 5.0]), np.array([0.0, 4.0, 0.0, 1e5])), 100),
        (Linear(np.array([0.0, 0.0, 1.0, 1.0]), np.zeros(4)), 400),
        (Steps(np.array([1.0, 2.0, 3.0, 5.0]), np.zeros(4), 3), 100),
        (Steps(np.array([1.0, 2.0, 3.0, 5.0]), np.zeros(4), 50_000), 100),
        (Steps(np.ones(4), np.zeros(4), 10**7), 100),
        (Steps(np.ones((3, 4)), np.array([[0.0], [1.0], [2.0]]), np.array([[3], [1000], [10**7]])), 270),
    ],
)
def test_a_million_samples_need_few_evaluations_of_the_cost(cost, most):
    loads = whole_samples(Counted(cost, most), 10**6)
    assert (loads.sum(-1) == 10**6).all()
    low, high = np.array([0.0, 5e5, 0.0, 0.0]), np.array([3e5, 6e5, 2e5, 1e6])
    loads = whole_samples(Counted(cost, most), 10**6, low, high)
    assert ((loads >= low) & (loads <= high)).all()
    end = cost.seconds(loads.astype(float)).max(-1, keepdims=True)
    ends_with = np.where(loads < high, cost.seconds(loads + 1.0), np.inf)
    assert ((ends_with >= end) | (loads == 0)).all() or cost.seconds(low).max() >= end.min()


def test_samples_left_for_a_thousand_workers_need_few_evaluations_of_the_cost():
    rng = np.random.default_rng(0)
    cost = Linear(rng.uniform(1, 5, 1000), rng.uniform(0, 20, 1000))
    assert whole_samples(Counted(cost, 100), 10**6).sum() == 10**6


def test_samples_of_which_all_take_no_time_go_to_the_worker_that_begins_first():
    cost = Linear(np.zeros(2), np.array([1.0, 0.0]))
    assert whole_samples(cost, 100, least=[20, 10], most=[100, 85]).tolist() == [20, 80]


@pytest.mark.parametrize(
    ("loads", "fewest", "moved"),
    [
        ([1, 5, 2], 1, [1, 5, 2]),
        ([0, 0, 0], 2, [0, 0, 0]),
        ([1, 5, 2], 2, [0, 6, 2]),
        ([2, 5, 2], 2, [2, 5, 2]),
        ([1, 5, 2], 3, [0, 8, 0]),
        ([5, 1, 5], 2, [6, 0, 5]),
        ([0, 1, 1], 2, [0, 2, 0]),
        ([0, 1, 0], 2, [0, 1, 0]),
    ],
)
def test_loads_below_the_fewest_go_to_the_largest_load(loads, fewest, moved):
    cost = Linear(np.ones(len(loads)), np.zeros(len(loads)))
    assert whole_samples(cost, sum(loads), loads, loads, fewest=fewest).tolist() == moved
    two = whole_samples(cost, sum(loads), [loads, loads[::-1]], [loads, loads[::-1]], fewest=fewest)
    assert [each.sum() for each in two] == [sum(loads)] * 2
    assert two[0].tolist() == moved


def test_least_loads_that_exceed_a_batch_of_one_sample_shrink():
    assert whole_samples(Plan(np.array([0.5, 0.5])), 1, least=[1, 1]).tolist() == [1, 0]
    assert whole_samples(Plan(np.array([0.4, 0.6])), 3, least=[2, 2]).tolist() == [1, 2]


def test_level_is_the_earliest_at_which_the_batch_is_done():
    assert water_level(Steps(np.ones(2), np.zeros(2), 3), 6).seconds == 1
    assert water_level(Steps(np.ones(2), np.zeros(2), 3), 7).seconds == 2
    assert water_level(Steps(np.array([1.0, 2.0]), np.zeros(2), 3), 9).seconds == 2


def test_portion_of_a_worker_without_weight_is_exactly_its_least():
    assert proportional([1, 0]).tolist() == [1, 0]
    assert proportional([0, 3, 0], least=[0.1, 0, 0.2]).tolist() == pytest.approx([0.1, 0.7, 0.2])
    assert proportional([1, 1, 0], most=[0.5, 0.5, 1]).tolist() == [0.5, 0.5, 0]


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.booleans())
def test_speeds_far_apart_divide_the_whole_batch(seed, n, limited):
    rng = np.random.default_rng(seed)
    slopes = 10 ** rng.uniform(-14, 9, n) * rng.choice([1.0, np.inf], n, p=[0.9, 0.1])
    cost = Linear(slopes, rng.choice([0.0, 1.0], n) * 10 ** rng.uniform(-9, 9, n))
    total = float(10 ** rng.uniform(0, 6))
    low = rng.dirichlet(np.ones(n)) * total * rng.choice([0.0, 0.5]) * limited
    high = np.minimum(low + rng.dirichlet(np.ones(n)) * total * 2, total) if limited else np.full(n, total)
    assume(high.sum() >= total)
    found = water_level(cost, total, low, high)
    assert found.loads.sum() == pytest.approx(total, rel=1e-9)
    assert ((found.loads >= low * (1 - 1e-12)) & (found.loads <= high * (1 + 1e-12))).all()
    whole = whole_samples(cost, int(total))
    assert whole.sum() == int(total)
