"""Pipes, devices, files that are far too large or nested too deeply: every reader refuses them at once."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline import PacelineError, files, tokens
from paceline.coded import problem
from paceline.data import traces
from paceline.forecast import learned, networks
from paceline.live.tail import Tail
from paceline.runs import Recorder, read
from paceline.simulate import toml
from paceline.train.checkpoint import Checkpoints
from support.records import line

GUARANTEES = (
    "A pipe, a device, a huge file or JSON that is nested 100,000 "
    "deep in place of an input is refused at once.",
)

SECONDS = 60  # only a hang takes as long


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError("it waits for the other end of a pipe, or reads without end")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def tail(run_dir: Path) -> None:
    """As the live page reads a run: it says what is wrong, and never raises."""
    found = Tail(run_dir)
    found.poll()
    raise PacelineError(found.gone + found.damaged)


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "run.json": ("run/run.json", lambda path: read(path.parent)),
    "summary.json": ("run/summary.json", lambda path: read(path.parent)),
    "rounds.jsonl": ("run/rounds.jsonl", lambda path: read(path.parent)),
    "run.json, live": ("run/run.json", lambda path: tail(path.parent)),
    "summary.json, live": ("run/summary.json", lambda path: tail(path.parent)),
    "rounds.jsonl, live": ("run/rounds.jsonl", lambda path: tail(path.parent)),
    "checkpoint": ("checkpoint.pt", lambda path: Checkpoints(path, io.BytesIO).load()),
    "scenario": ("scenario.toml", toml.read),
    "trace": ("trace.csv", traces.read),
    "delays": ("delays.csv", lambda path: problem.read_table(path, ["u"])),
    "forecast": ("model.npz", lambda path: learned.load(path, networks.RecurrentNetwork(2, 4))),
    "token": ("token", tokens.read),
}


def place(tmp_path: Path, name: str) -> Path:
    with Recorder.create(tmp_path / "run", {"workers": 1}) as recorder:
        line(recorder, 0, loads=[1], compute=[1.0])
        recorder.finish()
    path = tmp_path / name
    path.unlink(missing_ok=True)
    return path


@pytest.mark.parametrize("kind", READERS)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(tmp_path: Path, kind: str) -> None:
    name, reads = READERS[kind]
    path = place(tmp_path, name)
    for make in (os.mkfifo, lambda at: at.symlink_to("/dev/zero")):
        make(path)
        with pytest.raises(PacelineError, match="it is a pipe or a device, not a file"):
            reads(path)
        path.unlink()


@pytest.mark.parametrize("kind", [kind for kind in READERS if kind != "checkpoint"])
def test_a_file_that_is_far_too_large_is_refused(tmp_path: Path, kind: str) -> None:
    name, reads = READERS[kind]
    path = place(tmp_path, name)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # it takes no room on the disk
    with pytest.raises(PacelineError, match="it has 1,099,511,627,776 bytes, and"):
        reads(path)


@pytest.mark.parametrize("kind", [kind for kind in READERS if ".json" in kind])
@pytest.mark.parametrize(
    "nested", ['{"policy":' * 100_000, "[" * 100_000 + "]" * 100_000], ids=["cut off", "whole"]
)
def test_json_that_is_nested_too_deeply_is_refused(tmp_path: Path, kind: str, nested: str) -> None:
    name, reads = READERS[kind]
    path = place(tmp_path, name)
    path.write_text(nested + "\n")
    with pytest.raises(PacelineError, match=r"it is not valid JSON|nested"):
        reads(path)


def test_a_long_field_of_a_trace_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"round,worker,seconds_per_sample,overhead_seconds,remark\n0,0,1,0,{'x' * 131_073}\n")
    with pytest.raises(PacelineError, match="line 2: field larger"):
        traces.read(path)


def test_a_shell_that_allows_few_files_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (32, 32))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    files.allow_open(32, "it")
    with pytest.raises(PacelineError, match="it may have 32 files and connections open: expected 33 or more"):
        files.allow_open(33, "it")
