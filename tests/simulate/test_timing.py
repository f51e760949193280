import itertools

import numpy as np
import pytest
from scipy import stats

from paceline.simulate.timing import Ar1, Constant, Exponential, OnOff, Pareto, Replay, Uniform, assemble

SHAPE = (50, 40)


def played(model, rounds, seed=0, shape=SHAPE):
    return np.array(list(itertools.islice(model.stream(shape, np.random.default_rng(seed)), rounds)))


def test_ar1_is_stationary_from_the_first_round():
    log = np.log(played(Ar1(0.02, rho=0.9, sd=0.1), 40) / 0.02)
    assert log[0].std() == pytest.approx(0.1, rel=0.1)
    assert log[-1].std() == pytest.approx(0.1, rel=0.1)
    assert np.corrcoef(log[:-1].ravel(), log[1:].ravel())[0, 1] == pytest.approx(0.9, abs=0.01)


def test_onoff_is_a_markov_chain_of_two_states():
    took = played(OnOff(2.0, factor=3.0, on=0.1, off=0.3), 200)
    assert set(np.unique(took)) == {2.0, 6.0}
    busy = took == 6.0
    assert busy[0].mean() == pytest.approx(0.25, abs=0.03)
    assert busy.mean() == pytest.approx(0.25, abs=0.01)
    assert busy[1:][~busy[:-1]].mean() == pytest.approx(0.1, abs=0.01)
    assert busy[1:][busy[:-1]].mean() == pytest.approx(0.7, abs=0.01)


@pytest.mark.parametrize(
    ("model", "law"),
    [
        (Exponential(0.7, shift=0.3), stats.expon(0.3, 0.7)),
        (Uniform(1.0, 3.0), stats.uniform(1, 2)),
        (Pareto(0.5, shape=3.0), stats.pareto(3.0, scale=0.5)),
    ],
)
def test_independent_models_follow_their_law(model, law):
    assert stats.kstest(played(model, 3).ravel(), law.cdf).pvalue > 0.001


def test_a_trace_ends_with_its_last_round():
    table = np.arange(6.0).reshape(3, 2)
    rows = list(Replay(table).stream((4, 2), np.random.default_rng(0)))
    assert len(rows) == 3
    assert np.array_equal(rows[2], np.broadcast_to([4.0, 5.0], (4, 2)))


def test_every_worker_goes_by_its_own_class():
    replay = Replay(np.array([[10.0, 11.0], [12.0, 13.0]]))
    models = [Constant(1.0), Constant(2.0), Uniform(5.0, 6.0), replay]
    of = np.array([1, 0, 3, 2, 3, 1])
    took = played(assemble(models, of), 2, shape=(3, 6))
    assert np.array_equal(took[0][:, [0, 1, 2, 4, 5]], np.broadcast_to([2.0, 1, 10, 11, 2], (3, 5)))
    assert np.array_equal(took[1][0, [2, 4]], [12.0, 13.0])
    assert np.all((took[:, :, 3] >= 5) & (took[:, :, 3] <= 6))
    assert len(np.unique(took[:, :, 3])) == 6


def test_classes_may_differ_between_realizations():
    of = np.array([[0, 1], [1, 0]])
    took = played(assemble([Constant(1.0), Constant(2.0)], of), 1, shape=(2, 2))[0]
    assert np.array_equal(took, [[1.0, 2.0], [2.0, 1.0]])
