"""What is not begun by a threshold is dropped: the threshold's choice, and what becomes of samples and gradients."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import PacelineError, backup
from paceline.backup.dropcompute import speed_up, threshold
from paceline.backup.protocol import Iteration, Timings
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Draws, Epochs
from paceline.simulate.server import RoundTrips, SimulatedServer
from paceline.simulate.timing import Constant, Exponential
from support.guarantees import guarantee
from support.quadratic import Quadratic


def served(backup, trips, n, batch, pool=None, policy="equal"):
    learner = Quadratic(400, 1)
    config = ServerConfig(n, batch, backup=backup, policy=policy, lr=0.1)
    return SimulatedServer(learner, config, trips, pool or Draws(400, 3)), learner


def by_steps(ends, tau, exchange):
    """The effective speed-up, piece by piece."""
    ratios = []
    for update in ends:
        done, took = 0, 0.0
        for worker in update:
            for end in worker:
                done += 1
                if end >= tau:
                    break
            took = max(took, end)
        ratios.append(done / update.size * (update[:, -1].max() + exchange) / (took + exchange))
    return np.mean(ratios)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(2, 6), st.floats(0, 3), st.floats(0, 2))
def test_the_effective_speed_up_is_that_of_the_rounds_piece_by_piece(seed, n, pieces, tau, exchange):
    ends = np.cumsum(np.random.default_rng(seed).exponential(0.5, (4, n, pieces)), axis=-1)
    assert speed_up(ends, tau, exchange) == pytest.approx(by_steps(ends, tau, exchange))
    taus = np.unique(ends)
    gains = np.array([by_steps(ends, each, exchange) for each in taus])
    chosen = threshold(ends, exchange)
    assert chosen == max(taus[gains >= 0.99 * gains.max()])
    assert speed_up(ends, chosen, exchange) >= 0.99  # a threshold that drops nothing is among them


def test_threshold_of_many_pieces_is_one_of_a_thousand_from_first_to_last():
    ends = np.arange(1.0, 3001.0).reshape(1, 1, 3000)  # one worker, so that nothing is gained by dropping
    assert threshold(ends) == 3000.0
    # The second worker's last piece takes a thousand times as long as all others together.
    ends = np.stack([np.arange(1.0, 1502.0), np.append(np.arange(1.0, 1501.0), 1.5e6)])[None]
    assert threshold(ends) == pytest.approx(1500, abs=3)


def test_updates_are_traced_until_the_threshold_is_found_and_only_with_all_workers():
    policy = backup.create("dropcompute:trace=2,pieces=2", 2)
    k, state = policy.init()
    assert (k, policy.cut(state)) == (2, np.inf)

    def after(state, ends, present=2):
        ends = np.array(ends, float)
        nothing = np.zeros(len(ends))
        timings = Timings(*(nothing.astype(int),) * 2, nothing, np.arange(len(ends)), nothing, ends)
        return policy.step(state, Iteration(2, present, 0.0, 1.0, 1.0, 1.0, 0.1, timings))

    ends = [[1.0, 2.0], [1.0, 9.0]]
    k, first = after(state, ends)
    assert (k, len(first.ends), first.tau) == (2, 1, np.inf)
    for partial in ([[1.0, 2.0]], [[1.0, 2.0], [1.0, np.nan]], [[1.0, 2.0, 3.0]] * 2):
        k, same = after(first, partial, present=1)
        assert (k, len(same.ends), policy.cut(same)) == (1, 1, np.inf)
    _, found = after(first, ends)
    assert found.ends == ()
    # With 1.0, half of the pieces run in 1 s instead of 9 s; with 2.0, the one that ends at 9.0 has begun.
    assert policy.cut(found) == 1.0
    _, later = after(found, ends)
    assert (later.ends, later.tau) == ((), 1.0)


def test_dropcompute_traces_twenty_updates_of_eight_pieces_by_default():
    policy = backup.create("dropcompute", 4)
    assert (policy.pieces, policy.trace, policy.tau, policy.exchange) == (8, 20, 0.0, 0.0)
    assert policy.init()[1].tau == np.inf
    assert backup.create("dropcompute:tau=0.5", 4).init()[1].tau == 0.5


def test_pieces_that_have_begun_count_and_the_others_are_given_back():
    trips = RoundTrips(3, Constant(np.array([0.0, 0.0, 1.0])), Constant(np.array([0.1, 0.2, 0.2])))
    run, learner = served("dropcompute:tau=1.5,pieces=5", trips, 3, 30, Epochs(400, 2, 0))
    first, second = run.run(updates=2)
    # Worker 1 ends pieces of 2 samples at .4, .8, 1.2, 1.6; worker 2 at 1.4, 1.8; worker 0 all at 1.
    assert (first.ended, first.loads.tolist()) == (pytest.approx(1.8), [10, 8, 4])
    assert (first.dropped, first.dropped_samples) == ({"cut short": 2}, 8)
    assert second.ended == pytest.approx(3.6)
    taken = np.concatenate(learner.used)
    assert len(np.unique(taken)) == len(taken)  # what was dropped is handed out again, and nothing twice


@guarantee(
    "`dropcompute` on the virtual clock uses each sample once per epoch: dropped ones are handed out again."
)
def test_each_sample_is_used_once_an_epoch_although_much_is_dropped():
    pool = Epochs(400, 3, 1)
    trips = RoundTrips(4, Constant(0.0), Exponential(0.1), 5)
    run, _ = served("dropcompute:tau=0.4,pieces=4", trips, 4, 40, pool)
    updates = run.run()
    np.testing.assert_array_equal(pool.uses, np.full(400, 3))
    assert sum(u.dropped_samples for u in updates) > 100


def test_the_step_is_divided_by_the_samples_that_ran():
    trips = RoundTrips(2, Constant(0.0), Constant(np.array([0.1, 0.3])))
    run, learner = served("dropcompute:tau=0.5,pieces=5", trips, 2, 20)
    run.run(updates=1)
    (a, first), (b, second) = learner.gradients
    assert (a, b) == (6, 2)
    np.testing.assert_allclose(run.parameters.values, -0.1 * (a * first + b * second) / (a + b))


def test_the_gradient_is_unbiased_if_lateness_has_nothing_to_do_with_the_samples():
    trips = RoundTrips(4, Constant(0.0), Exponential(0.1), 7)
    run, learner = served("dropcompute:tau=0.4,pieces=4", trips, 4, 40)
    run.run(updates=1500)
    at, means = 0.0, []
    for update, parts in zip(run.updates, np.arange(len(learner.gradients)).reshape(-1, 4), strict=False):
        sizes, found = zip(*(learner.gradients[each] for each in parts), strict=True)
        step = np.average(np.array(found)[:, 0], weights=sizes)
        means.append(step - (at - learner.x.mean()))
        at -= 0.1 * step
        assert update.batch == sum(sizes)
    assert abs(np.mean(means)) < 4 * np.std(means) / np.sqrt(len(means))


def test_the_threshold_is_found_from_a_trace_and_makes_stalling_workers_faster():
    def seconds_a_sample(backup):
        trips = RoundTrips(8, Constant(0.0), Exponential(0.07, 0.03), 2)
        run, _ = served(backup, trips, 8, 128)
        updates = run.run(updates=120)
        later = updates[20:]
        return (updates[-1].ended - updates[19].ended) / sum(u.batch for u in later), updates

    alone, _ = seconds_a_sample("everyone")
    cut, updates = seconds_a_sample("dropcompute")
    assert all(not u.dropped_samples for u in updates[:20])
    assert cut < 0.8 * alone


def test_nothing_is_dropped_without_late_workers():
    trips = RoundTrips(4, Constant(0.5), Constant(0.01))
    run, _ = served("dropcompute:exchange=0.1", trips, 4, 40)
    assert not any(u.dropped_samples for u in run.run(updates=60))


def test_what_cannot_cut_a_task_short_refuses_it():
    with pytest.raises(PacelineError, match="only paceline simulate --learn can simulate"):
        ServerConfig(4, 40, backup="dropcompute").build(shared=True)
    with pytest.raises(PacelineError, match="with sync bsp"):
        ServerConfig(4, 40, backup="dropcompute", sync="lsp:2")
    with pytest.raises(PacelineError, match="dropcompute: pieces=1: expected a whole number, 2 to"):
        backup.create("dropcompute:pieces=1", 4)
