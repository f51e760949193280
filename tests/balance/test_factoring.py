"""The rule for work that moves within the round: what is run at once, and how large the next piece is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import bisect

from paceline import Cluster, Round, policies
from paceline.balance.factoring import PORTIONS, Hindsight
from paceline.errors import PacelineError
from paceline.pieces.rule import claim, divide
from paceline.rounds import PiecePlan, PieceTimes
from paceline.simulate.pieces import play


def sizes(part: float, pool: int, weights: list[float], least: float = 1.0, unit: int = 1) -> list[int]:
    """The pieces that workers claim in turn until nothing is left."""
    taken, left, turn = [], pool, 0
    held, n = [0] * len(weights), len(weights)
    piece_plan = PiecePlan(*(np.array(each) for each in (0.0, part, part, [least] * n, weights)))
    while left:
        who = turn % len(weights)
        known = {"left": left, "batch": pool, "held": held[who], "speed": weights[who], "together": 1.0}
        taken.append(claim(piece_plan, who, reported=True, workers=len(weights), unit=unit, **known))
        held[who] += taken[-1]
        left -= taken[-1]
        turn += 1
    return taken


def test_the_classical_schemes_are_parameters() -> None:
    quarter = [0.25] * 4
    # Factoring (Hummel et al. 1992): in stages of n claims, each of which hands out half of what is left.
    assert sizes(0.5, 64, quarter) == [8] * 4 + [4] * 4 + [2] * 4 + [1] * 8
    # Guided self-scheduling (Polychronopoulos and Kuck 1987): always an n-th of what is left.
    assert sizes(1.0, 64, quarter)[:5] == [16, 12, 9, 7, 5]
    assert sizes(0.0, 64, quarter, least=16) == [16] * 4  # self-scheduling
    assert sizes(0.5, 64, [0.75, 0.25])[:4] == [24, 8, 12, 4]  # weighted


@given(
    st.sampled_from([0.0, 0.3, 0.5, 0.8, 1.0]),
    st.integers(1, 500),
    st.lists(st.floats(0.01, 1), min_size=1, max_size=6),
    st.floats(1, 20),
    st.sampled_from([1, 2, 8]),
)
def test_everything_is_claimed_in_whole_units(
    part: float, units: int, weights: list[float], least: float, unit: int
) -> None:
    shares = [w / sum(weights) for w in weights]
    taken = sizes(part, units * unit, shares, least, unit)
    assert sum(taken) == units * unit
    assert all(piece > 0 and piece % unit == 0 for piece in taken)
    assert all(piece >= least for piece in taken[:-1])


@given(
    st.floats(0, 1),
    st.lists(st.integers(0, 60), min_size=1, max_size=5),
    st.floats(1, 9),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([None, 8, 30]),
)
def test_a_division_keeps_within_each_load(
    portion: float, loads: list[int], least: float, unit: int, most: int | None
) -> None:
    planned = np.array(loads)
    piece_plan = PiecePlan(
        np.array(portion), *np.full(2, 0.5), np.full(len(loads), least), np.ones(len(loads))
    )
    first, kept = divide(piece_plan, planned, unit, most)
    left = planned - first - kept
    assert np.all(first >= 0)
    assert np.all(kept >= 0)
    assert np.all(left >= 0)
    if portion < 1:
        assert np.all(left % unit == 0)
        assert np.all(first % unit == 0)
        assert np.all(kept[planned > 0] > 0)  # where gradients are reduced
    else:
        assert not left.any()
        assert not kept.any()


def portions(text: str, slopes: Any, rounds: int = 120, piece: float = 1e-3) -> list[float]:
    """What is run at once, round after round, where every load is run as planned."""
    cluster = Cluster(slopes.shape[-1], 768)
    policy = policies.create(text, cluster)
    plan, state = policy.init()
    chosen = []
    for t in range(rounds):
        chosen.append(float(plan.piece_plan.at_once))
        seconds = plan.shares * 768 * slopes[t]
        plan, state = policy.step(
            state, Round(plan.shares, seconds, 768, pieces=PieceTimes(*np.outer([piece, 0, 0], np.ones(3))))
        )
    return chosen


def test_steady_speeds_are_run_as_planned_and_unsteady_ones_in_smaller_first_pieces() -> None:
    rng = np.random.default_rng(5)
    base = np.array([1e-3, 1e-3, 4e-3])
    late = {}
    for sd in (0.0, 0.02, 0.3, 0.7):
        late[sd] = np.mean(portions("auto", base * np.exp(sd * rng.standard_normal((120, 3))))[60:])
    assert late[0.0] == 1
    assert late[0.02] > 0.9
    assert 0.3 < late[0.3] < 0.6
    assert late[0.7] < 0.2
    steady = np.tile(base, (120, 1))
    assert np.mean(portions("factoring", steady)[60:]) == pytest.approx(0.95)  # never all at once
    assert np.mean(portions("auto", steady * 1.0, piece=0.1)[60:]) == 1


def test_pieces_that_cost_too_much_are_not_cut() -> None:
    rng = np.random.default_rng(5)
    slopes = np.array([1e-3, 1e-3, 4e-3]) * np.exp(0.1 * rng.standard_normal((120, 3)))
    dear, cheap = (np.mean(portions("auto", slopes, piece=p)[60:]) for p in (0.05, 5e-4))
    assert cheap < 0.85
    assert dear == 1


@pytest.mark.parametrize("evened", [False, True])
def test_pieces_that_even_nothing_out_are_given_up(evened: bool) -> None:
    """Workers are held up at random for a tenth of the round: where pieces end just as unevenly, the plan does as
    well without their cost; where they make up for it, it does not."""
    rng = np.random.default_rng(3)
    runs, n, batch, pace, piece = 40, 8, 800, 1e-3, 1e-3
    policy = policies.create("auto", Cluster(n, batch, realizations=(runs,)))
    plan, state = policy.init()
    in_pieces = []
    for _ in range(120):
        in_pieces.append(plan.piece_plan.at_once < 1)
        moved = in_pieces[-1][:, None]
        held_up = rng.uniform(0, 0.02, (runs, n))
        shares, expected = plan.shares, np.where(moved, 0.03, 0.0) * np.ones((runs, n))
        if evened:  # who is held up runs less, and all end together
            seconds = 0.1 + held_up.mean(-1, keepdims=True)
            together = (seconds - held_up) / (seconds - held_up).sum(-1, keepdims=True)
            shares = np.where(moved, together, shares)
        seconds = shares * batch * pace + held_up
        pieces = PieceTimes(np.full((runs, n), piece), expected, expected / 10)
        plan, state = policy.step(state, Round(shares, seconds, batch, pieces=pieces))
    assert np.mean(in_pieces[60:]) == 1 if evened else np.mean(in_pieces[60:]) < 0.1


@pytest.mark.parametrize(("n", "each", "scatter", "flat"), [(8, 20, 0.07, 0.8), (10, 24, 0.05, 0.9)])
def test_seconds_that_do_not_grow_with_the_load_are_not_taken_for_slowness(
    n: int, each: int, scatter: float, flat: float
) -> None:
    """Equal workers whose seconds hardly depend on the load: pieces, each of which costs 1 % of a round, even out
    little, and rounds must take hardly longer than those of equal shares."""
    rng = np.random.default_rng(6)
    runs, seconds_each, piece = 40, 0.01, 1e-4
    slope, overhead = (1 - flat) * seconds_each / each, flat * seconds_each
    policy = policies.create("auto", Cluster(n, each * n, least=np.ones(n), realizations=(runs,)))
    plan, state = policy.init()
    took, equal = [], []
    for _ in range(200):
        noise = np.exp(scatter * rng.standard_normal((runs, n)))
        ran = play(plan.piece_plan, np.full((runs, n), each), slope * noise, overhead * noise, piece)
        seconds, further = ran.seconds - piece, piece * (ran.pieces - 1.0)
        took.append(seconds.max(-1).mean())
        equal.append((seconds_each * noise).max(-1).mean())
        times = PieceTimes(np.full((runs, n), piece), ran.expected, ran.strayed, ran.pace)
        plan, state = policy.step(
            state, Round(ran.loads / (each * n), seconds, each * n, further, pieces=times)
        )
    assert np.sum(took[60:]) < 1.02 * np.sum(equal[60:])


@given(
    st.lists(
        st.tuples(st.integers(0, 40), st.floats(0, 1), st.floats(0.1, 9), st.floats(0, 1)),
        min_size=1,
        max_size=6,
    )
)
def test_a_replay_ends_as_the_workers_would(workers: list[tuple[int, float, float, float]]) -> None:
    """Against a bisection for the ideal time, and each worker's own seconds; 0 samples: nothing is known of it."""
    loads, planned, pace, part = (np.array(each, float) for each in zip(*workers, strict=True))
    planned += 1e-3
    own = pace * np.maximum(part, 1e-3)
    replay = Hindsight.of(loads, planned / planned.sum(), own, pace)
    ran = loads > 0
    if not ran.any():
        assert replay.ideal == 0
        assert np.isfinite(replay.losses()).all()
        return
    loads, planned, pace, own = (each[ran] for each in (loads, planned, pace, own))
    flat, planned = (pace - own) * loads, planned / planned.sum() * loads.sum()
    ideal = bisect(lambda t: np.sum(np.maximum(t - flat, 0) / own) - loads.sum(), 0, 1e7, xtol=1e-12)
    ideal = max(ideal, flat.max())
    assert replay.ideal == pytest.approx(ideal)
    assert replay.ended == pytest.approx((pace * loads).max())
    assert replay.flat_part == pytest.approx(flat.sum() / (pace * loads).sum())
    ends = (flat + PORTIONS[:, None] * own * planned).max(-1)
    np.testing.assert_allclose(replay.losses(), np.maximum(ends / ideal, 1) - 1, atol=1e-9)


def test_claims_go_by_what_is_expected_and_plans_by_more() -> None:
    """A plan aims early where a worker's pace scatters; were claims to do so, the first ones would take too much."""
    rng = np.random.default_rng(4)
    n, batch, pace = 32, 3200, 1e-3
    policy = policies.create("auto", Cluster(n, batch))
    plan, state = policy.init()
    told = []
    for _ in range(100):
        seconds = plan.shares * batch * pace * np.exp(0.3 * rng.standard_normal(n))
        plan, state = policy.step(state, Round(plan.shares, seconds, batch))
        told.append(plan.piece_plan.speeds.sum() * pace / n)
    assert np.mean(told[20:]) == pytest.approx(1.0, abs=0.1)


def test_impossible_options_raise() -> None:
    for text in ("portion=0", "portion=1.5", "part=0", "piece=0", "overhead=0"):
        with pytest.raises(PacelineError, match=text.split("=")[0]):
            policies.create(f"factoring:{text}", Cluster(3, 48))
