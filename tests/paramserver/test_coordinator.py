"""The coordinator under any order of events: nobody waits for who is gone, and no sample is lost or used twice."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Answer, Arrive, Moved, Start, WorkerJoin, WorkerLeave
from paceline.paramserver.samples import Epochs

SAMPLES, EPOCHS, WORKERS = 60, 2, 4


class Engine:
    """Computes nothing; remembers what it was asked for."""

    def __init__(self):
        self.running, self.gradients, self.loads = {}, set(), []

    def compute(self, task):
        assert task.worker not in self.running
        self.running[task.worker] = task
        self.loads.append(task.load)

    def cancel(self, tasks):
        for task in tasks:
            if self.running.get(task.worker) == task:
                del self.running[task.worker]
            self.gradients.discard(task.number)

    def update(self, parts, batch, rate):
        for task, _ in parts:
            self.gradients.remove(task.number)  # arrived, and used once
        return Moved(1.0, 1.0, 1.0)


def made(samples=SAMPLES, epochs=EPOCHS, workers=WORKERS, policy="level", **config):
    """An engine, its pool, the updates, and the coordinator, which has started."""
    rules = ServerConfig(workers, 12, policy=policy, **config)
    engine, pool, log = Engine(), Epochs(samples, epochs, seed=0, pairs=rules.pairs()), []
    coordinator = Coordinator(engine, rules, pool, log.append)
    coordinator.handle(Start(0.0))
    return engine, pool, log, coordinator


def finish(engine, coordinator, worker, now):
    task = engine.running.pop(worker)
    engine.gradients.add(task.number)
    assert coordinator.tasks[worker] == task
    coordinator.handle(Arrive(now, worker, task.number))


RULES = [
    *(("bsp", mode, backup) for mode in ("push-wait", "push-interrupt", "pull") for backup in
      ("everyone", "static:2", "dbw")),
    ("bsp:late=use", "push-wait", "static:2"),
    ("bsp:late=use", "pull", "static:3"),
    ("ssp:0", "push-wait", "everyone"),
    ("ssp:2", "push-wait", "everyone"),
    ("lsp:2:2", "push-wait", "everyone"),
    ("lsp:3:1", "push-wait", "everyone"),
    ("asp", "push-wait", "everyone"),
]  # fmt: skip
events = st.lists(
    st.tuples(st.sampled_from(["finish"] * 6 + ["leave", "join"]), st.integers(0, WORKERS - 1)), max_size=80
)


def play(engine, pool, coordinator, events):
    """Finishes all samples, with these events at the beginning."""
    now = 0.0
    for what, worker in events:
        now += 0.1
        if pool.finished():
            break
        if what == "finish" and engine.running:
            finish(engine, coordinator, sorted(engine.running)[worker % len(engine.running)], now)
        elif what == "leave" and len(coordinator.present) > 1:
            coordinator.handle(WorkerLeave(now, worker))
        elif what == "join" and worker not in coordinator.present:
            coordinator.handle(WorkerJoin(now, worker))
    while not pool.finished():
        now += 0.1
        assert engine.running, "everybody waits for somebody who is gone"
        finish(engine, coordinator, min(engine.running), now)


@pytest.mark.parametrize(("sync", "mode", "backup"), RULES)
@given(events=events)
@settings(max_examples=30)
def test_workers_come_and_go_at_any_stage(sync, mode, backup, events):
    engine, pool, log, coordinator = made(sync=sync, mode=mode, backup=backup)
    play(engine, pool, coordinator, events)
    assert set(pool.uses) == {EPOCHS}
    assert sum(update.batch for update in log) == SAMPLES * EPOCHS
    assert set(engine.running) <= coordinator.present


@pytest.mark.parametrize(("sync", "mode", "backup"), RULES)
@given(events=events, samples=st.integers(SAMPLES, SAMPLES + 12))
@settings(max_examples=15)
def test_least_loads_of_two_never_leave_a_worker_with_one_sample(sync, mode, backup, events, samples):
    limits = ((2, None),) * WORKERS
    engine, pool, _, coordinator = made(samples, 1, sync=sync, mode=mode, backup=backup, limits=limits)
    play(engine, pool, coordinator, events)
    assert set(pool.uses) == {1}
    assert min(engine.loads) >= 2


def test_error_lists_the_events_before_it():
    engine, _, _, coordinator = made()
    finish(engine, coordinator, 2, 1.0)
    coordinator.handle(WorkerLeave(1.5, 3, "died"))
    with pytest.raises(PacelineError, match=r"^worker 7: expected a place below 4\n") as refused:
        coordinator.handle(WorkerJoin(2.0, 7))
    assert refused.value.__notes__ == [
        "at 2.000 s join 7 came to this parameter server after: at 0.000 s start; at 1.000 s arrive 2, 2; "
        "at 1.500 s leave 3, died"
    ]


def test_an_event_in_the_middle_of_another_is_refused():
    engine, _, _, coordinator = made()
    engine.cancel = lambda tasks: coordinator.handle(Answer(1.0, 0))
    with pytest.raises(RuntimeError, match=r"while another was handled: at 1\.000 s leave 1, left"):
        coordinator.handle(WorkerLeave(1.0, 1))


@pytest.mark.parametrize(
    ("sync", "mode"), [("asp", "push-wait"), ("bsp", "push-wait"), ("bsp", "pull"), ("ssp:1", "push-wait")]
)
def test_what_the_last_one_leaves_undone_goes_to_those_who_had_nothing_left(sync, mode):
    # 6 samples each; then 6 are left.
    engine, pool, log, coordinator = made(18, 1, 2, "equal", sync=sync, mode=mode)
    for worker in (0, 1):
        finish(engine, coordinator, worker, 1.0 + worker)
    assert set(engine.running) == {0}
    coordinator.handle(WorkerLeave(3.0, 0))
    finish(engine, coordinator, 1, 4.0)
    assert pool.finished()
    assert sum(update.batch for update in log) == 18


def test_who_is_interrupted_and_does_not_answer_is_given_up():
    engine, _, _, coordinator = made(mode="push-interrupt", backup="static:3", policy="equal")
    for step in range(1, 9):
        for worker in (0, 1, 2):
            finish(engine, coordinator, worker, float(step))
        if step == 4:
            coordinator.handle(Answer(4.2, 3))
    load = engine.running[3].load
    due = coordinator.due(factor=4.0, grace=0.5)
    assert due[3] == pytest.approx(4.2 + 4.0 * 1.0 + 0.5)  # since it answered, not since its newest task
    assert due[0] == pytest.approx(8.0 + 4.0 * engine.running[0].load / load + 0.5)


def test_who_is_slow_is_waited_for_when_it_comes_back():
    engine, _, log, coordinator = made(policy="equal")
    for worker in (0, 1, 2):
        finish(engine, coordinator, worker, 1.0)
    late = engine.running[3]
    assert coordinator.due(4.0, 0.5)[3] == pytest.approx(4.5)
    coordinator.handle(WorkerLeave(4.5, 3, "given up"))
    assert log[-1].present == 3
    coordinator.handle(WorkerJoin(10.0, 3, late))  # it took 10 s
    load = engine.running[3].load
    assert coordinator.due(4.0, 0.5)[3] == pytest.approx(10.0 + 1.5 * 10.0 / late.load * load + 0.5)
    for worker in (0, 1, 2):
        finish(engine, coordinator, worker, 11.0)
    finish(engine, coordinator, 3, 14.0)
    assert np.flatnonzero(log[-1].loads).tolist() == [0, 1, 2, 3]
    due = coordinator.due(4.0, 0.5)[3]
    # By its own measure now.
    assert due == pytest.approx(14.0 + 4 * 4.0 / load * engine.running[3].load + 0.5)


@pytest.mark.parametrize(
    ("sync", "backup"),
    [("bsp", "static:2"), ("bsp", "everyone"), ("asp", "everyone"), ("lsp:2:2", "everyone")],
)
def test_a_proportional_rate_goes_by_samples_not_by_gradients(sync, backup):
    rule = {"rate": "proportional", "lr": 0.6, "limits": ((1, 1), (1, 2), (1, None), (1, None))}
    engine, _, log, coordinator = made(policy="equal", sync=sync, backup=backup, **rule)
    for now in range(40):
        if not engine.running:
            break
        finish(engine, coordinator, sorted(engine.running)[now * now % 7 % len(engine.running)], now + 1.0)
    assert len(log) > 8
    assert len({int(update.loads.sum()) for update in log}) > 1 or backup == "everyone"
    for update in log:  # a group of lsp and asp's one gradient are divided by the whole batch as it is
        portion = update.loads.sum() / 12 if sync == "bsp" else 1.0
        assert update.rate == pytest.approx(0.6 * portion)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (((0, None), (None, None)), "limits of worker 0: least 0; expected 1 sample or more"),
        (((None, None), (-3, 5)), "limits of worker 1: least -3; expected 1"),
        (((None, None),), "limits for 1 of 2 workers"),
        (((None, None),) * 3, "limits for 3 of 2 workers"),
    ],
)
def test_a_least_of_nothing_is_refused_instead_of_changed(limits, words):
    with pytest.raises(PacelineError, match=words):
        ServerConfig(2, 12, limits=limits)


def test_a_version_has_the_whole_batch_although_its_plan_is_from_before_a_worker_left():
    engine, _, _, coordinator = made(backup="static:2", policy="equal")
    coordinator.handle(WorkerLeave(0.5, 3, "died"))
    finish(engine, coordinator, 0, 1.0)
    finish(engine, coordinator, 1, 1.0)  # nothing is measured of worker 2, so the policy sees no round yet
    finish(engine, coordinator, 2, 1.5)  # late: its next task is of the new version, too
    assert [engine.running[worker].load for worker in (0, 1, 2)] == [4, 4, 4]


def test_workers_with_little_room_get_what_they_can_hold_when_another_has_left():
    engine, _, log, coordinator = made(workers=3, policy="equal", limits=((1, 5),) * 3)
    coordinator.handle(WorkerLeave(0.5, 1, "died"))
    for _ in range(2):
        finish(engine, coordinator, 0, 1.0)
        finish(engine, coordinator, 2, 1.0)
    assert [update.loads.tolist() for update in log] == [[4, 0, 4], [5, 0, 5]]
