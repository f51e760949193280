"""The record of a served job that lost rounds, as when the disk was full: no gap is passed over in silence."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from paceline import runs
from paceline.files import part_of
from paceline.rounds import RoundResult
from paceline.serve.catalog import JobRecord
from paceline.serve.models import Settings

NAMES = ["gpu-a", None]


def write(run_dir: Path, rounds: range, first: int) -> None:
    record = JobRecord(run_dir, "j", Settings.of(batch=12, workers=2, policy="equal"))
    record.open(first, rounds.stop)
    for number in rounds:
        six = np.array([6.0, 6.0])
        took = {"compute": six / 10, "overhead": 0 * six, "seconds": 1.0, "ended": float(number)}
        record.write(RoundResult(step=number, batch=12, loads=six, shares=six / 12, **took), NAMES)
    record.close()
    assert not record.error


def test_a_record_that_lacks_rounds_is_moved_aside(tmp_path: Path) -> None:
    write(tmp_path / "j", range(3), 0)
    half = part_of(tmp_path / "j" / "summary.json")
    half.write_text("as a service that is killed leaves it")
    write(tmp_path / "j", range(2, 4), 2)
    assert not half.exists()
    assert runs.read(tmp_path / "j").round.tolist() == [0, 1, 2, 3], "what is there already is left as it is"
    write(tmp_path / "j", range(6, 8), 6)
    assert runs.read(tmp_path / "j~1").round.tolist() == [0, 1, 2, 3]
    after = runs.read(tmp_path / "j")
    assert after.round.tolist() == [6, 7]
    assert after.notes == ["Rounds are missing from the record, first before round 6."]
