"""``paceline train --engine ray``: the same record and report, resumed, on a standing cluster; and mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")
pytest.importorskip("typer")

from paceline import runs
from paceline.cli import run
from paceline.data import traces
from paceline.errors import PacelineError
from paceline.ray.server import Server
from paceline.runs import events
from paceline.runs.findings import findings
from paceline.train import ray_engine
from paceline.train.config import TrainConfig
from support.commands import installs, python
from support.guarantees import guarantee

# In a program of its own, whose Ray forks its workers; none that a busy machine holds up for a second is given up.
PROGRAM = """
from support import ray_forks
ray_forks.use()
from paceline.ray.server import Server
Server.__init__.__kwdefaults__["grace"] = 60.0
from paceline.cli import main
main()
"""
BASE = ["train", "--engine", "ray", "--workers", "3", "--lr", "0.1"]


def left_after(seconds, processes):
    """Those that have not ended by then: none but Ray's own agents, which take their time and are not waited for."""
    until = time.monotonic() + seconds
    while True:
        left = psutil.wait_procs(processes, timeout=0.1)[1]
        names = {}
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                names[process] = process.name()
        if all("Agent" in name for name in names.values()):
            return list(names)
        assert time.monotonic() < until, names


@pytest.fixture
def torch_loaded(forks_of_ray):
    forks_of_ray.load("torch.distributed")


@pytest.mark.ray
@pytest.mark.xdist_group("ray")
@pytest.mark.usefixtures("kept")
class TestWithRay:
    def test_record_report_and_resume(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setitem(Server.__init__.__kwdefaults__, "grace", 60.0)
        out, figures = tmp_path / "run", tmp_path / "figures.json"
        options = [
            "--slowdown-ms",
            "1,1,3",
            "--backup",
            "static:2",
            "--out",
            str(out),
            "--checkpoint-every",
            "4",
        ]
        assert run([*BASE, *options, "--steps", "6", "--json", str(figures)]) == 0
        record = runs.read(out)
        assert len(record.round) == 6
        assert record.config["engine"] == "ray"
        assert record.extras["quorum"] == [2] * 6
        assert sum(sum(d.values()) for d in record.extras["dropped"]) > 0
        found = json.loads(figures.read_text())
        assert found["steps"] == 6
        assert 0 < found["test_accuracy"] < 1
        assert found["dropped"]["late"] > 0
        assert (out / "report.html").exists()
        assert run(["train", "--resume", str(out), "--steps", "10"]) == 0
        assert runs.read(out).round.tolist() == list(range(10))
        assert run(["train", "--resume", str(out), "--steps", "10"]) == 2
        assert "is finished after 10 steps" in capsys.readouterr().err

    def test_sigterm_ends_it_in_order(self, tmp_path, torch_loaded):
        out = tmp_path / "run"
        options = ["--slowdown-ms", "1,1,2", "--epochs", "40", "--out", str(out)]
        command = [sys.executable, "-c", PROGRAM, *BASE, *options]
        training = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        began = time.monotonic()
        while not (out / "rounds.jsonl").exists() or len(runs.read(out).round) < 3:
            assert training.poll() is None, training.communicate()[1]
            assert time.monotonic() - began < 400
            time.sleep(0.05)
        started = psutil.Process(training.pid).children(recursive=True)
        training.terminate()
        said, complaint = training.communicate(timeout=400)
        assert (training.returncode, complaint.strip()) == (143, "paceline: interrupted")
        assert f"finished steps are on record in {out}" in said
        record = runs.read(out)
        assert len(record.round) >= 3
        assert not record.notes
        assert (out / "report.html").exists()
        left_after(400, started)

    def test_the_server_killed_at_most_an_interval_is_lost(self, tmp_path, torch_loaded):
        out, every = tmp_path / "run", 3
        asynchronous = [
            "--sync",
            "ssp:2",
            "--epochs",
            "2",
            "--slowdown-ms",
            "1,1,2",
            "--checkpoint-every",
            str(every),
        ]
        command = [sys.executable, "-c", PROGRAM, *BASE, *asynchronous, "--out", str(out)]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        began = time.monotonic()
        # More updates than bsp has rounds.
        while not (out / "run.json").exists() or len(runs.read(out).round) < 4 * every + 2:
            assert training.poll() is None
            assert time.monotonic() - began < 400
            time.sleep(0.02)
        started = psutil.Process(training.pid).children(recursive=True)
        training.kill()
        training.wait()
        had = len(runs.read(out).round)
        for process in left_after(400, started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        assert run(["train", "--resume", str(out)]) == 0
        record = runs.read(out)
        assert had - every <= record.config["resumed"][-1]["round"] <= had
        assert record.round.tolist() == list(range(len(record.round)))
        assert record.batch.sum() == 2 * 1500

    @guarantee(
        "If a parameter server's worker is lost, each sample still counts once per epoch and the record "
        "names it; damaged checkpoints are noticed."
    )
    def test_dead_worker_leaves_the_epoch_complete_and_is_on_record(self, tmp_path, monkeypatch):
        servers = []

        class Watched(ray_engine.Server):
            def run(self, *arguments, **options):
                servers.append(self)
                return super().run(*arguments, **options)

        def take(event):
            if event["type"] == "round" and event["round"] == 5:
                os.kill(servers[0].processes[2], signal.SIGKILL)

        monkeypatch.setattr(ray_engine, "Server", Watched)
        config = TrainConfig(
            engine="ray",
            workers=3,
            epochs=1,
            backup="static:2",
            policy="level",
            lr=0.1,
            slowdown_ms=[1.0, 1.0, 1.0],
        )
        ray_engine.run(config, tmp_path / "run", take)
        record = runs.read(tmp_path / "run")
        assert record.batch.sum() == 1500
        (event,) = events.events(record)
        assert (event.worker, event.what) == (2, "died")
        assert event.round >= 5
        assert any(said.startswith("Worker 2 died in round") for said in findings(record))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--backup", "static:4"], "k=4: expected a whole number, 1 to 3"),
        (["--sync", "lsp:5:1"], "group=5"),
        (["--sync", "ssp:2", "--backup", "static:2"], "its own rule on how many gradients to wait for"),
        (["--sync", "ssp:2", "--mode", "push-interrupt"], "exclude each other"),
        (["--mode", "shove"], "mode 'shove' is unknown"),
        (["--address", "nowhere"], "expected HOST:PORT"),
        (["--address", "127.0.0.1:9"], "no Ray cluster answers at 127.0.0.1:9"),
        (["--address", "localhost:" + "9" * 5000], "no Ray cluster answers at localhost:9"),
        (["--engine", "mpi"], "expected one of torch, ray"),
        (["--engine", "torch", "--backup", "dbw"], "--backup is for --engine ray"),
    ],
)
def test_mistakes_raise_one_error(options, says, tmp_path, capsys, monkeypatch):
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    assert run([*BASE, "--out", str(tmp_path / "run"), *options]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_trace_must_last_for_as_many_updates_as_there_may_be(tmp_path, capsys):
    trace = traces.write(tmp_path / "t.csv", traces.Trace(np.full((12, 3), 1e-3), np.zeros((12, 3))))
    out = tmp_path / "run"
    assert run([*BASE, "--out", str(out), "--slowdown-trace", str(trace), "--sync", "asp"]) == 2
    assert "has 12 rounds and the run may take 36" in capsys.readouterr().err
    assert not out.exists()


def test_without_ray_the_command_names_the_extra(tmp_path):
    code = f"import sys; sys.modules['ray'] = None; from paceline.cli import run; sys.exit(run({BASE!r}))"
    done = python(code, place=tmp_path)
    assert done.returncode == 2
    assert re.fullmatch(f"paceline: the Ray engine needs ray; {installs('ray')}\n", done.stderr)
    assert not list(tmp_path.iterdir())


def test_without_ray_the_extra_is_named():
    code = (
        "import sys; sys.modules['ray'] = None\n"
        "from paceline.errors import PacelineError\n"
        "try:\n    from paceline.ray import train\n"
        "except PacelineError as error:\n    print(error)"
    )
    assert re.search(installs("ray"), python(code).stdout)
    assert issubclass(PacelineError, ValueError)
