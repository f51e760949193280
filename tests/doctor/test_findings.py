"""Diagnoses of records made by hand, whose truth is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline import runs
from paceline.doctor.findings import Diagnosis, diagnose, to_json

STEPS = 60


def diagnosis(
    place: Path, loading: np.ndarray, computing: np.ndarray, exchanging: float = 0.001, rest: float = 0.001
) -> Diagnosis:
    """Of 60 steps with these seconds of each rank, shape (n,) or (60, n)."""
    ranks = np.shape(loading)[-1]
    loading, computing = (np.broadcast_to(part, (STEPS, ranks)) for part in (loading, computing))
    with runs.Recorder.create(
        place / "run", {"policy": "equal", "workers": ranks, "first_step": 2}
    ) as record:
        now = 0.0
        for step in range(STEPS):
            own = loading[step] + computing[step]
            wall = own.max() + exchanging + rest
            now += wall
            record.round(
                round=step,
                epoch=0,
                time=now,
                seconds=wall,
                batch=16 * ranks,
                loads=[16] * ranks,
                compute=own,
                loading=loading[step],
                reducing=own.max() - own + exchanging,
            )
    return diagnose(runs.read(place / "run"))


def test_a_rank_that_computes_slowly(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, np.full(3, 0.002), np.array([0.01, 0.01, 0.046]))
    text = " ".join(found.sentences)
    assert "Rank 2 takes 4.0x the fastest rank's time per sample, from the first step on." in text
    assert "Rank 2 loses it in computing: 46 ms a step against 10 ms." in text
    # Two ranks wait 36 of 50 ms.
    assert f"Waiting for rank 2 takes {100 * 2 * 36 / 150:.0f} % of all ranks' time" in text
    assert "exchange of gradients itself takes 1 ms of a step, 2 %." in text
    assert np.allclose(found.spent.waiting, [0.036, 0.036, 0])
    assert found.lines[0] == "pace = paceline.torch.Pace(ddp, global_batch=48)"
    # At best all end together: 48 samples at speeds of 16 per 12, 12 and 48 ms, and 2 ms of exchange and rest.
    ideal = STEPS * (48 / (16 / 0.012 * 2 + 16 / 0.048) + 0.002)
    assert found.answer.seconds == pytest.approx(STEPS * 0.05)
    assert ideal < found.answer.policies["level"].seconds < 1.1 * ideal


def test_a_rank_that_loads_slowly(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, np.array([0.002, 0.03]), np.full(2, 0.01))
    assert "Rank 1 loses it in loading: 30 ms a step against 2 ms" in " ".join(found.sentences)


def test_a_rank_that_becomes_slow_is_dated(tmp_path: Path) -> None:
    computing = np.full((STEPS, 2), 0.01)
    computing[30:, 0] = 0.03
    found = diagnosis(tmp_path, np.zeros(2), computing)
    # 30 steps of 12 ms, and one more that is over when its end is noted; the first two were left out.
    assert found.sentences[0].startswith("Rank 0 is 3.0x slower than before, since step 32, ")
    assert "380 ms" in found.sentences[0]


def test_even_ranks_are_left_alone(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, np.full(3, 0.001), np.full(3, 0.01))
    text = " ".join(found.sentences)
    assert "No rank is slow" in text
    assert "leave the script as it is" in text
    assert found.lines == []
    assert to_json(found)["take"] is None


def test_a_slow_exchange_is_not_blamed_on_a_rank(tmp_path: Path) -> None:
    found = diagnosis(tmp_path, np.zeros(3), np.full(3, 0.01), exchanging=0.03)
    text = " ".join(found.sentences)
    assert "The exchange of gradients itself takes 30 ms of a step, 73 %: no division of the batch" in text
    assert found.lines == []


def test_changing_stragglers_are_told_from_a_lasting_one(tmp_path: Path) -> None:
    computing = 0.02 * np.exp(np.random.default_rng(0).normal(0, 0.5, (STEPS, 3)))
    found = diagnosis(tmp_path, np.zeros(3), computing)
    assert "No rank is slow for good, but each is at times" in found.sentences[0]
    assert "Waiting for each other takes" in " ".join(found.sentences)
