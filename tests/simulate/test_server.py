"""The event-driven server: exact logs, identities between gates, members that come and go; and real learning."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backup.dbw import Dbw
from paceline.errors import PacelineError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Draws, Epochs
from paceline.simulate.server import MemberEvent, RoundTrips, SimulatedServer, SpeedChange
from paceline.simulate.timing import Constant, Exponential, Lognormal, Replay, Uniform
from support.quadratic import Quadratic


def server(seconds, sync="bsp", mode="push-wait", backup="everyone", policy="equal", batch=None, **kwargs):
    n = len(seconds)
    learner = Quadratic(400, 1)
    table = kwargs.pop("trips", None) or RoundTrips(n, Constant(np.array(seconds, float)))
    pool = kwargs.pop("pool", None) or Draws(400, 3)
    config = ServerConfig(
        n, batch or 10 * n, sync=sync, mode=mode, backup=backup, policy=policy, lr=0.1, momentum=0.5
    )
    return SimulatedServer(learner, config, table, pool, **kwargs), learner


def log(updates):
    return [(u.ended, np.flatnonzero(u.loads).tolist(), u.staleness) for u in updates]


def test_waiting_for_all_takes_as_long_as_the_slowest():
    run, _ = server([1, 2, 5])
    assert log(run.run(updates=2)) == [(5.0, [0, 1, 2], [0] * 3), (10.0, [0, 1, 2], [0] * 3)]


def test_push_wait_and_push_interrupt():
    run, learner = server([1, 2, 5], backup="static:2")
    # Worker 2 ends its first gradient at 5, drops it and begins again.
    assert log(run.run(updates=4)) == [(now, [0, 1], [0, 0]) for now in (2.0, 4.0, 6.0, 8.0)]
    assert [dict(u.dropped) for u in run.updates[:4]] == [{}, {}, {"late": 1}, {}]
    assert len(learner.used) == 8  # only what was used
    run, _ = server([1, 2, 5], mode="push-interrupt", backup="static:2")
    assert [dict(u.dropped) for u in run.run(updates=3)] == [{}, {"interrupted": 1}, {"interrupted": 1}]


def test_late_gradients_can_be_used():
    run, _ = server([1, 2, 5], sync="bsp:late=use", backup="static:2")
    assert log(run.run(updates=3))[-1] == (6.0, [0, 1, 2], [0, 0, 2])


def test_asynchronous_gradients_are_stale():
    run, _ = server([1, 3], sync="asp")
    assert log(run.run(updates=4)) == [(1.0, [0], [0]), (2.0, [0], [0]), (3.0, [1], [2]), (3.0, [0], [1])]


@pytest.mark.parametrize("other", ["lsp:5:3", "ssp:0"])
def test_identities_hold_bit_for_bit(other):
    def parameters(sync):
        run, _ = server([1] * 5, sync=sync, trips=RoundTrips(5, Exponential(1.0, 0.2), seed=4))
        run.run(updates=30)
        return run.parameters.values

    assert np.array_equal(parameters("bsp"), parameters(other))


def test_everyone_is_the_same_as_one_process():
    """n gradients of uneven batches, weighted by samples, are that of the whole batch (DBW, eqs. (1), (2), (3))."""
    trips = RoundTrips(3, Constant(0.0), Constant(np.array([1.0, 1.0, 3.0])))
    run, learner = server([0] * 3, policy="level", batch=61, trips=trips)
    updates = run.run(updates=12)
    w, v = np.zeros(1), np.zeros(1)
    assert all(u.batch == 61 for u in updates)
    assert updates[-1].loads[2] < updates[-1].loads[0]
    for index in range(12):
        drawn = np.concatenate(learner.used[3 * index : 3 * index + 3])
        v = 0.5 * v + (w - learner.x[drawn].mean())
        w = w - 0.1 * v
    assert np.allclose(run.parameters.values, w, atol=1e-12)


def test_the_backup_policy_knows_the_rate_of_each_number_of_gradients(monkeypatch):
    told, step = [], Dbw.step

    def spied(self, state, happened):
        told.append(happened)
        return step(self, state, happened)

    monkeypatch.setattr(Dbw, "step", spied)
    trips = RoundTrips(4, Exponential(1.0), seed=3)
    config = ServerConfig(4, 40, backup="dbw", policy="equal", rate="proportional", lr=0.1)
    updates = SimulatedServer(Quadratic(400, 1), config, trips, Draws(400, 3)).run(updates=20)
    assert len({update.quorum for update in updates}) > 1
    for happened, after in zip(told, updates[1:], strict=False):
        assert happened.rates == pytest.approx(0.1 * np.arange(1, 5) / 4)
        assert after.rate == happened.rates[after.quorum - 1]


def test_level_balances_while_a_backup_policy_chooses_how_many():
    trips = RoundTrips(4, Constant(0.01), Constant(np.array([0.1, 0.1, 0.1, 0.4])))
    run, _ = server([0] * 4, backup="static:3", policy="level", batch=100, trips=trips)
    last = run.run(updates=30)[-1]
    assert last.shares == pytest.approx(np.array([4, 4, 4, 1]) / 13, rel=0.1)


@pytest.mark.parametrize("mode", ["push-wait", "push-interrupt", "pull"])
@pytest.mark.parametrize("backup", ["everyone", "static:3"])
def test_every_sample_is_used_once_an_epoch_despite_drops(mode, backup):
    pool = Epochs(400, 3, seed=1)
    run, learner = server(
        [0] * 5, mode=mode, backup=backup, pool=pool, trips=RoundTrips(5, Exponential(1.0), seed=2), batch=55
    )
    run.run()
    assert set(pool.uses) == {3}
    assert np.bincount(np.concatenate(learner.used)).tolist() == [3] * 400
    assert sum(u.batch for u in run.updates) == 1200
    if backup != "everyone":
        assert sum(sum(u.dropped.values()) for u in run.updates) > 0


def test_a_resumed_epoch_uses_only_what_is_left():
    pool = Epochs(100, 2, seed=5)
    first = [pool.take(0, 30) for _ in range(4)]  # 120: into the second epoch
    for taken in first[:3]:
        pool.used(taken)
    again = Epochs(100, 2, seed=5)
    again.load_state_dict(pool.state_dict())
    while (taken := again.take(0, 17)) is not None:
        again.used(taken)
    assert again.uses.tolist() == [2] * 100
    assert again.finished()


@pytest.mark.parametrize("sync", ["bsp", "ssp:2", "lsp:2:2", "asp"])
def test_a_frozen_worker_is_given_up_and_comes_back(sync):
    members = [MemberEvent(10.5, 1, "freeze"), MemberEvent(40.0, 1, "thaw")]
    run, _ = server([1, 1, 1], sync=sync, members=members)
    updates = run.run(seconds=60.0)
    times = [u.ended for u in updates]
    assert max(np.diff(times)) <= 1 + 4.0 + 1.0 + 1e-9  # its deadline: 4 round trips and 1 s
    there = [u.ended for u in updates if u.loads[1]]
    assert not [t for t in there if 12 < t < 40]
    assert max(there) > 50


def test_leaving_and_joining():
    members = [MemberEvent(10.5, 0, "leave"), MemberEvent(20.5, 2, "join")]
    run, _ = server([1, 1, 1], members=members, absent=[2])
    updates = run.run(seconds=30.0)
    who = {u.ended: np.flatnonzero(u.loads).tolist() for u in updates}
    assert who[5.0] == [0, 1]
    assert who[15.0] == [1]
    assert who[25.5] == [1, 2]


def test_members_come_and_go_after_so_many_updates():
    events = [MemberEvent(3, 0, "leave"), MemberEvent(5, 2, "join")]
    run, _ = server([1, 1, 1], by_update=events, absent=[2])
    updates = run.run(updates=6)
    who = [[0, 1]] * 3 + [[1], [1], [1, 2]]
    assert log(updates) == [(n, each, [0] * len(each)) for n, each in enumerate(who, 1)]
    assert [dict(u.dropped) for u in updates] == [{}, {}, {}, {"left": 1}, {}, {}]


@pytest.mark.parametrize("back", [4, float("inf")])
def test_the_others_wait_a_given_time_for_who_stops_without_a_word(back):
    members = [MemberEvent(2, 1, "freeze"), MemberEvent(back, 1, "thaw")]
    run, _ = server([1, 1, 1], by_update=members, give_up=0.0, grace=3.0)
    updates = run.run(updates=6)
    after = [0, 1, 2] if back == 4 else [0, 2]
    assert [entry[:2] for entry in log(updates)] == [
        (1.0, [0, 1, 2]),
        (2.0, [0, 1, 2]),
        (5.0, [0, 2]),  # 3 s after it began
        (6.0, [0, 2]),
        (7.0, after),
        (8.0, after),
    ]
    assert [dict(u.dropped) for u in updates][2] == {"given up": 1}


def test_who_stops_in_the_first_round_is_given_up_too():
    run, _ = server([1, 1], by_update=[MemberEvent(0, 1, "freeze")], give_up=0.0, grace=3.0)
    assert [entry[:2] for entry in log(run.run(updates=2))] == [(3.0, [0]), (4.0, [0])]


def test_worker_that_thaws_in_time_continues_its_task():
    members = [MemberEvent(3, 1, "freeze"), MemberEvent(6, 1, "thaw")]
    run, _ = server([1, 1, 1], sync="asp", by_update=members, give_up=0.0, grace=9.0)
    found = [(now, *who) for now, who, _ in log(run.run(updates=9))]
    assert found == [(1, 0), (1, 1), (1, 2), (2, 0), (2, 2), (3, 0), (3, 2), (3, 1), (4, 0)]


def test_round_trips_of_links_knees_and_noise():
    def transfer(number):
        return np.array([0.0, 2.0 if number < 3 else 4.0])

    trips = RoundTrips(2, Constant(1.0), Constant(0.5), knee=np.array([0.0, 10.0]), transfer=transfer)
    assert trips.seconds(0, 0, 4, 0.0) == 3.0
    assert trips.seconds(1, 2, 4, 0.0) == 1.0 + 2.0 + 5.0
    assert trips.seconds(1, 3, 12, 0.0) == 1.0 + 4.0 + 6.0
    noisy = RoundTrips(1, Constant(0.0), Constant(1.0), seed=3, noise=0.3)
    drawn = np.log([noisy.seconds(0, number, 1, 0.0) for number in range(2000)])
    assert drawn.std() == pytest.approx(0.3, rel=0.05)
    assert abs(drawn.mean()) < 0.03


def test_a_slowdown_at_a_given_time():
    trips = RoundTrips(4, Constant(1.0), changes=[SpeedChange(10.0, (0, 1), 5.0)])
    run, _ = server([0] * 4, trips=trips)
    times = [u.ended for u in run.run(seconds=26.0)]
    assert times == [*range(1, 11), 15.0, 20.0, 25.0]


@pytest.mark.parametrize(
    "delay", [Constant(1.0), Uniform(0.5, 1.5), Exponential(0.7, 0.3), Lognormal(0.9, 0.4, 0.05, 3.0)]
)
def test_runs_repeat_exactly(delay):
    def played(seed):
        run, _ = server([0] * 4, backup="dbw", trips=RoundTrips(4, delay, seed=seed))
        return [(u.ended, u.quorum, u.loss) for u in run.run(updates=25)]

    assert played(1) == played(1)
    if not isinstance(delay, Constant):
        assert played(1) != played(2)


def test_trace_shorter_than_the_run_raises():
    run, _ = server([0] * 2, trips=RoundTrips(2, Replay(np.ones((5, 2)))))
    with pytest.raises(PacelineError, match="the trace has 5 rounds"):
        run.run(updates=6)
    gap = RoundTrips(2, Replay(np.array([[1.0, 1.0], [1.0, np.nan]])))
    with pytest.raises(PacelineError, match="without gaps"):
        server([0] * 2, trips=gap)[0].run(updates=2)


@pytest.mark.parametrize("backup", ["blind", "blind:times=workers"])
def test_the_number_waited_for_follows_a_slowdown_of_half_the_workers(backup):
    """Fig. 9: from n to n / 2 when half of the workers become five times slower (DBW, baseline B-DBW)."""
    trips = RoundTrips(8, Constant(1.0), changes=[SpeedChange(30.0, (0, 1, 2, 3), 5.0)])
    run, _ = server([0] * 8, backup=backup, trips=trips)
    ks = {u.ended: u.quorum for u in run.run(seconds=120.0)}
    assert all(k == 8 for now, k in ks.items() if now <= 30)
    assert np.median([k for now, k in ks.items() if now > 80]) == 4


@pytest.mark.parametrize(
    ("choices", "says"),
    [
        ({"backup": "static:9"}, "k=9: expected a whole number, 1 to 4"),
        ({"sync": "ssp:3", "backup": "dbw"}, "leave out --backup"),
        ({"sync": "asp", "mode": "pull"}, "exclude each other"),
        ({"lr": -1.0}, "expected a positive learning rate"),
        ({"global_batch": 3}, "global_batch=3: expected a whole number, 4 to"),
        ({"momentum": 1.0}, "momentum=1"),
    ],
)
def test_bad_input_raises_one_error(choices, says):
    with pytest.raises(PacelineError, match=says):
        ServerConfig(**{"workers": 4, "global_batch": 40} | choices)


def test_real_gradients_learn():
    pytest.importorskip("torch")
    from paceline.data import datasets
    from paceline.learners.images import Images

    learner = Images(datasets.load("digits"), "mlp")
    config = ServerConfig(8, 256, backup="dbw", lr=0.2)
    run = SimulatedServer(learner, config, RoundTrips(8, Exponential(0.7, 0.3)), Draws(1500, 0))
    updates = run.run(updates=60)
    assert updates[-1].loss < 0.6 < 2.0 < updates[0].loss
    assert learner.test(run.parameters.values)[1] > 0.8
