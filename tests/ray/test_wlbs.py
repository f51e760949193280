"""WLBS whole on real workers: division by machine under LSP, small and major adjustments, a death."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest

pytest.importorskip("ray")

from programs import X, quadratic

from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Epochs
from paceline.ray import Server

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("cluster")]
WORKERS, BATCH, EPOCHS = 4, 96, 16
MICRO = 4


def sized(worker):
    """The quadratic, on machines of two sizes: workers 0 to 2 share a processor, worker 3 has one of its own."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, {second if worker == 3 else first})
    return quadratic(worker)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one processor: run with two (taskset, --cpus)")
def test_divided_by_machine_adjusted_and_outliving_a_worker():
    """WLBS, node's steps 1 to 7, server's steps 1 to 7."""
    pool, log, given = Epochs(len(X), EPOCHS, seed=1), [], []

    class Watched(Server):
        def compute(self, task):
            given.append(task)
            super().compute(task)

    def on_update(update):
        log.append(update)
        if update.version == 40:
            os.kill(server.processes[1], signal.SIGKILL)

    # Whoever has the largest machine is the slowest: the division by size is wrong, and must be adjusted.
    config = ServerConfig(
        WORKERS, BATCH, sync="lsp:2:3", policy=f"wlbs:micro={MICRO},period=3,epoch=15", lr=0.1
    )

    def delay(worker, update, samples):
        return (1e-3, 1e-3, 1e-3, 4e-3)[worker] * samples

    with Watched(sized, config, pool, on_update, delay=delay) as server:
        values = server.run()
        assert 1 not in server.present()

    first = {task.worker: task.load for task in given if task.version == 0}
    assert sum(first.values()) == BATCH
    # Processors 1/6, 1/6, 1/6, 1/2 and memory 1/4 each, averaged: 7/36 and 5/12, give or take their speed.
    assert first[3] == pytest.approx(BATCH * 5 / 12, abs=2 * MICRO)
    assert all(first[worker] == pytest.approx(BATCH * 7 / 36, abs=2 * MICRO) for worker in (0, 1, 2))

    shares = np.array([update.shares for update in log])
    moves = np.abs(np.diff(shares[:39] * BATCH, axis=0))
    whole = np.minimum(moves % MICRO, -moves % MICRO) < 1e-6
    assert (
        moves[:12] > MICRO / 2
    ).any()  # small adjustments, in the first 15 rounds, move whole micro-batches
    assert whole[:12].all()
    assert shares[38, 3] < 0.6 * shares[0, 3]
    before = [task.load for task in given if task.worker == 3 and task.version < 40][-1]
    assert 4 * before < 2 * max(task.load for task in given if 30 < task.version < 40)  # about equally long

    assert not any(update.loads[1] for update in log[-20:])
    np.testing.assert_allclose(shares[-1][[0, 2, 3]].sum(), 1.0)  # the dead one's samples are the others' now
    assert set(pool.uses) == {EPOCHS}
    assert np.abs(values - X.mean(0)).max() < 0.25
