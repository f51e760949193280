"""Rounds in pieces on the virtual clock."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest

from paceline.rounds import Array, PiecePlan
from paceline.simulate.pieces import CLAIM_SECONDS, play

share_of_the_bound = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "bound.py"))[
    "share_of_the_bound"
]
BATCH = 768


def noisy(sd: float, rounds: int = 100, realizations: int = 6) -> Array:
    rng = np.random.default_rng(11)
    return np.array([1e-3, 1e-3, 4e-3]) * np.exp(sd * rng.standard_normal((rounds, realizations, 3)))


def moving(rounds: int = 180) -> Array:
    slopes = np.full((rounds, 1, 3), 1e-3)
    for t in range(rounds):
        slopes[t, 0, 2 - (t // 40) % 3] = 4e-3
    return slopes


@pytest.mark.parametrize("name", ["factoring", "auto"])
def test_reaches_what_no_plan_can(name: str) -> None:
    for slopes, least, most in ((noisy(0.3), 0.97, 0.8), (noisy(0.7), 0.96, 0.55), (moving(), 0.96, 0.94)):
        assert share_of_the_bound("level", slopes, BATCH) < most
        assert share_of_the_bound(name, slopes, BATCH) > least


def test_claims_follow_how_steady_paces_are_within_a_round() -> None:
    # Many draws of the pieces' own paces: few say little of 0.005.
    noises = (noisy(sd, realizations=48) for sd in (0.3, 0.7))
    for slopes in (*noises, np.repeat(moving(), 24, axis=1)):
        learned = share_of_the_bound("auto", slopes, BATCH)
        assert learned > share_of_the_bound("auto:part=0.5", slopes, BATCH) + 0.008
        unsteady, halves, most = (
            share_of_the_bound(name, slopes, BATCH, unsteady=0.3)
            for name in ("auto", "auto:part=0.5", "auto:part=0.95")
        )
        assert unsteady > halves - 0.005
        assert unsteady > most + 0.05


def test_steady_speeds_lose_nothing_to_it() -> None:
    steady = noisy(0.0)
    planned = share_of_the_bound("level", steady, BATCH)
    assert share_of_the_bound("auto", steady, BATCH) == pytest.approx(planned, abs=1e-3)
    assert share_of_the_bound("factoring", steady, BATCH) > 0.97


def test_a_round_follows_its_claims_in_time() -> None:
    piece_plan = PiecePlan(np.array([0.5]), *np.zeros((2, 1)), np.full((1, 2), 2.0), np.ones((1, 2)))
    loads, slope = np.array([[8, 8]]), np.array([[1.0, 4.0]])
    ran = play(piece_plan, loads, slope, np.zeros((1, 2)), 0.0)
    # Worker 0: 4 at once until 4, 2 more at 4 and 2 more at 6, until 8; worker 1 is at 16 before it could claim.
    assert ran.loads.tolist() == [[10, 6]]
    assert ran.pieces.tolist() == [[4, 2]]
    np.testing.assert_allclose(ran.seconds, [[10 + 2 * CLAIM_SECONDS, 24]])


@pytest.mark.parametrize("dead", [0, 2])
def test_realizations_together_are_realizations_one_by_one(dead: int) -> None:
    rng = np.random.default_rng(3)
    slope = rng.uniform(1e-3, 4e-3, (5, 4))
    speeds, loads = 1 / slope, np.full((5, 4), 60)
    piece_plan = PiecePlan(
        rng.uniform(0.1, 1, 5), np.full(5, 0.5), rng.uniform(0.5, 0.95, 5), np.full((5, 4), 3.0), speeds
    )
    late = slope * np.exp(0.5 * rng.standard_normal((5, 4)))
    here = np.ones((5, 4), bool)
    here[:, :dead] = rng.random((5, dead)) < 0.5
    together = play(piece_plan, loads, late, np.zeros((5, 4)), 1e-3, present=here)
    for r in range(5):
        one, seconds = PiecePlan(*(part[r : r + 1] for part in piece_plan)), late[r : r + 1]
        alone = play(one, loads[:1], seconds, np.zeros((1, 4)), 1e-3, present=here[r : r + 1])
        np.testing.assert_array_equal(alone.loads[0], together.loads[r])
        np.testing.assert_allclose(alone.seconds[0], together.seconds[r])


def test_memory_limits_every_piece() -> None:
    piece_plan = PiecePlan(*np.full((3, 1), 0.5), np.full((1, 2), 2.0), np.full((1, 2), 100.0))
    ran = play(piece_plan, np.array([[40, 40]]), np.full((1, 2), 0.01), np.zeros((1, 2)), 0.001, most=8)
    assert ran.loads.sum() == 80
    assert np.all(ran.pieces >= ran.loads / 8)


def test_what_a_worker_that_dies_within_the_round_was_to_run_the_others_run_once_it_is_missed() -> None:
    # Three workers at 1, 1 and 2 samples a second; half of each plan at once, and the last 2 samples of each.
    speeds = np.array([[1.0, 1.0, 2.0]])
    piece_plan = PiecePlan(*np.full((3, 1), 0.5), np.full((1, 3), 2.0), speeds)
    slope, none = np.array([[1.0, 1.0, 0.5]]), np.zeros((1, 3))
    loads = np.array([[40, 40, 80]])
    whole = play(piece_plan, loads, slope, none, 0.0)
    assert np.all(whole.idle == 0)
    here = np.array([[True, True, False]])
    for missed in (0.0, 500.0):
        ran = play(piece_plan, loads, slope, none, 0.0, present=here, missed=missed)
        assert ran.loads.sum() == 160
        assert ran.loads[0, 2] == 0
        # 160 samples at 2 a second; the orphans are 40 + 2, half a minute's work at most after they are missed.
        ends = max(80.0, missed + 42 / 2)
        assert ran.seconds[0, :2] == pytest.approx([ends] * 2, abs=2.1)
        assert ran.idle[0, :2] == pytest.approx([max(0.0, missed - (160 - 42) / 2)] * 2, abs=2.1)
