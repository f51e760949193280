"""Shared rounds while workers come and go: each update is of the whole batch, no sample more and none less.

The coordinator and the rounds in pieces are the real ones; workers answer in the order that Hypothesis chooses.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ray")

from paceline.paramserver.config import ServerConfig
from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Moved, Start, WorkerJoin, WorkerLeave
from paceline.paramserver.samples import Epochs
from paceline.ray.pieces import Pieces

WORKERS, BATCH, SAMPLES, EPOCHS = 3, 12, 60, 3


class Engine:
    """What ``paceline.ray.Server`` does in shared rounds, without Ray; ``queues`` is what each worker was sent."""

    def __init__(self, policy):
        self.log, self.now, self.pool = [], 0.0, Epochs(SAMPLES, EPOCHS, seed=0)
        config = ServerConfig(WORKERS, BATCH, policy=policy)
        self.coordinator = Coordinator(self, config, self.pool, self.log.append, shares=True)
        self.pieces = Pieces(self, self.coordinator)
        self.queues = {worker: deque() for worker in range(WORKERS)}

    def compute(self, task):
        self.pieces.begin(task, self.now)

    def send(self, task, samples):
        self.queues[task.worker].append(None)

    def ask(self, task):
        self.queues[task.worker].append(task)

    def cancel(self, tasks):
        for task in tasks:
            self.queues[task.worker].clear()
            self.pieces.lose(task.worker, self.now)

    def update(self, parts, batch, rate):
        assert sum(portion.samples for portion in self.pieces.portions()) == BATCH
        return Moved(1.0, 1.0, 1.0)

    def answer(self, worker):
        """The worker is through with what it was sent first."""
        asked = self.queues[worker].popleft()
        if asked is None:
            self.pieces.reported(worker, self.now)
        else:
            self.pieces.delivered(asked, [], 1.0, None, self.now)
            self.pieces.finish(self.now)


happens = st.tuples(
    st.sampled_from(["answer"] * 6 + ["leave", "join"]), st.integers(0, WORKERS - 1), st.floats(1e-3, 1.0)
)


GUIDED = pytest.param("factoring:scheme=guided", marks=pytest.mark.nightly)  # other portions of the same pool


@pytest.mark.parametrize("policy", ["factoring", GUIDED, "auto"])
@given(events=st.lists(happens, max_size=60))
def test_workers_come_and_go_at_any_stage_of_a_round(policy, events):
    engine = Engine(policy)
    coordinator = engine.coordinator
    coordinator.handle(Start(0.0))
    for what, worker, seconds in events:
        engine.now += seconds
        busy = [each for each, queue in engine.queues.items() if queue]
        if engine.pool.finished():
            break
        if what == "answer" and busy:
            engine.answer(busy[worker % len(busy)])
        elif what == "leave" and len(coordinator.present) > 1:
            coordinator.handle(WorkerLeave(engine.now, worker))
        elif what == "join" and worker not in coordinator.present:
            coordinator.handle(WorkerJoin(engine.now, worker, None))
    while not engine.pool.finished():
        engine.now += 0.1
        engine.answer(min(worker for worker, queue in engine.queues.items() if queue))
    assert [update.batch for update in engine.log] == [BATCH] * (SAMPLES * EPOCHS // BATCH)
    assert set(engine.pool.uses) == {EPOCHS}
    assert np.all([update.loads.sum() == BATCH for update in engine.log])
