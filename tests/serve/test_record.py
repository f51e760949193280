"""The record of a served job: a kill loses no round of it, and a gap, as after a full disk, is not silent."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fastapi")

from paceline import runs
from paceline.files import part_of
from paceline.rounds import RoundResult
from paceline.serve.catalog import JobRecord
from paceline.serve.events import Report
from paceline.serve.models import Settings
from paceline.serve.service import Service
from support.calling import serving

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


@pytest.mark.anyio
async def test_kill_between_commit_and_record_loses_no_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service's files are copied when the first round is about to be recorded, as a kill would leave them."""
    monkeypatch.setattr("paceline.serve.service.CALLS", 1)
    monkeypatch.setattr("paceline.serve.service.CALLS_PER_WORKER", 0)
    write, killed = JobRecord.write, tmp_path / "killed"

    def writes(record: JobRecord, closed: RoundResult, names: list[str | None]) -> None:
        if not killed.exists():
            shutil.copytree(tmp_path / "service", killed)
        write(record, closed, names)

    with monkeypatch.context() as patched:
        patched.setattr(JobRecord, "write", writes)
        async with serving(tmp_path / "service") as call:
            await call.create("j", ahead=1)
            reports = [Report(number, 6, 1.0) for number in range(2)]
            for (
                report
            ) in reports:  # two rounds are handed out at once, and closed by simultaneous reports of "a"
                await call.next("b")
                await call.service.report("j", "b", call.secrets["j", "b"], report)
            mine = call.secrets["j", "a"]
            await asyncio.gather(*[call.service.report("j", "a", mine, each) for each in reports])
    await Service(killed).stop()
    assert [path.name for path in (killed / "runs").iterdir()] == ["j"], "it is not moved aside"
    found = runs.read(killed / "runs" / "j")
    assert found.round.tolist() == [0, 1]
    assert not found.notes
