"""The parameter server on real Ray actors: exactness, modes, and whatever can happen to workers."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest

pytest.importorskip("ray")

from programs import Slowed, X, lowered, quadratic

from paceline.errors import PacelineError, WorkerError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Epochs
from paceline.paramserver.starts import RETRIES
from paceline.ray import Server, torch_program, train
from paceline.ray.worker import Crew

pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray"), pytest.mark.usefixtures("kept")]


def served(choices, epochs=2, during=None, delay=None, updates=None, program=quadratic, grace=60.0, **kwargs):
    """Run; ``during(server, update)`` after each update. Returns (parameters, updates, pool).

    grace: so long by default that nobody is given up on a busy machine."""
    log, pool = [], Epochs(len(X), epochs, seed=1)

    def on_update(update):
        log.append(update)
        if during is not None:
            during(server, update)

    with Server(program, choices, pool, on_update, delay=delay, grace=grace, **kwargs) as server:
        values = server.run(updates=updates)
    return values, log, pool


def choices(workers=3, batch=60, **kwargs):
    return ServerConfig(workers, batch, **{"lr": 0.2} | kwargs)


@pytest.mark.parametrize("ahead", [False, True])
def test_uneven_batches_equal_one_process(ahead, monkeypatch):
    """LB-BSP, Alg. 1, worker, lines 1 to 6, Alg. 1, server, lines 1 to 3."""
    monkeypatch.setattr("paceline.ray.shards.AHEAD_PARAMETERS", 0 if ahead else 2**20)
    values, log, pool = served(
        choices(policy="level", momentum=0.5), epochs=2, delay=Slowed([0.001, 0.001, 0.02]), shards=2
    )
    assert set(pool.uses) == {2}
    w, v = np.zeros(3), np.zeros(3)
    for update in log:
        drawn = np.concatenate([task.taken for task in update.moved])
        v = 0.5 * v + (w - X[drawn].mean(0))
        w = w - 0.2 * v
    assert np.abs(values - w).max() < 1e-5
    assert len({tuple(u.loads) for u in log}) > 1


@pytest.mark.parametrize("mode", ["push-interrupt", "pull"])
def test_no_sample_is_lost_when_late_gradients_are_dropped(mode):
    delay = Slowed([0.01, 0.01, 0.05])
    _, log, pool = served(choices(mode=mode, backup="static:2"), delay=delay)
    assert set(pool.uses) == {2}
    assert sum(u.batch for u in log) == 2 * len(X)
    assert sum(sum(u.dropped.values()) for u in log) > 0


@pytest.mark.parametrize("sync", ["ssp:1", "lsp:2:2"])
def test_asynchronous_gates_use_every_sample_and_learn(sync):
    values, log, pool = served(choices(sync=sync), epochs=4, delay=Slowed([0.005, 0.005, 0.02]))
    assert set(pool.uses) == {4}
    assert max(s for u in log for s in u.staleness) >= 1
    assert np.abs(values - X.mean(0)).max() < 0.25


@pytest.mark.parametrize(
    "setting", [{"backup": "adasync"}, {"backup": "adasync:kind=async", "sync": "lsp:barrier=0,scale=mean"}]
)
def test_adasync_waits_for_all_once_the_loss_is_below_zero(setting):
    """DBW, baseline AdaSync."""
    _, log, pool = served(choices(**setting), epochs=4, delay=Slowed([0.002] * 3), program=lowered)
    assert set(pool.uses) == {4}
    asked = [(before.loss, after.wanted) for before, after in itertools.pairwise(log)]
    assert any(loss > 0 and wanted < 3 for loss, wanted in asked)
    assert {wanted for loss, wanted in asked if loss <= 0} == {3}


def hit(signal_number, worker=1, at=4):
    """Sends the signal to a worker's process after an update; notes when."""
    notes = {}

    def during(server, update):
        if update.version == at and not notes:
            notes["at"] = time.perf_counter()
            notes["process"] = server.processes[worker]
            os.kill(server.processes[worker], signal_number)

    return during, notes


@pytest.mark.parametrize(
    ("sync", "mode", "backup"),
    [
        ("bsp", "push-wait", "everyone"),
        ("bsp", "push-interrupt", "static:2"),
        ("lsp:2:2", "push-wait", "everyone"),
    ],
)
def test_a_killed_worker_is_left_behind_before_ray_would_notice(sync, mode, backup):
    during, notes = hit(signal.SIGKILL)
    after = []

    def watched(server, update):
        during(server, update)
        if notes:
            after.append(time.perf_counter() - notes["at"])

    # The measured deadline would be 60 s.
    _, log, pool = served(
        choices(sync=sync, mode=mode, backup=backup),
        during=watched,
        delay=Slowed([0.02] * 3),
        epochs=1,
    )
    assert set(pool.uses) == {1}
    assert np.diff(after).max() < 12.0  # as a rule 0.1 s; Ray itself needs 15 s and more
    assert sum(u.dropped["died"] for u in log) <= 1
    assert log[-1].present == 2


@pytest.mark.parametrize(("sync", "mode"), [("bsp", "push-wait"), ("ssp:1", "push-wait")])
def test_a_frozen_worker_is_given_up_by_a_measured_deadline_and_returns(sync, mode):
    during, notes = hit(signal.SIGSTOP)
    back = []

    def watched(server, update):
        during(server, update)
        if notes and update.present == 2 and not back:
            back.append(update.version)
            os.kill(notes["process"], signal.SIGCONT)

    try:
        _, log, pool = served(
            choices(sync=sync, mode=mode), during=watched, delay=Slowed([0.03] * 3), epochs=8, grace=0.3
        )
    finally:
        if notes and not back:
            os.kill(notes["process"], signal.SIGCONT)
    assert back, "it was given up while it was frozen"
    assert set(pool.uses) == {8}
    assert 3 in {u.present for u in log if u.version > back[0]}, "and was back later"
    assert any(u.loads[1] for u in log if u.version > back[0])


@pytest.mark.parametrize("first", ["leave", "add"])
def test_workers_leave_and_new_ones_join_with_the_current_model(first):
    def during(server, update):
        if update.version == (3 if first == "leave" else 6):
            server.leave(0)
        if update.version == (3 if first == "add" else 6):
            server.add()

    _, log, pool = served(choices(), during=during, delay=Slowed([0.03] * 3), epochs=12)
    assert pool.uses.tolist() == [12] * len(X)
    assert [u for u in log if u.present == 2]
    assert log[-1].present == 3
    assert log[-1].loads[0] > 0


def test_random_killing_for_200_rounds_loses_nothing():
    rng = np.random.default_rng(5)
    killed = []

    def during(server, update):
        if update.version % 50 == 25 and len(killed) < 3:
            worker = int(rng.choice(sorted(set(server.processes) & server.present())))
            killed.append(worker)
            threading.Timer(rng.random() * 0.03, os.kill, (server.processes[worker], signal.SIGKILL)).start()

    values, log, pool = served(
        choices(4, 12, lr=0.05, backup="static:3"),
        during=during,
        delay=Slowed([0.004] * 4),
        epochs=4,
        replace=True,
    )
    assert len(log) >= 200
    assert len(killed) == 3
    assert set(pool.uses) == {4}
    assert np.abs(values - X.mean(0)).max() < 0.25


def test_training_continues_from_a_state():
    whole, _, _ = served(choices(momentum=0.5))
    with Server(quadratic, choices(momentum=0.5), first := Epochs(len(X), 2, seed=1)) as server:
        server.run(updates=7)
        state, used = server.state(), first.state_dict()
    again = Epochs(len(X), 2, seed=1)
    again.load_state_dict(used)
    with Server(quadratic, choices(momentum=0.5), again, state=state) as server:
        values = server.run()
        assert server.updates == 20
    assert set(again.uses) == {2}
    assert np.abs(values - whole).max() < 1e-9


def test_a_dead_server_is_named():
    def during(server, update):
        if update.version == 2:
            import ray

            process = server.shards.actors[0].__ray_call__.remote(lambda self: os.getpid())
            os.kill(ray.get(process), signal.SIGKILL)
            time.sleep(0.2)

    with pytest.raises(WorkerError, match=r"parameter server died after update \d+; continue .* --resume"):
        served(choices(), during=during)


def test_death_of_all_workers_raises():
    def during(server, update):
        if update.version == 2:
            for process in server.processes.values():
                os.kill(process, signal.SIGKILL)

    with pytest.raises(WorkerError, match="no worker is left after update"):
        served(choices(), during=during)


class Heard(logging.Handler):
    """Calls ``then`` with each warning of the server."""

    def __init__(self, then=lambda: None):
        super().__init__(logging.WARNING)
        self.then, self.warnings = then, []

    def emit(self, record):
        self.warnings.append(record.getMessage())
        self.then()

    def __enter__(self):
        logging.getLogger("paceline.ray.server").addHandler(self)
        return self

    def __exit__(self, *error):
        logging.getLogger("paceline.ray.server").removeHandler(self)


def failing_once(marker, tries):
    """A program that cannot start while there is a file ``marker``; it notes each try in another one."""

    def program(worker):
        if marker.exists():
            with tries.open("a") as file:
                file.write("x")
            raise OSError("no space left for the data")
        return quadratic(worker)

    return program


def killing(marker):
    """Kills worker 1 after the second update; a replacement fails to start from then on."""

    def during(server, update):
        if update.version == 2:
            marker.touch()
            os.kill(server.processes[1], signal.SIGKILL)

    return during


def test_replacement_that_fails_to_start_is_tried_again_and_named(tmp_path):
    marker, tries = tmp_path / "marker", tmp_path / "tries"
    joined = []

    def during(server, update):
        killing(marker)(server, update)
        if "worker 1 joined" in update.changed:
            joined.append(update.version)
            server.pool.epochs = server.pool._begun  # the epoch that has begun is the last

    with Heard(marker.unlink) as heard:
        served(
            choices(), epochs=10**6, during=during, replace=True, delay=Slowed([0.02] * 3),
            program=failing_once(marker, tries),
        )  # fmt: skip
    (warning,) = heard.warnings
    assert "worker 1 could not start: OSError: no space left for the data; it is started again" in warning
    assert tries.read_text() == "x"
    assert joined


def test_replacement_that_never_starts_is_given_up_with_a_warning(tmp_path):
    marker, tries = tmp_path / "marker", tmp_path / "tries"

    def during(server, update):
        killing(marker)(server, update)
        if len(heard.warnings) == 1 + RETRIES:
            server.pool.epochs = server.pool._begun

    with Heard() as heard:
        _, log, _ = served(
            choices(), epochs=10**6, during=during, replace=True, delay=Slowed([0.02] * 3),
            program=failing_once(marker, tries),
        )  # fmt: skip
    assert tries.read_text() == "x" * (1 + RETRIES)
    assert "it failed too often; add() tries once more" in heard.warnings[-1]
    assert log[-1].present == 2


def all_frozen(server, update):
    if update.version == 4:
        for process in server.processes.values():
            os.kill(process, signal.SIGSTOP)


def test_workers_that_all_freeze_are_named_and_continue_when_they_are_back(monkeypatch):
    monkeypatch.setattr("paceline.ray.server.START_SECONDS", 60.0)  # it warns after 5 s
    processes = {}

    def during(server, update):
        processes.update(server.processes)
        all_frozen(server, update)

    def back():
        for process in processes.values():
            os.kill(process, signal.SIGCONT)

    with Heard(back) as heard:
        _, log, pool = served(choices(), during=during, delay=Slowed([0.02] * 3), grace=0.3)
    assert heard.warnings
    for words in heard.warnings:
        assert "no worker takes part after update" in words
        assert "worker 0, worker 1, worker 2 may be frozen" in words
    assert set(pool.uses) == {2}
    assert log[-1].version > 4


def test_workers_that_all_stay_frozen_raise(monkeypatch):
    monkeypatch.setattr("paceline.ray.server.START_SECONDS", 0.5)
    processes = {}

    def during(server, update):
        processes.update(server.processes)
        all_frozen(server, update)

    try:
        with (
            Heard() as heard,
            pytest.raises(WorkerError, match=r"no worker has answered for 0.5 s after update"),
        ):
            served(choices(), during=during, delay=Slowed([0.02] * 3), grace=0.3)
    finally:
        for process in processes.values():
            os.kill(process, signal.SIGKILL)
    assert len(heard.warnings) == 1


def test_one_call():
    values = train(quadratic, len(X), workers=2, global_batch=50, epochs=12, lr=0.05, backup="dbw")
    assert np.abs(values - X.mean(0)).max() < 0.3


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("global_btch", "did you mean global_batch? Expected"),
        ("colour", "expected"),
        ("momentun", "momentum?"),
    ],
)
def test_an_option_that_does_not_exist_is_named(name, near):
    with pytest.raises(PacelineError) as refused:
        train(quadratic, len(X), **{name: 1})
    said = str(refused.value)
    assert said.startswith(f"paceline.ray.train has no option '{name}'; ")
    assert near in said
    assert "one of program, samples, workers, global_batch, " in said
    assert said.endswith(", sync, mode, backup, rate, lr, momentum, limits, machines")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"program": None}, "program=None: expected a function"),
        ({"delay": 3}, "delay=3: expected a function"),
        ({"on_update": "print"}, "on_update='print': expected a function"),
        ({"replace": "no"}, "replace='no': expected True or False"),
        ({"samples": 1.5}, "samples=1.5: expected a whole number, 1 to"),
        ({"epochs": float("nan")}, "epochs=nan: expected a whole number, 1 to"),
        ({"seed": -1}, "seed=-1: expected a whole number, 0 to"),
        ({"workers": "2"}, "workers='2': expected a whole number, 1 to"),
        ({"global_batch": 3.5}, "global_batch=3.5: expected a whole number"),
        ({"sync": None}, "gate None is unknown; expected one of"),
        ({"lr": "x"}, "lr='x': expected a positive learning rate"),
        ({"momentum": None}, "momentum=None: expected 0 or more"),
    ],
)
def test_what_no_run_can_begin_with_is_named(wrong, said):
    with pytest.raises(PacelineError, match=said):
        train(**{"program": quadratic, "samples": 10, "workers": 2, "global_batch": 4} | wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"pool": range(10)},
            r"^pool=range\(0, 10\): expected Epochs or Draws of paceline.paramserver.samples$",
        ),
        ({"cpus": -1}, "^cpus=-1: expected CPUs of each worker, 0 or more$"),
        ({"cpus": float("nan")}, "^cpus=nan: expected CPUs"),
        ({"shards": 1.5}, "^shards=1.5: expected a whole number, 0 to"),
    ],
)
def test_server_that_cannot_start_raises_with_the_reason(wrong, said):
    with pytest.raises(PacelineError, match=said):
        Server(quadratic, choices(), **{"pool": Epochs(len(X), 1, seed=1)} | wrong)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model": None}, "^model=None: expected a function$"),
        ({"loss": "mse"}, "^loss='mse': expected a function$"),
        ({"targets": X[:-1]}, "^inputs of 600 and targets of 599 rows: expected as many, one per sample$"),
        ({"inputs": None}, "^inputs of 0 and targets of 600 rows: expected"),
    ],
)
def test_torch_program_that_cannot_start_raises_with_the_reason(wrong, said):
    with pytest.raises(PacelineError, match=said):
        torch_program(**{"model": list, "inputs": X, "targets": X} | wrong)


def test_a_program_that_fails_is_quoted(monkeypatch):
    monkeypatch.setattr("paceline.ray.server.Crew", Crew)

    def broken(worker):
        raise ValueError("no such file: data.npz")

    with pytest.raises(WorkerError, match=r"worker 0 could not start: .*no such file: data\.npz"):
        train(broken, 10, workers=2, global_batch=10)


def test_an_address_that_does_not_answer():
    from paceline.ray.start import _ask

    with pytest.raises(PacelineError, match=r"no Ray cluster answers at 127\.0\.0\.1:9"):
        _ask("127.0.0.1:9")
    with pytest.raises(PacelineError, match="expected HOST:PORT"):
        _ask("somewhere")


def test_an_address_at_which_something_else_listens(monkeypatch):
    from paceline.ray import start

    monkeypatch.setattr(start, "ANSWER_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = "{}:{}".format(*silent.getsockname())
        with pytest.raises(PacelineError, match=f"no Ray cluster answers at {address} within 1 s; start one"):
            start._ask(address)
