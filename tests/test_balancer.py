"""The decision loop: when plans take effect, what a checkpoint holds, and training in the background."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline import policies
from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.rounds import Array, Cluster, PieceTimes, Round
from paceline.samples import CostLearner, SampleCosts
from support.guarantees import guarantee

SECONDS = np.array([1.0, 1.0, 2.0, 4.0]) / 1e3


def balancer(policy: str, **options: int) -> Balancer:
    cluster = Cluster(4, 100, np.ones(4), np.full(4, 100.0))
    return Balancer(policies.create(policy, cluster), **options)


def play(loop: Balancer, first: int, rounds: int) -> list[list[int]]:
    """Rounds of workers with a little noise of their own; the loads of each."""
    played = []
    for step in range(first, first + rounds):
        loads = loop.loads(step, 100)
        noise = np.exp(0.05 * np.random.default_rng(step).normal(size=4))
        loop.report(step, loads, SECONDS * noise * loads, np.full(4, 1e-4), np.full(4, 0.5), np.full(4, 0.5))
        played.append(loads.tolist())
    return played


def shared_core(rng: np.random.Generator, loads: NDArray[np.int64]) -> Array:
    """Seconds of a round of two workers; the second has its core by turns with another program, 4 ms each."""
    alone = 1.4e-3 + 85e-6 * loads
    until, left = 0.0, float(alone[1])
    phase = rng.uniform(0, 8e-3)  # its turn is the first half
    own = 4e-3 - phase
    if own <= 0:
        until, own = 8e-3 - phase, 4e-3
    while left > own:
        until, left, own = until + own + 4e-3, left - own, 4e-3
    return np.array([alone[0], until + left]) * np.exp(0.03 * rng.standard_normal(2))


@guarantee(
    "With batch norm, a single sample that is left over joins an epoch's "
    "last round, also under limits that hold just a batch."
)
@pytest.mark.parametrize("fits", [[32.0, 32.0], [20.0, 20.0], [10.0, 50.0], [np.nan, 9.0]])
def test_what_fits_leaves_room_for_the_sample_that_joins_an_epochs_last_round(fits: list[float]) -> None:
    """Batch norm needs two samples, so that one that is left over cannot be a round of its own."""
    cluster = Cluster(2, 64, np.full(2, 2.0), np.full(2, 64.0))
    loop = Balancer(policies.create("level", cluster), min_samples=2)
    loop.limit(0, np.array(fits))
    assert [int(loop.loads(0, batch).sum()) for batch in (64, 65)] == [64, 65]


def test_a_limit_makes_another_plan_for_those_who_keep_what_they_cut() -> None:
    loop = Balancer(policies.create("equal", Cluster(2, 64)))
    before = loop.latest
    loop.limit(5, np.array([np.nan, 20.0]))
    assert loop.latest is not before
    assert loop.latest == (5, loop.plan(4))
    assert loop.loads(5, 64).tolist() == [44, 20]


@guarantee(
    "Each worker receives work again within a few rounds after a first round that takes many times as long."
)
def test_no_worker_is_left_without_work_after_a_first_round_that_warms_up() -> None:
    for seed in (19, 21, 38, 40):
        rng = np.random.default_rng(seed)
        loop = Balancer(policies.create("level", Cluster(2, 128)))
        idle = 0
        for step in range(120):
            loads = loop.loads(step, 128)
            seconds = shared_core(rng, loads) + (rng.exponential(0.05, 2) if step == 0 else 0.0)
            loop.report(step, loads, seconds, np.full(2, 3e-4))
            idle += int(loads.min() <= 2)
        assert idle <= 10, seed


@pytest.mark.parametrize("seed", [18, 21, 28])
def test_a_first_round_that_is_seen_again_teaches_no_overheads_either(seed: int) -> None:
    """Two equal workers, samples that cost differently: once their cost is known, the halves are equal."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(5, 0.6, 4096)
    costs = SampleCosts(lengths)
    loop = Balancer(policies.create("level", Cluster(2, 64)), learner=CostLearner(costs, 2, 64))
    halves = []
    for step in range(25):
        dealt = loop.deal(step, lengths[rng.integers(0, 4096, 64)])
        linear, square, _ = dealt.parts.T
        cost = 0.5 * linear / costs.mean + 0.5 * square / costs.mean_square
        seconds = 2e-3 + 1e-4 * cost * np.exp(0.02 * rng.standard_normal(2))
        if step == 0:
            seconds += rng.exponential(0.05, 2)
        _, shares = loop.report(step, dealt.loads, seconds, parts=dealt.parts)
        halves.append(shares[0])
    assert np.abs(np.array(halves[8:]) - 0.5).max() < 0.05


@pytest.mark.parametrize("rounds", [0, 1, 2, 5])
@pytest.mark.parametrize("policy", ["level", "dolbie", "lbbsp", "auto"])
def test_one_that_takes_over_another_ones_state_decides_alike(policy: str, rounds: int) -> None:
    """Also before the first round: ranks of which one hands its state to the others would divide unlike."""
    cluster = Cluster(4, 128)
    first, second = Balancer(policies.create(policy, cluster)), Balancer(policies.create(policy, cluster))
    play(first, 0, rounds)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())), rounds)
    assert play(first, rounds, 12) == play(second, rounds, 12)
    assert first.digest == second.digest


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_a_plan_takes_effect_one_round_and_the_lag_later(lag: int) -> None:
    loop = balancer("level")
    loop.lag = lag
    played = play(loop, 0, lag + 3)
    assert played[: lag + 1] == [[25, 25, 25, 25]] * (lag + 1)
    assert played[lag + 1][3] < 15


@pytest.mark.parametrize(
    "text", ["level:forecast=narx", "lbbsp-cpu:forecast=arima", "auto:forecast=recurrent"]
)
def test_trained_forecast_plans_the_next_round(text: str) -> None:
    """LB-BSP, Alg. 1, manager, lines 1 to 3."""
    played = play(balancer(text), 0, 2)
    assert played[0] == [25, 25, 25, 25]
    assert played[1][3] < 15


@pytest.mark.parametrize("policy", ["level", "lbbsp-cpu", "factoring"])
@pytest.mark.parametrize("forecast", ["narx:warmup=130;fallback=no", "arima", "recurrent:warmup=130"])
def test_plans_are_those_of_step_and_training_in_turns(policy: str, forecast: str) -> None:
    """LB-BSP, Alg. 1, manager, lines 1 to 6: the background thread changes nothing about the decisions."""
    cluster, rng = Cluster(3, 90), np.random.default_rng(0)
    text = f"{policy}:forecast={forecast}"
    loop, alone = Balancer(policies.create(text, cluster)), policies.create(text, cluster)
    plan, state = alone.init()
    trained = 0
    for step in range(160):
        np.testing.assert_array_equal(loop.plan(step).shares, plan.shares)
        cpu, memory = rng.uniform(0.2, 1, (2, 3))
        seconds = plan.shares * 90 * 1e-3 * np.array([1, 2, 4]) * np.exp(0.05 * rng.standard_normal(3))
        loads = np.asarray(plan.shares * 90)
        overhead, _ = loop.report(step, loads, seconds, cpu=cpu, memory=memory)  # type: ignore[arg-type]
        happened = Round(loads / loads.sum(), seconds, float(loads.sum()), overhead, cpu=cpu, memory=memory)
        plan, state = alone.step(state, happened)
        before, state = state, alone.train(state)
        pairs = zip(policies.leaves(before), policies.leaves(state), strict=True)
        trained += any(not np.array_equal(*pair, equal_nan=True) for pair in pairs)
    assert trained >= 1


@pytest.mark.parametrize(
    "policy", ["level", "dolbie", "wlbs", "lbbsp-cpu:forecast=arima", "level:forecast=narx"]
)
@pytest.mark.parametrize("lag", [0, 2])
def test_resumed_balancer_has_the_plans_of_an_unbroken_one(policy: str, lag: int) -> None:
    whole, before, after = balancer(policy), balancer(policy), balancer(policy)
    for loop in (whole, before, after):
        loop.lag = lag
    unbroken = play(whole, 0, 24)
    assert play(before, 0, 11) == unbroken[:11]
    after.load_state_dict(before.state_dict(), 11)
    assert play(after, 11, 13) == unbroken[11:]
    assert play(before, 11, 13) == unbroken[11:], "making a checkpoint changed the run"
    assert before.digest == whole.digest


def test_error_in_the_training_is_raised_by_the_next_report() -> None:
    class Failing:
        cluster = Cluster(2, 10)
        needs_upcoming = False
        trains = True

        def init(self):  # type: ignore[no-untyped-def]
            return policies.create("equal", self.cluster).init()

        def step(self, state, round):  # type: ignore[no-untyped-def]
            return policies.create("equal", self.cluster).step(state, round)

        def train(self, state):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError

    loop = Balancer(Failing())  # type: ignore[arg-type]
    assert not loop.needs_readings
    loop.report(0, np.array([5, 5]), np.array([1.0, 1.0]))
    assert loop.state_dict()["newest"]["shares"] == [0.5, 0.5]
    for step in (1, 2):
        with pytest.raises(ZeroDivisionError):
            loop.report(step, np.array([5, 5]), np.array([1.0, 1.0]))
        assert loop.loads(step + 1, 10).tolist() == [5, 5]


def test_quanta_and_fewest_samples() -> None:
    loop = balancer("level", quantum=20, min_samples=2)
    play(loop, 0, 2)
    assert (loop.loads(2, 100) % 20 == 0).all()
    assert loop.loads(2, 47).sum() == 47
    assert balancer("equal", min_samples=2).loads(0, 3).tolist() == [3, 0, 0, 0]
    with pytest.raises(PacelineError, match="positive divisor of the global batch"):
        balancer("equal", quantum=30)
    for wrong in (1.5, float("nan"), "2", None, 0, -1, True):
        for name in ("quantum", "min_samples"):
            with pytest.raises(PacelineError, match=f"{name}=.*: expected a whole number, 1 to"):
                balancer("equal", **{name: wrong})
    with pytest.raises(PacelineError, match=r"policy='level': expected a policy, as paceline\.policies"):
        Balancer("level")  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match="needs the next round's costs"):
        balancer("optimum")


@pytest.mark.parametrize("policy", [name for name in policies.names() if not name.startswith("optim")])
def test_another_worker_than_those_planned_for_may_be_all_that_is_left(policy: str) -> None:
    loop = Balancer(policies.create(policy, Cluster(3, 30, np.array([1.0, 0, 0]), np.array([20.0, 30, 30]))))
    only_the_first, only_the_second = np.array([True, False, False]), np.array([False, True, False])
    loop.report(0, np.array([20, 0, 0]), np.where(only_the_first, 2.0, np.nan))
    assert loop.loads(1, 30, only_the_second).tolist() == [0, 30, 0]
    with pytest.raises(PacelineError, match="without a place"):
        loop.loads(1, 30, only_the_first)


@guarantee(
    "`auto` plans whole rounds where a round takes less than 50 times "
    "what a piece costs, and tries pieces again later."
)
def test_auto_is_level_in_rounds_too_short_for_what_a_piece_costs_and_tries_pieces_again() -> None:
    cluster, nothing, tried = Cluster(2, 64), np.zeros(2), []
    auto, level = (Balancer(policies.create(name, cluster)) for name in ("auto", "level"))
    for step in range(300):
        loads = level.loads(step, 64)
        seconds = loads / 64 * 0.18 * np.exp(0.3 * np.random.default_rng(step).standard_normal(2))
        pieces = PieceTimes(np.full(2, 0.004), nothing, nothing)
        auto.report(step, loads, seconds, nothing, pieces=pieces, short=0.05)
        level.report(step, loads, seconds, nothing)
        planned = auto.piece_plan(step + 1)
        assert planned is not None
        tried.append(bool(planned.at_once < 1))
        if step < 50:
            np.testing.assert_array_equal(auto.plan(step + 1).shares, level.plan(step + 1).shares)
            assert auto.digest != level.digest, "pieces are part of the plan"
    assert not any(tried[:50]), "a round of a tenth of a second takes less than 50 pieces of 4 ms each cost"
    assert any(tried[50:250]), "what is known of pieces fades"
    assert sum(tried) < 100
    other = Balancer(policies.create("auto", cluster))
    other.load_state_dict(json.loads(json.dumps(auto.state_dict())), 300)
    assert json.dumps(other.state_dict()) == json.dumps(auto.state_dict())


def test_limits_without_room_for_whole_quanta_raise() -> None:
    cluster = Cluster(2, 12, np.zeros(2), np.array([7.0, 7.0]))
    with pytest.raises(
        PacelineError, match="quantum=4: the most loads hold 8 samples in multiples of it; expected at"
    ):
        Balancer(policies.create("level", cluster), quantum=4)
    assert Balancer(policies.create("level", cluster), quantum=2).loads(0, 12).tolist() == [6, 6]


def test_least_loads_beyond_the_batch_in_whole_quanta_raise() -> None:
    cluster = Cluster(3, 12, np.array([5.0, 3.0, 1.0]))
    words = (
        "quantum=4: the least loads take 16 samples in multiples of it; expected at most 12, the global batch"
    )
    with pytest.raises(PacelineError, match=words):
        Balancer(policies.create("level", cluster), quantum=4)
    assert (Balancer(policies.create("level", cluster), quantum=2).loads(0, 12) >= cluster.least).all()
    fits = Balancer(policies.create("level", Cluster(3, 12, np.array([5.0, 3.0, 0.0]))), quantum=4)
    assert fits.loads(0, 12).tolist() == [8, 4, 0]
