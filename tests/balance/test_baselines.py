"""OGD, ABS and LB-BSP's small steps: what DOLBIE's paper holds against them, and what it does not say."""

import numpy as np
import pytest

from paceline import Cluster, Round, policies
from paceline.costs import Increasing, Linear
from paceline.errors import PacelineError

from .streams import constant, drifting, play

BATCH = 120


def test_ogd_takes_a_step_along_the_stragglers_slope_and_projects():
    slopes = np.array([1e-3, 3e-3, 1e-3])
    policy = policies.create("ogd:rate=0.1", Cluster(3, BATCH))
    plan, state = policy.init()
    plan, state = policy.step(state, Round(plan.shares, slopes * 40, BATCH))
    taken = 0.1 * 3e-3 * BATCH  # beta times the seconds of the whole batch
    np.testing.assert_allclose(plan.shares, [1 / 3 + taken / 3, 1 / 3 - taken * 2 / 3, 1 / 3 + taken / 3])


def test_ogd_takes_the_derivative_of_a_curved_cost():
    """Of 40 samples, b^2 c takes 1600 c seconds: the secant is 40 c a sample, the derivative 80 c."""
    c = np.array([1e-4, 3e-4, 1e-4])
    cost = Increasing(lambda b: c * b**2, np.full(3, float(BATCH)))
    policy = policies.create("ogd:rate=0.05", Cluster(3, BATCH))
    plan, state = policy.init()
    plan, _ = policy.step(state, Round(plan.shares, 1600 * c, BATCH, costs=cost))
    taken = 0.05 * 80 * 3e-4 * BATCH
    np.testing.assert_allclose(plan.shares, [1 / 3 + taken / 3, 1 / 3 - taken * 2 / 3, 1 / 3 + taken / 3])
    assert plan.shares[1] == pytest.approx(0.3333 - 0.096, abs=1e-4)


@pytest.mark.parametrize("known", [True, False])
def test_ogd_stays_if_the_straggler_takes_only_its_overhead(known):
    cost = Linear(np.array([1e-3, 0.0, 2e-3]), np.array([0.0, 1.0, 0.0]))
    policy = policies.create("ogd:rate=0.1", Cluster(3, BATCH))
    plan, state = policy.init()
    seconds = cost.seconds(plan.shares * BATCH)
    told = Round(plan.shares, seconds, BATCH, cost.overhead, costs=cost if known else None)
    plan, _ = policy.step(state, told)
    np.testing.assert_allclose(plan.shares, 1 / 3)


def test_ogd_never_leaves_the_simplex_even_with_a_huge_step():
    costs = constant([1.0, 3.0, 2.0], 0.0, 50)
    _, played, _, _ = play("ogd:rate=100", costs, BATCH)
    assert played.min() >= 0
    np.testing.assert_allclose(played.sum(-1), BATCH)


def test_abs_read_literally_is_a_two_cycle():
    """Without communication: equal shares, shares by speed, equal shares again, a window each."""
    slopes = np.array([1e-3, 2e-3, 4e-3])
    _, played, _, _ = play("abs", constant(slopes, 0.0, 40), BATCH)
    by_speed = BATCH / slopes / (1 / slopes).sum()
    for start in range(0, 40, 10):
        np.testing.assert_allclose(played[start : start + 5], np.full((5, 3), 40.0))
        np.testing.assert_allclose(played[start + 5 : start + 10], np.tile(by_speed, (5, 1)))


def test_abs_read_sensibly_settles_after_one_window():
    slopes = np.array([1e-3, 2e-3, 4e-3])
    _, played, _, _ = play("abs:reading=share,window=3", constant(slopes, 0.0, 40), BATCH)
    by_speed = BATCH / slopes / (1 / slopes).sum()
    np.testing.assert_allclose(played[:3], np.full((3, 3), 40.0))
    np.testing.assert_allclose(played[3:], np.tile(by_speed, (37, 1)))


def test_abs_read_sensibly_beats_dolbie_and_itself_read_literally():
    costs = drifting(100, realizations=10)
    literal, sensible, dolbie = (play(p, costs, 256)[0] for p in ("abs", "abs:reading=share", "dolbie"))
    assert sensible < dolbie
    assert sensible < literal


def moves(text, seconds, workers=3):
    """Loads after each round in which everybody takes the given seconds, whatever its load."""
    policy = policies.create(text, Cluster(workers, BATCH))
    plan, state = policy.init()
    out = []
    for row in seconds:
        plan, state = policy.step(state, Round(plan.shares, np.array(row, float), BATCH))
        out.append(plan.shares * BATCH)
    return np.array(out)


SLOWEST_LAST, EVEN = [1, 2, 3], [40, 40, 40]


@pytest.mark.parametrize(
    ("text", "seconds", "expected"),
    [
        # Five samples after five rounds by default; the count starts again after each move.
        ("lbbsp", [SLOWEST_LAST] * 6, [EVEN] * 4 + [[45, 40, 35]] * 2),
        ("lbbsp:delta=5,rounds=3", [SLOWEST_LAST] * 7, [EVEN] * 2 + [[45, 40, 35]] * 3 + [[50, 40, 30]] * 2),
        # What is not there cannot be taken.
        ("lbbsp:delta=30,rounds=1", [SLOWEST_LAST] * 3, [[70, 40, 10], [80, 40, 0], [80, 40, 0]]),
        # Only rounds in which somebody precedes count; read strictly, those in which the same one does.
        (
            "lbbsp:rounds=3",
            [SLOWEST_LAST] * 2 + [[2, 2, 2]] + [SLOWEST_LAST] * 3,
            [EVEN] * 5 + [[45, 40, 35]],
        ),
        ("lbbsp:rounds=3,reading=strict", [SLOWEST_LAST] * 2 + [[2, 1, 3]] * 3, [EVEN] * 4 + [[40, 45, 35]]),
        ("lbbsp:rounds=1", [[2, 2, 2]] * 4, [EVEN] * 4),
        ("lbbsp:rounds=1", [[1, 1 + 1e-12, 1]] * 3, [EVEN] * 3),  # they differ by rounding
        ("lbbsp:rounds=1", [[1, 1 + 1e-6, 1]], [[45, 35, 40]]),
    ],
)
def test_lbbsp_moves_samples_after_so_many_rounds(text, seconds, expected):
    np.testing.assert_allclose(moves(text, seconds), expected, atol=1e-12)


def test_lbbsp_read_strictly_waits_for_the_same_worker_to_stay_fastest():
    alternating = [[1, 2, 3], [2, 1, 3]] * 5
    assert moves("lbbsp:reading=strict", alternating)[-1].tolist() == pytest.approx([40, 40, 40])
    loose = moves("lbbsp:reading=loose", alternating)[-1]
    assert loose[2] == pytest.approx(30)
    steady = [[1, 2, 3]] * 10
    np.testing.assert_allclose(moves("lbbsp:reading=strict", steady)[-1], moves("lbbsp", steady)[-1])


def test_lbbsp_moves_within_the_limits_of_both_workers():
    for limits, expected in (({"most": [42, 120, 120]}, [42, 40, 38]), ({"least": [0, 0, 37]}, [43, 40, 37])):
        policy = policies.create("lbbsp:rounds=1", Cluster(3, BATCH, **limits))
        plan, state = policy.init()
        plan, _ = policy.step(state, Round(plan.shares, np.array([1.0, 2, 3]), BATCH))
        np.testing.assert_allclose(plan.shares * BATCH, expected)


def test_lbbsp_moves_nothing_to_or_from_a_worker_that_is_away():
    policy = policies.create("lbbsp:rounds=1", Cluster(4, BATCH))
    plan, state = policy.init()
    plan, state = policy.step(state, Round(plan.shares, np.array([np.nan, 1.0, 2, 3]), BATCH))
    np.testing.assert_allclose(plan.shares * BATCH, [0, 45, 40, 35])
    np.testing.assert_allclose(state.shares * BATCH, [30, 33.75, 30, 26.25])  # of the 90 that were theirs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lbbsp:delta=0", "expected a positive number of samples"),
        ("lbbsp:rounds=0", "rounds=0"),
        ("lbbsp:reading=other", "reading=other: expected one of loose, strict"),
        ("abs:window=0", "window=0"),
        ("abs:reading=other", "reading=other: expected one of inverse, share"),
        ("ogd:rate=0", "rate=0"),
    ],
)
def test_baselines_with_values_that_make_no_sense_raise(text, words):
    with pytest.raises(PacelineError, match=words):
        policies.create(text, Cluster(3, BATCH))


def windows(text, rounds, shares=None):
    """The plan and the state after rounds of these seconds, each with a third of the batch for each worker."""
    policy = policies.create(text, Cluster(3, BATCH))
    _, state = policy.init()
    for seconds in rounds:
        ran = np.full(3, 1 / 3) if shares is None else np.array(shares)
        plan, state = policy.step(state, Round(ran, np.array(seconds, float), BATCH))
    return plan.shares, state


@pytest.mark.parametrize(
    ("reading", "rounds", "expected"),
    [
        ("share", [[0.04, 0.08, 0.16], [0.04, np.nan, 0.16]], [4 / 7, 2 / 7, 1 / 7]),
        ("inverse", [[0.04, 0.08, 0.16], [0.04, np.nan, 0.16]], [4 / 7, 2 / 7, 1 / 7]),
        ("share", [[0.04, 0.08, np.nan]] * 2, [2 / 4, 1 / 4, 1 / 4]),  # as much as the slowest
        ("inverse", [[0.04, 0.08, 0.0]] * 2, [2 / 4, 1 / 4, 1 / 4]),  # no time is no measurement
        ("share", [[0.0, 0.0, 0.0]] * 2, [1 / 3] * 3),
    ],
)
def test_abs_divides_by_the_rounds_in_which_each_worker_was_measured(reading, rounds, expected):
    _, state = windows(f"abs:window=2,reading={reading}", rounds)
    np.testing.assert_allclose(state.shares, expected)
    assert (state.age, state.reports.sum(), state.seconds.sum(), state.loads.sum()) == (0, 0, 0, 0)


def test_abs_leaves_out_seconds_without_a_load_and_plans_for_those_present():
    _, state = windows("abs:window=1", [[1.0, 2.0, 9.0]], shares=[0.5, 0.5, 0.0])
    np.testing.assert_allclose(state.shares, [2 / 4, 1 / 4, 1 / 4])
    plan, state = windows("abs:window=1", [[1.0, 2.0, np.nan]])
    np.testing.assert_allclose(plan, [2 / 3, 1 / 3, 0])
    np.testing.assert_allclose(state.shares, [2 / 4, 1 / 4, 1 / 4])


def test_ogd_has_the_papers_step_and_takes_the_straggler_among_those_present():
    assert policies.create("ogd", Cluster(3, BATCH)).rate == 0.001
    policy = policies.create("ogd:rate=0.1", Cluster(3, BATCH))
    plan, state = policy.init()
    plan, state = policy.step(state, Round(plan.shares, np.array([np.nan, 0.04, 0.08]), BATCH))
    taken = 0.1 * 2e-3 * BATCH  # of half of the batch
    np.testing.assert_allclose(plan.shares, [0.0, 0.5 + taken / 2, 0.5 - taken / 2])
    np.testing.assert_allclose(state.shares, [1 / 3, (1 + taken) / 3, (1 - taken) / 3])


def test_oracle_keeps_to_the_limits_and_says_what_it_expects():
    policy = policies.create("optimum", Cluster(3, 70, least=[0, 0, 16], most=[30, 70, 70]))
    assert policy.needs_upcoming
    cost = Linear(np.array([1e-3, 2e-3, 4e-3]), np.zeros(3))
    plan = policy.plan(cost)
    np.testing.assert_allclose(plan.shares * 70, [30, 24, 16])
    assert plan.costs is cost
    part = policy.plan(cost, np.array([True, True, False]))
    np.testing.assert_allclose(part.shares * 70, [30, 40, 0])
    np.testing.assert_array_equal(part.costs.seconds(np.ones(3)), [1e-3, 2e-3, np.inf])


def test_abs_sums_its_window():
    _, state = windows("abs:window=3", [[1.0, 2.0, 3.0], [1.0, np.nan, 3.0]])
    np.testing.assert_allclose(state.seconds, [2, 2, 6])
    np.testing.assert_allclose(state.loads, [80, 40, 80])
    np.testing.assert_array_equal(state.reports, [2, 1, 2])
    assert state.age == 2
    assert policies.create("abs", Cluster(3, BATCH)).window == 5


def test_equal_divides_among_those_present():
    """DOLBIE, baseline EQU."""
    policy = policies.create("equal", Cluster(3, BATCH, most=[20, 120, 120]))
    plan, state = policy.init()
    np.testing.assert_allclose(plan.shares * BATCH, [20, 50, 50])
    plan, state = policy.step(state, Round(plan.shares, np.array([1.0, np.nan, 3.0]), BATCH))
    np.testing.assert_allclose(plan.shares * BATCH, [20, 0, 100])
    plan, _ = policy.step(state, Round(plan.shares, np.ones(3), BATCH))
    np.testing.assert_allclose(plan.shares * BATCH, [20, 50, 50])


def test_only_policies_that_keep_equal_times_settle():
    for name, settles in (("equal", False), ("abs", False), ("ogd", False), ("level", True)):
        assert policies.create(name, Cluster(3, BATCH)).settles is settles


def test_the_oracle_is_never_beaten():
    costs = drifting(40, realizations=5)
    policy = policies.create("optimum", Cluster(30, 256, realizations=(5,)))
    first = policy.plan(costs[0])
    ends = costs[0].seconds(first.shares * 256)
    busy = first.shares > 1e-9
    assert np.ptp(np.where(busy, ends, ends.max(-1, keepdims=True)), axis=-1) == pytest.approx(0, abs=1e-12)
    oracle, *_ = play("optimum", costs, 256)
    assert oracle < 1.2  # its first round is blind here
    for text in policies.names():
        assert play(text, costs, 256)[0] >= oracle - 1e-9


def test_the_oracle_asks_for_what_it_needs():
    policy = policies.create("optimum", Cluster(2, 4))
    plan, state = policy.init()
    with pytest.raises(ValueError, match="only a simulation"):
        policy.step(state, Round(plan.shares, np.ones(2), 4))
    coming = Linear(np.ones(2), np.zeros(2))
    absent, _ = policy.step(state, Round(plan.shares, np.array([1, np.nan]), 4, upcoming=coming))
    np.testing.assert_array_equal(absent.shares, [1, 0])
