"""A mistake is answered in one sentence with exit status 2, and leaves nothing behind."""

from __future__ import annotations

import socket
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import run
from support.guarantees import guarantee

TRACE = "round,worker,seconds_per_sample,overhead_seconds\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], status: int = 2) -> str:
    """What the command said on standard error, checked to be one line."""
    assert run(["train", *arguments]) == status
    captured = capsys.readouterr()
    said = captured.err.strip()
    assert said.startswith("paceline: ")
    assert "\n" not in said
    assert "Traceback" not in captured.out
    return said


@guarantee(
    "A model, loop, policy or option that cannot survive a lost rank is refused, or named at the start, with "
    "what to use instead."
)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "fastest"], "policy 'fastest' is unknown; expected one of"),
        (["--policy", "dolbie:stride=1"], "has no option 'stride=1'"),
        (["--policy", "optimum"], "needs the next round"),
        (["--compare", "equal,fastest"], "policy 'fastest' is unknown"),
        (["--compare", ","], "names no policy"),
        (["--policy", "equal", "--compare", "equal,level"], "expected one of the two; name every policy in"),
        (["--slowdown", "1,1,4"], "--slowdown has 3 entries for 4 workers"),
        (["--slowdown", "1,1,1,quick"], "expected numbers separated by commas"),
        (["--slowdown", "1,1,1,0.5"], "expected numbers of at least 1,"),
        (["--slowdown-ms", "1,1,1,nan"], "--slowdown-ms has the entry nan"),
        (["--slowdown", "1,1,1,4", "--slowdown-ms", "1,1,1,4"], "were both given"),
        (["--global-batch", "3", "--limits", "1:,1:,1:,1:"], "1 more than the global batch of 3"),
        (["--limits", ":64,:64,:64,:32"], "32 short of the global batch of 256"),
        (["--limits", "1:64"], "--limits has 1 entries for 4 workers"),
        (["--limits", "1-64,:,:,:"], "expected least:most"),
        (["--limits", "memry"], "--limits memry: expected memory, or least:most for each worker"),
        (["--limits", "9:8,:,:,:"], "expected 0 <= least <= most"),
        (["--data", "missing.npz"], "missing.npz"),
        (["--model", "transformer"], "model 'transformer' is unknown"),
        (["--workers", "0"], "workers=0: expected 1 to 1,024"),
        (["--workers", "100000"], "workers=100000: expected 1 to 1,024"),
        (["--global-batch", "99999999999999999999"], "global-batch=99999999999999999999: expected 1 to"),
        (["--epochs", "99999999999999999999"], "epochs=99999999999999999999: expected 1 to"),
        (["--momentum", "nan"], "momentum=nan: expected 0 or more, and less than 1"),
        (["--momentum", "1.5"], "momentum=1.5: expected 0 or more, and less than 1"),
        (["--lr", "nan"], "lr=nan: expected a positive learning rate"),
        (["--seed", "-1"], "seed=-1: expected 0 to"),
        (["--seed", "99999999999999999999"], "seed=99999999999999999999: expected 0 to"),
        (["--loader-workers", "-1"], "loader-workers=-1: expected 0 to 256"),
        (
            ["--micro-batch", "2", "--model", "resnet18"],
            "micro-batch=2: expected at least 3: resnet18 has batch",
        ),
        (
            ["--no-elastic", "--max-restarts", "2"],
            "--max-restarts is for runs that continue without lost workers",
        ),
        (
            ["--no-elastic", "--dead-after", "2"],
            "--dead-after is for runs that continue without lost workers",
        ),
        (["--dead-after", "0.1"], "--dead-after=0.1: expected at least 0.2 seconds, and a finite number"),
        (
            ["--max-restarts", "2", "--engine", "ray"],
            "--max-restarts is for --engine torch; leave it out with --engine ray, which con",
        ),
        (["--max-restarts", "2", "--weigh", "hook"], "--elastic is not possible here: --weigh hook leaves"),
        (
            ["--elastic", "--compare", "equal,level:forecast=narx"],
            "level:forecast=narx trains beside the rounds",
        ),
        (["--port", "-1"], "--port=-1: expected a whole number, 0 to 65,535"),
        (["--port", "99999"], "--port=99999: expected a whole number, 0 to 65,535"),
        (["--json", "/"], "cannot write /: it is a directory"),
        (["--json", "x" * 300], "File name too long"),
        (["--out", "x" * 300], "File name too long"),
        (["--out", "/dev/null/run"], "/dev/null is not a directory"),
        (["--limits", "1:99999999999999999999,:,:,:"], "expected least:most in samples"),
        (
            ["--slowdown", "1,1,1,1e300"],
            "--slowdown has the entry 1e+300; expected numbers of at least 1, and at most",
        ),
        (["--steps", "0"], "steps=0"),
        (["--lr", "-1"], "expected a positive learning rate"),
        (["--quantum", "7"], "positive divisor of the global batch"),
        (["--weigh", "gradient"], "expected 'loss' or 'hook'"),
        (["--epochs", "two"], "paceline: --epochs 'two': expected a whole number; see paceline train --help"),
        (["--workers=x"], "paceline: --workers 'x': expected a whole number"),
        (["--global-batch", "1e99"], "--global-batch '1e99': expected a whole number"),
        (["--seed", "9" * 5000], "--seed ...: expected a whole number"),
        (["--lr", "1", "--lr=fast"], "--lr 'fast': expected a number; see"),
        (["--patience", ""], "--patience '': expected a number; see"),
        (["--dead-after", "\udcff"], r"--dead-after '\udcff': expected a number; see"),
        (["--elastic=3"], "does not take a value; see paceline train --help"),
        (["--lr", "inf"], "lr=inf: expected a positive learning rate that is finite"),
        (["--loop", "local", "--every", "9" * 5000], "expected steps, 1 or more"),
        (["--resume", "nowhere"], "nowhere"),
        (["--resume", "nowhere", "--out", "x"], "leave out --compare and --out"),
        (
            ["--resume", "nowhere", "--steps", "9", "--global-batch", "8"],
            "own options; leave out --global-batch",
        ),
        (["--slowdown-trace", "missing.csv"], "missing.csv"),
        (["--json", "no/such/place.json"], "no/such/place.json"),
    ],
)
def test_options(arguments: list[str], words: str, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert words in sentence(capsys, arguments)
    assert not list(place.iterdir()), "something was written"


def test_data_files(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, labels = np.zeros((8, 4, 4), np.uint8), np.zeros(8, np.uint8)
    good = {"x_train": images, "y_train": labels, "x_test": images, "y_test": labels}
    for name, change in {
        "negative": {"y_train": np.full(8, -1)},
        "short": {"y_train": labels[:5]},
        "fractional": {"y_train": labels + 0.5},
    }.items():
        np.savez(f"{name}.npz", **(good | change))
        assert f"{name}.npz" in sentence(capsys, ["--data", f"{name}.npz"])
    Path("broken.npz").write_bytes(b"PK\x03\x04 and then nothing")
    assert "broken.npz" in sentence(capsys, ["--data", "broken.npz"])
    assert not Path("runs").exists()


def test_traces(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [f"{t},{i},0.001,0" for t in range(3) for i in range(4)]
    Path("gap.csv").write_text(TRACE + "\n".join(rows[:5] + rows[6:]) + "\n")
    assert "gap.csv" in sentence(capsys, ["--slowdown-trace", "gap.csv", "--steps", "2"])
    Path("short.csv").write_text(TRACE + "\n".join(rows) + "\n")
    said = sentence(capsys, ["--slowdown-trace", "short.csv", "--steps", "4"])
    assert "has 3 rounds and the run takes 4" in said
    said = sentence(capsys, ["--slowdown-trace", "short.csv", "--steps", "2", "--workers", "3"])
    assert "has 4 workers, the run 3" in said


def test_a_port_in_use(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = sentence(capsys, ["--port", str(port), "--steps", "1", "--workers", "1"])
    assert f"port {port} cannot be used" in said
    assert not Path("runs").exists()


def test_a_run_directory_that_exists(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    Path("mine/notes.txt").write_text("keep me")
    assert "run directory mine exists" in sentence(capsys, ["--out", "mine"])
    assert [p.name for p in Path("mine").iterdir()] == ["notes.txt"]
