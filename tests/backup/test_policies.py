"""The backup policies: their estimates against exact values, and what they choose."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import backup
from paceline.backup import dbw
from paceline.backup.protocol import Arrivals, Iteration, Timings
from paceline.errors import PacelineError

NONE = Timings(*(np.zeros(0, int),) * 2, np.zeros(0), np.zeros(0, int), np.zeros(0))


def iteration(quorum=4, loss=1.0, norm2=1.0, variance=0.5, now=0.0, present=4, rate=0.1, timings=NONE):
    return Iteration(quorum, present, now, loss, norm2, variance, rate, timings)


def arrivals(before, seconds):
    place = np.arange(1, len(seconds) + 1)
    times = np.array(seconds, float)
    return Timings(np.full(len(seconds), before), place, times, place - 1, times)


def test_everyone_and_static():
    k, state = backup.create("everyone", 4).init()
    assert k == 4
    assert backup.create("everyone", 4).step(state, iteration(present=3))[0] == 3
    policy = backup.create("static:3", 4)
    assert policy.init()[0] == 3
    assert policy.step(None, iteration(present=2))[0] == 2
    assert policy.step(None, iteration(present=4))[0] == 3


@pytest.mark.parametrize("text", ["everyone", "static:3", "dbw", "blind", "adasync", "dropcompute"])
@pytest.mark.parametrize("present", [0, 1])
def test_quorum_without_workers_is_one(text, present):
    """An update needs a gradient, and the next worker that joins brings it."""
    policy = backup.create(text, 4)
    k, _ = policy.step(policy.init()[1], iteration(present=present, timings=arrivals(4, [1.0, 1.0])))
    assert k == 1


def test_only_dbw_reads_all_gradients_for_their_variance():
    policies = {text: backup.create(text, 4) for text in ("everyone", "static:3", "dbw", "blind", "adasync")}
    assert [text for text, policy in policies.items() if policy.needs_variance] == ["dbw"]
    for policy in policies.values():
        assert policy.pieces == 0  # whole tasks
        assert policy.cut(policy.init()[1]) == np.inf


def test_the_estimates_of_the_gain_by_hand():
    state = dbw.no_gain(5)
    state = dbw.update_gain(state, iteration(quorum=4, loss=2.0, norm2=3.0, variance=4.0, rate=0.5))
    found = dbw.estimate(state)
    assert (found.variance, found.norm2) == (4.0, 2.0)  # (11): 3 - 4 / 4
    assert np.isnan(found.smoothness)
    state = dbw.update_gain(state, iteration(quorum=2, loss=1.5, norm2=2.0, variance=2.0, rate=0.5))
    found = dbw.estimate(state)
    # (12): 2 (0.5 * 2 - 0.5) / (0.25 (2 + 4 / 4))
    assert found.smoothness == pytest.approx(1.0 / 0.75)
    assert (found.variance, found.norm2) == (3.0, 1.5)
    k = np.array([1.0, 3.0])
    bend = 0.5 / 0.75 * 0.25
    assert found.of(k, 0.5) == pytest.approx((0.5 - bend) * 1.5 - bend * 3.0 / k)


@pytest.mark.parametrize("text", ["dbw:depth=3,worth=noise", "dbw:depth=3"])
def test_dbw_waits_for_two_before_the_last_estimate_is_lost(text):
    """DBW, eqs. (10), (13): a single gradient gives no variance, and the mean is that of the last D updates."""
    policy = backup.create(text, 4)
    _, state = policy.init()
    k, asked, known = 4, [], []
    for update in range(15):
        times = arrivals(k, [1.0, 5.0, 6.0, 7.0])
        variance = 0.01 + 0.001 * update if k > 1 else np.nan
        told = iteration(quorum=k, loss=9.0 - 0.9 * update, norm2=10.0, variance=variance, timings=times)
        k, state = policy.step(state, told)
        asked.append(k)
        known.append(dbw.estimate(state.gain).variance)
    assert asked[4:] == asked[1:-3]  # every third
    assert sorted(asked[-3:]) == [1, 1, 2]
    assert known[-1] == pytest.approx(0.01 + 0.001 * max(t for t in range(15) if asked[t - 1] == 2))


def test_smoothness_is_unknown_after_an_update_that_moved_nothing():
    """DBW, eq. (12): the decrease says nothing about L after a rate of 0, without a gradient, or without a loss."""
    for nothing in ({"rate": 0.0}, {"norm2": 0.0, "variance": 0.0}, {"loss": np.nan}, {"variance": np.nan}):
        state = dbw.update_gain(dbw.no_gain(3), iteration(**nothing))
        state = dbw.update_gain(state, iteration(loss=0.5))
        assert np.isnan(state.smoothness).all(), nothing


def test_round_trips_are_kept_with_the_newest_last():
    workers, trips = np.array([0, 1, 0, 7, 1]), np.array([1.0, 2, 3, 4, np.nan])
    timings = Timings(np.full(5, 3), np.arange(1, 6), np.ones(5), workers, trips)
    state = dbw.update_trips(dbw.no_trips(2, 3), timings)  # there is no worker 7, and a NaN is no round trip
    np.testing.assert_array_equal(state.seconds, [[np.nan, 1.0, 3.0], [np.nan, np.nan, 2.0]])
    state = dbw.update_trips(state, Timings(*(np.full(2, 0),) * 3, np.array([0, 0]), np.array([5.0, 6.0])))
    np.testing.assert_array_equal(state.seconds[0], [3.0, 5.0, 6.0])
    assert state.steps == 2


def test_workers_times_are_zero_before_a_trip_and_pooled_for_a_worker_without_any():
    assert dbw.expected_seconds(dbw.no_trips(3, 4), "push-wait").tolist() == [0, 0, 0]
    state = dbw.TripsState(np.array([[2.0, 2.0], [np.nan, np.nan], [2.0, 2.0]]), 1)
    assert dbw.expected_seconds(state, "push-wait") == pytest.approx([2.0, 2.0, 2.0])


def test_blind_takes_the_most_gradients_per_second():
    """DBW, baseline B-DBW: by hand, k / T_k, and k^2 / T_k or 1 / T_k would be largest elsewhere."""
    assert dbw_after(arrivals(4, [1.0, 1.5, 2.9, 9.0]), text="blind") == 2  # 1, 1.33, 1.03, 0.44


def test_blind_never_waits_for_a_variance():
    policy = backup.create("blind:depth=2", 4)
    k, state = policy.init()
    for _ in range(6):
        times = arrivals(k, [1.0, 5.0, 8.0, 9.0])
        k, state = policy.step(state, iteration(quorum=k, variance=np.nan, timings=times))
        assert k == 1


def test_dbw_takes_the_largest_of_equally_good_numbers():
    """DBW, eq. (18): further gradients that cost no time are waited for, also if no noise is expected of fewer."""
    falling = (2.0, 1.5, 1.0, 0.5)  # faster than by norm2, so that L is 0 and all k promise the same
    assert dbw_after(arrivals(4, [1.0, 1.0, 1.0, 9.0]), losses=falling) == 3
    assert dbw_after(arrivals(4, [1.0, 9.0, 9.0, 9.0]), losses=falling) == 1


def test_smoothness_is_found_with_the_rate_of_its_own_update():
    """DBW, eq. (12): F(w) = w^2 has L = 2; the decrease from t - 1 to t is that of update t - 1."""
    w, state = 1.0, dbw.no_gain(5)
    for update in range(10):
        rate = (0.05, 0.1)[update % 2]
        gradient = 2.0 * w
        state = dbw.update_gain(state, iteration(loss=w * w, norm2=gradient**2, variance=0.0, rate=rate))
        w -= rate * gradient
    assert state.smoothness == pytest.approx(np.full(5, 2.0), rel=1e-9)


def test_each_number_of_gradients_promises_the_gain_of_its_own_rate():
    """DBW, eqs. (16), (18)."""
    found = dbw.Gain(variance=8.0, norm2=2.0, smoothness=4.0)
    k, rates = np.arange(1.0, 5.0), np.array([0.05, 0.1, 0.15, 0.2])
    each = [found.of(np.array([one]), rate)[0] for one, rate in zip(k, rates, strict=True)]
    assert found.of(k, rates) == pytest.approx(each)
    policy = backup.create("dbw", 4)
    _, state = policy.init()
    for loss in (2.0, 1.96, 1.93):
        told = iteration(loss=loss, variance=0.5, timings=arrivals(4, [1.0, 1.0, 1.0, 1.0]))
        chosen, after = policy.step(state, told)
        other, _ = policy.step(state, told._replace(rates=np.array([0.1, 1e-3, 1e-3, 1e-3])))
        state = after
    assert (chosen, other) == (4, 1)


def test_the_gain_never_falls_with_k_and_its_estimates_survive_single_gradients():
    state = dbw.no_gain(3)
    state = dbw.update_gain(state, iteration(loss=1.0))
    state = dbw.update_gain(state, iteration(quorum=1, loss=0.1, variance=np.nan))  # falls faster than linear
    found = dbw.estimate(state)
    assert found.smoothness == 0.0
    assert found.variance == 0.5
    assert np.isfinite(found.of(np.arange(1.0, 5.0), 0.1)).all()


def test_estimates_of_real_gradients_are_unbiased():
    """V and N of a noisy quadratic against their exact values (DBW, eqs. (10), (11))."""
    rng = np.random.default_rng(0)
    true, sigma2, k, size = np.full(20, 0.3), 0.8, 8, 20
    state = dbw.no_gain(4000)
    for _ in range(4000):
        g = true + rng.normal(0, np.sqrt(sigma2 / size), (k, size))
        mean = g.mean(0)
        variance = ((g - mean) ** 2).sum() / (k - 1)
        state = dbw.update_gain(state, iteration(quorum=k, norm2=mean @ mean, variance=variance))
    found = dbw.estimate(state)
    assert found.variance == pytest.approx(sigma2, rel=0.02)
    assert found.norm2 == pytest.approx(true @ true, rel=0.02)


def dbw_after(timings, text="dbw", rounds=4, losses=(2.0, 1.995, 1.99, 1.985), **kwargs):
    policy = backup.create(text, 4)
    k, state = policy.init()
    assert k == 4
    for loss in losses[:rounds]:
        k, state = policy.step(state, iteration(quorum=k, loss=loss, timings=timings, **kwargs))
    return k


def test_dbw_leaves_out_a_straggler_that_is_not_worth_it():
    slow_last = arrivals(4, [1.0, 1.1, 1.2, 9.0])
    assert dbw_after(slow_last, variance=0.5) == 3
    assert dbw_after(slow_last, variance=1e-6) == 1  # no noise: one gradient is as good as four
    assert dbw_after(arrivals(4, [1.0, 1.0, 1.0, 1.0])) == 4
    assert dbw_after(slow_last, text="blind") == 3


def test_dbw_takes_all_while_it_knows_nothing_or_expects_no_gain():
    assert dbw_after(arrivals(4, [1, 1, 1, 9]), rounds=1) == 4
    assert dbw_after(arrivals(4, [1, 1, 1, 9]), losses=(1.0, 1.0, 1.0, 1.0), norm2=0.3, variance=9.0) == 4


def test_dbw_asks_for_one_more_when_the_loss_rises():
    policy = backup.create("dbw", 4)
    _, state = policy.init()
    quick_first = arrivals(4, [1.0, 9.0, 9.0, 9.0])
    for loss in (2.0, 1.9, 1.8):
        k, state = policy.step(state, iteration(loss=loss, variance=1e-6, timings=quick_first))
    assert k == 1
    k, state = policy.step(state, iteration(quorum=1, loss=1.9, variance=np.nan, timings=NONE))
    assert k == 2


def test_dbw_is_deterministic_and_leaves_its_state_alone():
    policy = backup.create("dbw:times=workers", 4)
    _, state = policy.init()
    seen = [leaf.copy() for leaf in (state.times.total, state.trips.seconds)]
    happened = iteration(timings=arrivals(4, [1, 2, 3, 4]))
    first, second = policy.step(state, happened), policy.step(state, happened)
    assert first[0] == second[0]
    assert np.array_equal(seen[0], state.times.total)
    assert np.array_equal(seen[1], state.trips.seconds, equal_nan=True)


def test_worker_times_against_known_clusters():
    """Constant times: workers of 1 s and 5 s; waiting for 2 takes 1 s, for 3 takes 5 s."""
    state = dbw.no_trips(4, 8)
    for _ in range(3):
        state = dbw.update_trips(
            state, Timings(np.full(4, 4), np.arange(4), np.zeros(4), np.arange(4), np.array([1.0, 1, 5, 5]))
        )
    for mode in ("push-wait", "push-interrupt"):
        assert dbw.expected_seconds(state, mode) == pytest.approx([1, 1, 5, 5])


def test_worker_times_are_those_of_exponential_workers():
    """Interrupted, k of n exponential round trips take H_n - H_{n-k} seconds."""
    rng = np.random.default_rng(1)
    n = 6
    state = dbw.TripsState(rng.exponential(1.0, (n, 4000)), 0)
    found = np.mean([dbw.expected_seconds(state._replace(steps=s), "push-interrupt") for s in range(60)], 0)
    exact = np.cumsum(1.0 / np.arange(n, 0, -1))
    assert found == pytest.approx(exact, rel=0.05)


def test_adasync_by_its_equation():
    """DBW, baseline AdaSync."""
    policy = backup.create("adasync", 16)
    k, state = policy.init()
    assert k == 1
    ks = []
    for loss in (2.3, 1.0, 0.5, 0.07):
        k, state = policy.step(state, iteration(loss=loss, present=16))
        ks.append(k)
    assert ks == [1, 1, 2, 5]  # the printed remark that K reaches only about 5
    c = 2.3 / 0.07 / 15
    assert abs(25 + 5 * c - 16 * c) < 2 * 5 + c  # 5 is the nearest root


@pytest.mark.parametrize(("workers", "first"), [(16, 1), (16, 3), (9, 8), (2, 1)])
def test_adasync_is_the_root_of_its_equation_for_any_first_quorum(workers, first):
    """DBW, baseline AdaSync: K^2 + cK - cP = 0 with c = K_0^2 F(w_0) / ((P - K_0) F(w_t)), by its roots."""
    policy = backup.create(f"adasync:first={first}", workers)
    k, state = policy.init()
    assert k == first
    for loss in (3.0, 2.5, 1.0, 0.3, 0.1, 1e-3):
        k, state = policy.step(state, iteration(loss=loss, present=workers))
        c = first**2 * 3.0 / ((workers - first) * loss)
        assert k == round(max(np.roots([1.0, c, -c * workers]).real)), loss


def test_adasync_whose_first_quorum_is_everyone_stays_there():
    for kind in ("sync", "async"):
        policy = backup.create(f"adasync:first=4,kind={kind}", 4)
        assert policy.step(policy.init()[1], iteration(loss=1.0))[0] == 4
    policy = backup.create("adasync:first=3,kind=async", 4)
    _, state = policy.step(policy.init()[1], iteration(loss=1.0))
    assert policy.step(state, iteration(loss=4.0))[0] == 2  # 3 sqrt(1 / 4) = 1.5
    assert policy.step(state, iteration(loss=100.0))[0] == 1
    assert policy.step(state, iteration(loss=0.01))[0] == 4


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("first", [2.3, 0.0, -1.0])
def test_adasync_waits_for_all_where_the_loss_is_not_positive(kind, first):
    """DBW, baseline AdaSync: the bound's first term is 2 F E[T_K] / (eta t). Without a positive F only the second one
    is left, and K = P is best.
    """
    policy = backup.create(f"adasync:kind={kind}", 16)
    _, state = policy.init()
    k, state = policy.step(state, iteration(loss=first, present=16))
    assert k == (1 if first > 0 else 16)
    for loss in (0.0, -1.0, 5e-324, 1e-200, float("nan")):
        assert policy.step(state, iteration(loss=loss, present=16))[0] == 16
    assert policy.step(state, iteration(loss=2.0, present=16))[0] == (1 if first > 0 else 16)


def test_adasync_window_and_async():
    """DBW, baseline AdaSync: K-async has K_0 sqrt(F(w_0) / F(w_t))."""
    policy = backup.create("adasync:kind=async,window=10", 16)
    _, state = policy.init()
    k, state = policy.step(state, iteration(loss=1.0, now=10.0, present=16))
    k, state = policy.step(state, iteration(loss=0.01, now=15.0, present=16))
    assert k == 1
    k, state = policy.step(state, iteration(loss=0.01, now=20.0, present=16))
    assert k == 10
    # Decided at 20, so the next decision is at 30.
    assert policy.step(state, iteration(loss=1.0, now=29.0, present=16))[0] == 10
    assert policy.step(state, iteration(loss=1.0, now=30.0, present=16))[0] == 1


def test_arrivals_count_late_ones():
    book = Arrivals(3)
    book.arrived(1, 0, 1.0, 1.0)
    book.arrived(0, 0, 1.5, 1.5)
    first = book.updated(1, 1.5, 2)
    book.arrived(1, 1, 2.5, 1.0)
    book.arrived(2, 0, 4.0, 4.0)
    found = Timings(*map(np.concatenate, zip(first, book.updated(2, 4.5, 1), strict=True)))
    assert found.before.tolist() == [3, 3, 2, 3]
    assert found.place.tolist() == [1, 2, 1, 3]
    assert found.seconds.tolist() == [1.0, 1.5, 1.0, 4.0]
    assert found.worker.tolist() == [1, 0, 1, 2]
    assert len(book.updated(3, 5.0, 1).place) == 0


def test_arrivals_keep_trips_and_the_ends_of_pieces():
    assert Timings(*NONE[:5]).ends.shape == (0, 0)
    book = Arrivals(2)
    book.arrived(1, 0, 1.0, 0.75, np.array([0.25, 0.5]))
    book.arrived(0, 0, 2.0, 1.25, np.array([0.5, np.nan]))
    found = book.updated(1, 2.0, 2)
    assert found.trip.tolist() == [0.75, 1.25]
    np.testing.assert_array_equal(found.ends, [[0.25, 0.5], [0.5, np.nan]])
    assert book.updated(2, 3.0, 2).ends.shape == (0, 0)


def test_arrivals_forget_versions_older_than_four_for_each_worker():
    book = Arrivals(3)
    for version in range(1, 13):
        book.updated(version, float(version), 1)
    book.arrived(0, 0, 12.5, 12.5)
    assert book.updated(13, 13.0, 1).place.tolist() == [1]  # of version 0, twelve before the newest
    book.arrived(1, 0, 13.5, 13.5)
    book.arrived(1, 1, 13.5, 12.5)
    assert book.updated(14, 14.0, 1).seconds.tolist() == [12.5]  # that of version 1 alone


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("static:5", "k=5: expected a whole number, 1 to 4"),
        ("static", "k=0"),
        ("dbw:depth=0", "depth=0"),
        ("dbw:beta=0.5", "beta=0.5"),
        ("dbw:beta=0.99", "beta=0.99"),
        ("dbw:memory=0", "memory=0"),
        ("dbw:memory=1.1", "memory=1.1"),
        ("static:k=5", "k=5"),
        ("adasync:window=-0.5", "window=-0.5"),
        ("adasync:first=0", "first=0"),
        ("dropcompute:trace=0", "trace=0"),
        ("dropcompute:tau=-0.5", "tau=-0.5"),
        ("dropcompute:exchange=-0.5", "exchange=-0.5"),
        ("adasync:first=9", "first=9"),
        ("backups", "expected one of adasync, blind, dbw, dropcompute, everyone, static"),
    ],
)
def test_bad_input_raises_one_error(text, says):
    with pytest.raises(PacelineError, match=says):
        backup.create(text, 4)
