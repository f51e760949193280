"""What the waiting of a run is due to, on records whose causes are known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from paceline.cli import run as command
from paceline.runs import Recorder, read
from paceline.runs.causes import causes, sentence
from support.records import line

GUARANTEES = (
    "The doctor names the rank that is last in most steps, and what part of the waiting is due to long "
    "samples, if it can be known.",
)

N, BATCH = 4, 32


def record(
    place: Path, speeds: list[float], spread: float, scatter: float = 0.0, rounds: int = 60, told: bool = True
) -> Path:
    """Equal counts of samples of lengths whose logarithms have that spread, padded in one micro-batch a worker."""
    rng = np.random.default_rng(0)
    with Recorder.create(place, {"policy": "equal", "workers": N, "global_batch": BATCH}) as recorder:
        for step in range(rounds):
            lengths = np.clip(np.rint(rng.lognormal(5, spread, (N, BATCH // N))), 16, 1024)
            longest = BATCH // N * lengths.max(1)
            parts = np.stack([longest, longest * lengths.max(1), np.ones(N)], 1)
            seconds = (0.01 + (parts @ [1e-5, 1e-8, 0.0]) / speeds) * np.exp(scatter * rng.standard_normal(N))
            known = {"parts": parts} if told else {}
            line(
                recorder, step, seconds=float(seconds.max()), loads=[BATCH // N] * N, compute=seconds, **known
            )
    return place


def test_waiting_for_long_samples_is_due_to_the_data(tmp_path: Path) -> None:
    found = causes(read(record(tmp_path / "run", [1.0] * N, 1.0)))
    assert found is not None
    assert found.data > 0.95
    assert found.data + found.speeds + found.scatter == pytest.approx(1)
    assert sentence(found).endswith("of the waiting is due to your samples' lengths.")
    assert found.alpha == pytest.approx(1e-3, rel=0.05)


def test_waiting_for_a_slow_worker_is_separated_from_long_samples(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    place = record(tmp_path / "run", [1.0, 1.0, 1.0, 0.4], 0.5, scatter=0.03)
    found = causes(read(place))
    assert found is not None
    assert found.speeds > 0.5
    assert found.data > 0.05
    assert found.slowest == [3]
    assert command(["whatif", str(place), "--policy", "level", "--json", str(tmp_path / "out.json")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "of the waiting is due to the speed of worker 3" in shown
    assert "to your samples' lengths" in shown
    assert json.loads((tmp_path / "out.json").read_text())["causes"]["slowest"] == [3]


def test_mere_scatter_is_called_so(tmp_path: Path) -> None:
    found = causes(read(record(tmp_path / "run", [1.0] * N, 0.05, scatter=0.3)))
    assert found is not None
    assert found.scatter > 0.7


@pytest.mark.parametrize("why", ["no parts", "few rounds", "equal samples"])
def test_record_without_causes_is_left_alone(tmp_path: Path, why: str) -> None:
    spread, rounds = (0.0 if why == "equal samples" else 1.0), (5 if why == "few rounds" else 20)
    place = record(tmp_path / "run", [1.0] * N, spread, rounds=rounds, told=why != "no parts")
    assert causes(read(place)) is None


def test_odd_parts_are_refused_where_they_are_written(tmp_path: Path) -> None:
    with (
        Recorder.create(tmp_path / "run", {"policy": "equal", "workers": 1}) as recorder,
        pytest.raises(Exception, match="an invalid value for parts"),
    ):
        line(recorder, 0, loads=[1], compute=[1.0], parts=[[1, 2]])
