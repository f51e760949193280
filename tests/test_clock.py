"""The machine's clock is set forward and back by a day while things run: nothing goes by it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from paceline import client, runs
from paceline.live import panel
from paceline.live.tail import Tail
from support.records import line
from support.served import TOKEN, process

GUARANTEES = (
    "A clock that is set by a day during a run drops no worker and changes no "
    "seconds or plans, in training, `watch` and the service.",
)

MOVED = str(Path(__file__).parent / "support" / "moved")
PATH = os.pathsep.join([MOVED, *filter(None, [os.environ.get("PYTHONPATH")])])
DAY = 86400.0


@pytest.mark.parametrize("set_by", [DAY, -DAY])
def test_live_page_distinguishes_running_from_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_by: float
) -> None:
    real, steady, passed = time.time, time.monotonic, [0.0, 0.0]
    monkeypatch.setattr(time, "time", lambda: real() + passed[0])
    monkeypatch.setattr(time, "monotonic", lambda: steady() + passed[1])

    def later(tail: Tail, seconds: float, set_by: float = 0.0) -> str:
        passed[0], passed[1] = passed[0] + seconds + set_by, passed[1] + seconds
        tail.poll()
        return panel.state(tail)[0]

    with runs.Recorder.create(tmp_path / "run", {"policy": "equal", "workers": 2}) as recorder:
        line(recorder, 0)
        tail = Tail(tmp_path / "run")
        assert later(tail, 1.0) == "running"
        assert later(tail, 1.0, set_by) == "running"
        line(recorder, 1)  # the system's own clock, which tells when the file was written, is not moved here
        assert later(tail, 1.0) == "running"
        assert later(tail, 60.0) == "stale"
        line(recorder, 2)
        assert later(tail, 1.0) == "running"
        assert later(tail, 60.0, -set_by) == "stale"


@pytest.mark.processes
def test_run_is_measured_by_a_monotonic_clock(tmp_path: Path) -> None:
    command = ["-m", "paceline", "train", "--workers", "2", "--epochs", "2", "--slowdown", "1,4", "--out"]
    done = subprocess.run(
        [sys.executable, *command, str(tmp_path / "run")],
        env=os.environ | {"PYTHONPATH": PATH}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    run = runs.read(tmp_path / "run")
    assert len(run.round) == 12
    assert 0 < run.seconds.min() <= run.seconds.max() < 600
    assert np.all(np.diff(run.time) > 0)
    assert run.time[-1] < 3600
    assert np.median(run.loads[:, 0]) > np.median(run.loads[:, 1])


@pytest.mark.processes
def test_service_drops_no_worker(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")

    def work(worker: client.Worker, pace: float) -> None:
        for part in worker.rounds(30):
            time.sleep(0.05)
            worker.report(pace * part.samples)

    options = ("--batch", 30, "--workers", 2, "--grace", 600)
    with process(tmp_path, *options, PYTHONPATH=PATH) as service, contextlib.ExitStack() as stack:
        # One joins after the other, as the record's columns stand in the order of joining.
        workers = [stack.enter_context(client.Worker(service.url, name=name, token=TOKEN)) for name in "ab"]
        threads = [
            threading.Thread(target=work, args=each) for each in zip(workers, (2e-3, 1e-3), strict=True)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(400)
        state = service.ask("GET", "/v1/jobs/default").content
        assert (state["rounds"], state["reports"], state["dropped"]) == (30, 60, 0)
        stack.close()
        service.end()
    run = runs.read(tmp_path / "runs" / "default")
    assert run.loads[-1].tolist() == [10, 20]
    assert run.seconds.max() < 600
