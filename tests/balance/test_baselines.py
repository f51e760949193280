"""OGD, ABS and LB-BSP's small steps: what DOLBIE's paper holds against them, and what it does not say."""

import numpy as np
import pytest

from paceline import Cluster, Round, policies
from paceline.balance.abs import Abs
from paceline.balance.factoring import Factoring
from paceline.balance.lbbsp import Lbbsp
from paceline.costs import Increasing, Linear
from paceline.errors import PacelineError
from paceline.forecast.ema import Ema
from paceline.forecast.learned import Narx, Recurrent

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


def test_lbbsp_moves_delta_samples_every_so_many_rounds():
    loads = moves("lbbsp:delta=5,rounds=3", [[1, 2, 3]] * 7)
    np.testing.assert_allclose(loads[:2], np.full((2, 3), 40))
    np.testing.assert_allclose(loads[2:5], np.tile([45.0, 40, 35], (3, 1)))  # the count starts again
    np.testing.assert_allclose(loads[5:], np.tile([50.0, 40, 30], (2, 1)))


def test_lbbsp_read_strictly_waits_for_the_same_worker_to_stay_fastest():
    alternating = [[1, 2, 3], [2, 1, 3]] * 5
    assert moves("lbbsp:reading=strict", alternating)[-1].tolist() == pytest.approx([40, 40, 40])
    loose = moves("lbbsp:reading=loose", alternating)[-1]
    assert loose[2] == pytest.approx(30)
    steady = [[1, 2, 3]] * 10
    np.testing.assert_allclose(moves("lbbsp:reading=strict", steady)[-1], moves("lbbsp", steady)[-1])


def test_lbbsp_cannot_take_what_is_not_there():
    loads = moves("lbbsp:delta=30,rounds=1", [[1, 2, 3]] * 3)
    np.testing.assert_allclose(loads[:, 2], [10, 0, 0], atol=1e-12)
    np.testing.assert_allclose(loads.sum(-1), BATCH)


def test_lbbsp_leaves_equal_times_alone():
    np.testing.assert_allclose(moves("lbbsp:rounds=1", [[2, 2, 2]] * 4), np.full((4, 3), 40.0))


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
    absent = policy.step(
        state, Round(plan.shares, np.array([1, np.nan]), 4, upcoming=Linear(np.ones(2), np.zeros(2)))
    )[0]
    np.testing.assert_array_equal(absent.shares, [1, 0])


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        (Abs, "reading"),
        (Lbbsp, "reading"),
        (Factoring, "scheme"),
        (Ema, "of"),
        (Narx, "inputs"),
        (Recurrent, "cell"),
    ],
)
def test_a_choice_that_does_not_exist_is_refused_also_without_a_name_in_text(kind, option):
    made_for = (Cluster(3, BATCH),) if kind in (Abs, Lbbsp, Factoring) else ()
    with pytest.raises(PacelineError, match=f"{option}=7: expected"):
        kind(*made_for, **{option: 7})
