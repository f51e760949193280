"""Workers killed, frozen, slowed, leaving and joining, in every mode and under every gate, at every stage."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter

import numpy as np
import pytest

pytest.importorskip("ray")

from faulty import OrderedDelay, Orders, program
from programs import X

from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Arrive, WorkerLeave
from paceline.paramserver.samples import Epochs
from paceline.ray import Server

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("kept")]

GUARANTEES = (
    "If a parameter server's worker is lost, each sample still counts once per epoch and the record names "
    "it; damaged checkpoints are noticed.",
)

WORKERS, BATCH, RATE = 5, 50, 0.1
SECONDS = [1.5e-3, 2e-3, 2e-3, 2.5e-3, 2.5e-3]  # a sample of each worker
GRACE, GIVE_UP = 0.2, 4.0
HANGS = 100.0  # seconds; no machine is as busy


class Open(Epochs):
    """Epochs without end, until ``close`` makes the one that has begun the last."""

    def __init__(self):
        super().__init__(len(X), 10**6, seed=1)

    def close(self):
        self.epochs = self._begun


class Run:
    """A run that a script accompanies: a generator that goes on after each update, and hits whom it likes."""

    def __init__(self, config, folder, script):
        self.orders, self.pool, self.config = Orders(folder), Open(), config
        self.updates, self.at, self.given = [], [], []
        self.left = {}  # by worker: when, why, and what its deadline was, as of the last time
        self.overdue = Counter()  # by worker: events since its deadline
        self.late = []  # of each worker that was given up: events since its deadline
        self._waiting = None  # the signal for whoever waits next, and then (worker, when)
        run = self

        class Watched(Server):
            def compute(self, task):
                run.given.append((task, self._coordinator.version))
                super().compute(task)

        with Watched(
            program(self.orders),
            config,
            self.pool,
            self._updated,
            delay=OrderedDelay(self.orders, SECONDS),
            grace=GRACE,
            give_up=GIVE_UP,
        ) as self.server:
            self._coordinator = self.server._coordinator
            self._handle, self._coordinator.handle = self._coordinator.handle, self._handling
            self._script = script(self)
            self.began = time.perf_counter()
            self.values = self.server.run()

    def _updated(self, update):
        self.updates.append(update)
        self.at.append(time.perf_counter())
        assert self.at[-1] - self.began < 5 * HANGS, "the script waits for something that does not happen"
        try:
            next(self._script)
        except StopIteration:
            self.pool.close()

    def _handling(self, event):
        """Stands before the coordinator's door."""
        if isinstance(event, WorkerLeave) and event.worker in self.server.present():
            due = self._coordinator.due(GIVE_UP, GRACE).get(event.worker, np.nan)
            self.left[event.worker] = time.perf_counter(), event.why, due - event.now
            if event.why == "given up":
                self.late.append(self.overdue[event.worker])
        due = self._coordinator.due(GIVE_UP, GRACE)
        self.overdue = Counter({w: self.overdue[w] + 1 for w, at in due.items() if event.now > at})
        self._handle(event)
        arrived = isinstance(event, Arrive) and event.worker not in self._coordinator.tasks
        if arrived and isinstance(self._waiting, int):
            number, self._waiting = self._waiting, (event.worker, time.perf_counter())
            os.kill(self.server.processes[event.worker], number)

    # What scripts say; each is a generator that ends when it has happened.

    def some(self, updates):
        for _ in range(updates):
            yield

    def hit(self, worker, stage, number):
        """Send a signal to the worker when it is at that stage; (worker, when). Any worker that waits will do."""
        if stage == "waiting":
            self._waiting = int(number)
            # Within its deadline. Under SSP nobody waits for an equally quick one.
            self.orders.give(0, "slow", 0.1)
            while isinstance(self._waiting, int):
                yield
            (self.orders.folder / "0-slow").unlink()
            return self._waiting
        self.orders.give(worker, stage, int(number))
        while (at := self.orders.taken(worker, stage)) is None:
            yield
        return worker, at

    def gone(self, worker):
        while worker in self.server.present():
            yield

    def back(self, workers):
        while not workers <= self.server.present():
            yield

    def next_update(self, when):
        """Seconds from then to the next update."""
        return min(at for at in self.at if at > when) - when


STAGES = ("before", "computing", "sending", "waiting")
RULES = [
    ("bsp", "push-wait", "everyone"),
    # test_server.py kills a worker in this mode, and paramserver/test_coordinator.py has any order of its faults.
    pytest.param("bsp", "push-interrupt", "static:4", marks=pytest.mark.nightly),
    ("bsp", "pull", "static:4"),
    pytest.param("ssp:1", "push-wait", "everyone", marks=pytest.mark.nightly),
    ("lsp:2:2", "push-wait", "everyone"),
]


@pytest.mark.parametrize(("sync", "mode", "backup"), RULES)
def test_other_workers_continue_after_any_fault(sync, mode, backup, tmp_path):
    frozen, killed, told = [], [], {}

    def script(run):
        yield from run.some(4)
        for worker, stage in enumerate(STAGES, 1):
            worker, at = yield from run.hit(worker, stage, signal.SIGSTOP)
            yield from run.gone(worker)
            os.kill(run.server.processes[worker], signal.SIGCONT)
            frozen.append((stage, at, *run.left[worker]))
            yield from run.back({worker})
        run.orders.give(4, "slow", 0.5)  # far beyond its deadline
        slowed = len(run.updates)
        while mode == "push-wait" and not any(u.compute[4] > 0.4 for u in run.updates[slowed:]):
            yield
        yield from run.some(1 if mode == "push-wait" else 10)
        (run.orders.folder / "4-slow").unlink()
        for worker, stage in ((1, "before"), (2, "computing"), (3, "sending"), (None, "waiting")):
            yield from run.back({worker} - {None})
            worker, at = yield from run.hit(worker, stage, signal.SIGKILL)
            yield from run.gone(worker)
            killed.append((stage, at, *run.left[worker]))
            yield from run.some(2)
            if len(killed) <= 2:  # these two come while the others go
                run.server.add()
        # In whichever places were free by then: the last one killed may have been one of these two.
        while len(run.server.present()) < WORKERS - len(killed) + 2:
            yield
        told["worker"], told["at"] = max(run.server.present()), time.perf_counter()
        run.server.leave(told["worker"])
        yield from run.gone(told["worker"])
        told["updates"] = len(run.updates)
        yield from run.some(3)

    config = ServerConfig(WORKERS, BATCH, sync=sync, mode=mode, backup=backup, policy="level", lr=RATE)
    run = Run(config, tmp_path, script)

    for stage, at, left, why, over in frozen:
        print(
            f"{sync} {mode} frozen {stage}: given up after {left - at:.3f} s, {-over:.3f} s past its deadline"
        )
        assert why == "given up"
        assert over <= 0.0  # not before its deadline
        assert run.next_update(left) < HANGS
    # In the first look after it: at most one message of each worker, and one change of each, came before.
    assert max(run.late) <= 2 * WORKERS
    for stage, at, left, why, _ in killed:
        print(
            f"{sync} {mode} killed {stage}: seen after {left - at:.3f} s, update {run.next_update(at):.3f} s"
        )
        assert why in ("died", "given up")  # its deadline may be over before the news is here
        assert run.next_update(at) < HANGS
    print(f"{sync} {mode} left: next update after {run.next_update(told['at']):.3f} s")
    assert run.next_update(told["at"]) < HANGS
    assert not any(update.loads[told["worker"]] for update in run.updates[told["updates"] + 1 :])
    accounts(run)


def accounts(run):
    """Every sample is used once an epoch, and the parameters are what the record's gradients make of them."""
    assert all(task.version == newest for task, newest in run.given)  # joiners' too
    assert set(run.pool.uses) == {run.pool.epochs}
    assert sum(update.batch for update in run.updates) == run.pool.epochs * len(X)
    assert sum(update.dropped_samples for update in run.updates) <= sum(
        task.load for task, _ in run.given
    ) - run.pool.epochs * len(X)
    used = [task.number for update in run.updates for task in update.moved]
    assert len(used) == len(set(used))
    asynchronous = run.config.sync != "bsp"
    history = [np.zeros(3)]
    for update in run.updates:
        total = sum(task.load * (history[task.version] - X[task.taken].mean(0)) for task in update.moved)
        batch = run.config.global_batch if asynchronous else update.batch
        history.append(history[-1] - RATE * total / batch)
    assert np.abs(run.values - history[-1]).max() < 1e-9
    assert np.abs(run.values - X.mean(0)).max() < 0.3
