"""``paceline report``: what it writes, says and refuses."""

import json

import numpy as np
import pytest
import typer

from paceline.cli import report as module
from paceline.errors import PacelineError
from paceline.runs import Recorder, read, summarize
from support.guarantees import guarantee

SLOW = np.array([0.001, 0.001, 0.001, 0.004])


@pytest.fixture
def make(tmp_path):
    """Writes a short run of a policy; its directory."""

    def make(name, loads=(16, 16, 16, 16)):
        loads = np.array(loads)
        compute = loads * SLOW
        with Recorder.create(tmp_path / name, {"policy": name, "workers": 4, "global_batch": 64}) as recorder:
            for t in range(12):
                wall = compute.max()
                recorder.round(round=t, epoch=0, time=(t + 1) * wall, seconds=wall, batch=int(loads.sum()),
                               loads=loads, compute=compute, loss=1 / (1 + t))  # fmt: skip
        return str(tmp_path / name)

    return make


def call(*arguments):
    app = typer.Typer()
    app.command()(module.command)
    app(list(arguments), standalone_mode=False)


def test_one_run(make, tmp_path, capsys):
    run = make("equal")
    call(run)
    out = capsys.readouterr().out
    assert "Worker 3 is 4.0x slower per sample than the others." in out
    assert str(tmp_path / "equal" / "report.html") in out
    assert "<!doctype html>" in (tmp_path / "equal" / "report.html").read_text()
    assert json.loads((tmp_path / "equal" / "trace.json").read_text())["traceEvents"]
    call(run, "--out", str(tmp_path / "page.html"), "--json", str(tmp_path / "summary.json"))
    assert (tmp_path / "page.html").exists()
    assert json.loads((tmp_path / "summary.json").read_text()) == summarize(read(run))


def test_several_runs(make, tmp_path, capsys):
    runs = [make("equal"), make("level", (20, 20, 20, 5))]
    call(*runs, "--json", "-")
    captured = capsys.readouterr()
    assert json.loads(captured.out) == [summarize(read(run)) for run in runs]
    assert "20/20/20/5" in captured.err
    assert "an equal split wasted 56 % of the cluster" in " ".join(captured.err.split())
    assert "Comparison" in (tmp_path / "compare.html").read_text()
    assert (tmp_path / "level" / "report.html").exists()
    assert (tmp_path / "level" / "trace.json").exists()
    both = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {each["pid"] for each in both} == {1, 2}, "the comparison's trace has both runs"


def test_nothing_is_written_when_one_is_no_run(make, tmp_path):
    good = make("equal")
    for wrong, words in (("none", "not a run directory"), ("empty", "holds no round yet")):
        if wrong == "empty":
            Recorder.create(tmp_path / wrong, {}).close()
        with pytest.raises(PacelineError, match=words):
            call(good, str(tmp_path / wrong))
    assert not (tmp_path / "equal" / "report.html").exists()
    assert not (tmp_path / "compare.html").exists()
    with pytest.raises(PacelineError, match="cannot write"):
        call(good, "--out", str(tmp_path / "no" / "page.html"))


def test_an_unknown_sink_is_refused_before_anything_is_written(make, tmp_path):
    run = make("equal")
    with pytest.raises(PacelineError, match="sink 'nosuch' is unknown"):
        call(run, "--to", "tensorboard", "--to", "nosuch")
    assert not (tmp_path / "equal" / "report.html").exists()


@guarantee("A place for figures or a page that cannot be written is refused before anything is read.")
def test_places_that_cannot_be_written_are_refused_before_anything_is_read(make, tmp_path):
    run = make("equal")
    for option in (("--json", str(tmp_path)), ("--out", str(tmp_path))):
        for runs in ([str(tmp_path / "none")], [run]):
            with pytest.raises(PacelineError, match=f"cannot write {tmp_path}: it is a directory"):
                call(*runs, *option)
    assert not (tmp_path / "equal" / "report.html").exists()
