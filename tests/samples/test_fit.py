"""The measured cost model beside scipy's, and through what rounds bring: noise, outliers, changes of speed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import least_squares, lsq_linear, nnls

from paceline.samples import CostLearner, SampleCosts, deal, learner

GUARANTEES = (
    "The cost model is fitted despite scatter, noisy first rounds and a worker that becomes slower.",
)

PART, LAUNCH = 0.35, 0.6
OVERHEAD, PACE = np.array([0.02, 0.05, 0.0, 0.1]), np.array([1.0, 1.5, 1.0, 4.0]) * 1e-2


def rounds(many: int, seed: int = 0, scatter: float = 0.02) -> tuple[np.ndarray, np.ndarray]:
    """Parts, (rounds, 4, 3), and seconds, (rounds, 4), of a job whose model is known."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(5, 1, (many, 4, 16)), 16, 1024)
    launches = rng.integers(1, 6, (many, 4))
    parts = np.stack([lengths.sum(-1) / 220, (lengths**2).sum(-1) / 9e4, launches], -1)
    seconds = OVERHEAD + PACE * (parts @ [1 - PART, PART, LAUNCH])
    return parts, seconds * np.exp(scatter * rng.standard_normal(seconds.shape))


def fitted(parts: np.ndarray, seconds: np.ndarray, **options: float) -> learner.CostFit:
    belief = learner.start_fit(parts.shape[1])
    for each, took in zip(parts, seconds, strict=True):
        belief = learner.update_fit(belief, each, took, **options)
    return belief


def test_the_fit_is_the_least_squares_of_scipy() -> None:
    parts, seconds = rounds(60)

    def errors(x: np.ndarray) -> np.ndarray:
        costs = parts @ np.array([1 - x[0], x[0], x[1]])
        return ((x[2:6] + x[6:] * costs) / seconds - 1).ravel()

    start = np.r_[0.1, 0.1, np.full(4, 0.01), PACE]
    scale = np.r_[1, 1, np.full(4, 0.1), PACE]
    limits = (0, [1] + [np.inf] * 9)
    best = least_squares(errors, start, bounds=limits, x_scale=scale, xtol=1e-14, ftol=1e-14, gtol=1e-14).x
    found = fitted(parts, seconds, memory=1.0)
    assert [float(found.part), float(found.launch)] == pytest.approx(best[:2], abs=3e-3)
    assert found.overhead == pytest.approx(best[2:6], abs=5e-4)
    assert found.pace == pytest.approx(best[6:], rel=5e-3)


def test_each_workers_line_is_that_of_nnls() -> None:
    parts, seconds = rounds(20, seed=1)
    products = np.concatenate([parts, np.ones((20, 4, 1)), seconds[:, :, None]], -1) / seconds[:, :, None]
    sums = np.einsum("twi,twj->wij", products, products)
    overhead, pace = learner.lines(sums, PART, LAUNCH)
    costs = parts @ [1 - PART, PART, LAUNCH]
    for worker in range(4):
        took = seconds[:, worker, None]
        rows = np.hstack([1 / took, costs[:, worker, None] / took])
        assert [overhead[worker], pace[worker]] == pytest.approx(nnls(rows, np.ones(20))[0], abs=1e-9)


@given(
    st.floats(0, 1), st.floats(0, 3), st.floats(-5, 5), st.floats(-5, 5), st.floats(0.1, 4), st.floats(0.1, 4),
    st.floats(-0.95, 0.95),
)  # fmt: skip
def test_a_step_ends_at_the_best_point_within_the_limits(
    part: float, launch: float, to_part: float, to_launch: float, pp: float, ll: float, alike: float
) -> None:
    """Where the free step breaks one limit, the step is that of bounded least squares."""
    pl = alike * math.sqrt(pp * ll)
    found = learner._within(part, launch, to_part, to_launch, (pp, pl, ll))
    root = np.linalg.cholesky(np.array([[pp, pl], [pl, ll]]))
    goal = np.linalg.solve(root, [to_part, to_launch]) + root.T @ [part, launch]
    best = lsq_linear(root.T, goal, ([0, 0], [1, np.inf]), method="bvls").x
    free = np.array([part, launch]) + np.linalg.solve(root @ root.T, [to_part, to_launch])
    assert 0 <= found[0] <= 1
    assert found[1] >= 0
    if not 0 <= free[0] <= 1 and free[1] < 0:
        return  # both limits at once: the next steps go on from there
    assert found == pytest.approx(best, abs=1e-6)


def test_the_model_is_found_within_few_rounds_and_through_outliers() -> None:
    parts, seconds = rounds(40, seed=2)
    few = fitted(parts[:8], seconds[:8])
    assert float(few.part) == pytest.approx(PART, abs=0.1)
    assert float(few.launch) == pytest.approx(LAUNCH, rel=0.3)
    disturbed = seconds.copy()
    disturbed[10::9, 1] *= 5  # a round in nine is far too long on a worker
    found = fitted(parts, disturbed)
    assert float(found.part) == pytest.approx(PART, abs=0.08)
    assert float(found.launch) == pytest.approx(LAUNCH, rel=0.2)


def test_a_worker_that_becomes_slower_does_not_spoil_the_jobs_model() -> None:
    parts, seconds = rounds(40, seed=3)
    slower = seconds.copy()
    slower[20:, 2] *= 3
    found = fitted(parts, slower)
    assert float(found.part) == pytest.approx(PART, abs=0.08)
    assert found.pace[2] == pytest.approx(3 * PACE[2], rel=0.15)


def test_what_is_never_negative_is_not() -> None:
    """Costs that fall with the square, and rounds without any launch or overhead."""
    parts, _ = rounds(30, seed=4)
    linear, launchless = parts @ [1.0, 0, 0], parts @ [1.2, -0.2, -0.1]
    for seconds in (PACE * linear, PACE * launchless):
        found = fitted(parts, seconds)
        assert float(found.part) >= 0
        assert float(found.launch) >= 0
        assert found.overhead.min() >= 0
        assert found.pace.min() > 0
        assert float(found.part) == pytest.approx(0, abs=0.02)


def test_empty_rounds_teach_nothing_and_one_round_does_not_fit_launches() -> None:
    parts, seconds = rounds(1)
    absent = learner.update_fit(learner.start_fit(4), parts[0], np.full(4, np.nan))
    assert not absent.sums.any()
    one = learner.update_fit(learner.start_fit(4), parts[0], seconds[0])
    assert np.all(one.overhead == 0)
    assert np.isfinite([one.part, one.launch]).all()


def test_padded_rounds_try_cuts_until_a_launch_is_known() -> None:
    """With one micro-batch a worker, nobody knows what a launch costs; so the first rounds vary their number."""
    rng, speeds = np.random.default_rng(5), np.array([1.0, 1.0, 0.5])
    whole = np.round(np.clip(rng.lognormal(5, 1, 96 * 30), 16, 1024))
    costs = SampleCosts.checked(whole, len(whole))
    learner, truth = CostLearner(costs, 3, 96, padded=True), costs.with_alpha(0.001, launch=0.8, padded=True)
    counts = []
    for step in range(30):
        dealt = deal(whole[96 * step : 96 * (step + 1)], learner.model(), 1 / speeds)
        counts.append(max(map(len, dealt.sizes)))
        seconds = (dealt.parts @ [truth.linear, truth.quadratic, 0.8]) / speeds * 1e-2
        learner.take(dealt.parts, seconds * np.exp(0.02 * rng.standard_normal(3)))
    assert counts[0] == 1 < counts[1] < counts[2]
    assert learner.model().launch == pytest.approx(0.8, rel=0.15)
    assert learner.model().quadratic / learner.model().linear == pytest.approx(0.001, rel=0.25)


def test_a_launch_is_not_believed_to_cost_nothing_after_a_few_noisy_rounds() -> None:
    """Where noise hides what a launch costs, rounds would be cut into dozens of micro-batches that teach nothing."""
    costs = SampleCosts.checked(np.arange(1.0, 101.0), 100)
    learner, batch, workers = CostLearner(costs, 2, 64, padded=True), 64, 2
    for step in range(12):
        launch = learner.model().launch
        assert step == 0 or step >= 8 or (launch is not None and launch >= batch / workers / 64)
        cuts = 2.0 + step
        parts = np.array([[1600.0, 1e5, cuts], [1600.0, 1e5, cuts]])
        learner.take(parts, np.array([1.0, 2.0]))  # more micro-batches, and no more seconds
    assert learner.model().launch == pytest.approx(0, abs=0.02)


def test_worker_without_rounds_stays_unknown_beside_the_others() -> None:
    parts, seconds = rounds(6)
    seconds[:, 2] = np.nan
    found = fitted(parts, seconds)
    assert np.isnan([found.overhead[2], found.pace[2]]).all()
    assert np.isfinite(np.delete(found.pace, 2)).all()


def test_stored_model_of_other_workers_is_refused() -> None:
    costs = SampleCosts.checked([1.0, 2.0, 3.0], 3)
    made = CostLearner(costs, 2, 3)
    state = made.state_dict({0: made.model()})
    again, models = made.stored(state, 5)
    assert (models, again.rounds) == ({0: made.model()}, 0)
    with pytest.raises(Exception, match="hold none for round -1; begin without them"):
        made.stored(state, -1)
    with pytest.raises(Exception, match="not one of 3 workers; begin without it"):
        CostLearner(costs, 3, 3).stored(state, 5)
