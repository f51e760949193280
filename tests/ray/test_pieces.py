"""Work that moves within the round, on real Ray actors: exact, every sample once, also when a worker dies in it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("ray")
sys.path.insert(0, str(Path(__file__).parent))  # Ray's workers import the programs by this name, too
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

from programs import X, quadratic

from paceline import runs
from paceline.cli import run
from paceline.errors import PacelineError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Epochs
from paceline.ray import Server
from support.guarantees import guarantee

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("kept")]


class PerSample:
    """Seconds of sleep a sample, one entry a worker."""

    def __init__(self, *seconds):
        self.seconds = seconds

    def __call__(self, worker, update, samples):
        return self.seconds[worker] * samples


def served(policy, delay, during=None, epochs=2, grace=60.0, **kwargs):
    """grace: so long by default that nobody is given up on a busy machine."""
    log, pool = [], Epochs(len(X), epochs, seed=1)

    def on_update(update):
        log.append(update)
        if during is not None:
            during(server, update)

    config = ServerConfig(3, 60, policy=policy, lr=0.2, momentum=0.5)
    with Server(quadratic, config, pool, on_update, delay=delay, grace=grace, **kwargs) as server:
        values = server.run()
    return values, log, pool


def one_process(log):
    """The same updates, each with the mean over its samples."""
    w, v = np.zeros(3), np.zeros(3)
    for update in log:
        drawn = np.concatenate([task.taken for task in update.moved])
        v = 0.5 * v + (w - X[drawn].mean(0))
        w = w - 0.2 * v
    return w


@pytest.mark.parametrize("policy", ["factoring", "auto", "factoring:scheme=guided"])
def test_pieces_are_exact_and_use_each_sample_once(policy):
    values, log, pool = served(policy, PerSample(5e-4, 5e-4, 2e-3), shards=2)
    assert set(pool.uses) == {2}
    assert [u.batch for u in log] == [60] * 20
    assert np.abs(values - one_process(log)).max() < 1e-5
    for u in log:
        assert [sum(sizes) for sizes in u.within.pieces] == u.loads.tolist()
    if policy != "auto":
        assert max(len(sizes) for u in log for sizes in u.within.pieces) > 2


@guarantee(
    "If a parameter server's worker is lost, each sample still counts once per epoch and the record names "
    "it; damaged checkpoints are noticed."
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_what_a_lost_worker_had_is_done_by_the_others_in_the_same_round(number):
    notes = {}

    def hit(process):
        notes["at"] = time.perf_counter()
        os.kill(process, number)

    def during(server, update):
        if update.version == 4:  # in the middle of the next round, which takes 100 ms
            notes["process"] = server.processes[2]
            threading.Timer(0.03, hit, (notes["process"],)).start()
        notes[update.version] = time.perf_counter()

    try:
        values, log, pool = served(
            "factoring:portion=0.5",
            PerSample(*[5e-3] * 3),
            during,
            epochs=1,
            grace=60.0 if number == signal.SIGKILL else 20.0,
        )
    finally:
        if number == signal.SIGSTOP:
            os.kill(notes["process"], signal.SIGCONT)
    assert set(pool.uses) == {1}
    assert [u.batch for u in log] == [60] * 10  # the whole batch, in the round of the loss too
    assert np.abs(values - one_process(log)).max() < 1e-5
    lost = next(u for u in log if u.dropped)
    assert lost.version == 5
    assert lost.loads[2] == 0
    assert lost.present == 2
    words = "worker 2 died" if number == signal.SIGKILL else "worker 2 was given up"
    assert [update.changed for update in log if update.changed] == [[words]]
    assert notes[5] - notes["at"] < 60.0  # not after a timeout of Ray's or of the system's


def test_the_record_has_the_pieces(tmp_path):
    out = tmp_path / "run"
    arguments = ["train", "--engine", "ray", "--workers", "3", "--policy", "factoring", "--out", str(out)]
    assert run([*arguments, "--steps", "5", "--slowdown-ms", "0.2,0.2,1"]) == 0
    record = runs.read(out)
    assert record.batch.tolist() == [256] * 5
    for pieces, loads in zip(record.extras["pieces"], record.loads, strict=True):
        assert [sum(sizes) for sizes in pieces] == loads.tolist()
    assert record.summary["pieces"] > 1
    assert "piece 0" in (out / "trace.json").read_text()
    assert "pieces per worker" in (out / "report.html").read_text()


def test_combinations_that_exclude_it_raise():
    for other in ({"sync": "ssp:2"}, {"backup": "static:2"}, {"mode": "pull"}):
        with pytest.raises(PacelineError, match="factoring moves work within a round that all workers share"):
            ServerConfig(3, 60, policy="factoring", **other).build(shared=True)
    assert not ServerConfig(3, 60, policy="level", sync="ssp:2").build(shared=True).shares_rounds


def test_who_comes_in_mid_round_shares_it():
    notes = {}

    def during(server, update):
        if update.version == 3:
            os.kill(server.processes[1], signal.SIGKILL)
        notes[update.version] = server.present()

    values, log, pool = served("factoring", PerSample(*[4e-3] * 3), during, epochs=6, replace=True)
    assert set(pool.uses) == {6}
    assert [u.batch for u in log] == [60] * 60
    assert np.abs(values - one_process(log)).max() < 1e-5
    assert {1} in [present - {0, 2} for version, present in notes.items() if version > 5]
    assert all(u.loads[1] > 0 for u in log[-3:])
