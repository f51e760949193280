"""Following a record on disk: what is new is read, whatever becomes of the file."""

import json
import os
import shutil

import numpy as np
import pytest

from paceline.live.tail import Tail
from paceline.runs import Recorder, read
from paceline.runs.run import with_checksum
from paceline.runs.summary import ideal_seconds


def write(recorder, first, end, workers=3):
    for t in range(first, end):
        compute = [0.01 * (1 + i + t % 2) for i in range(workers)]
        recorder.round(
            round=t, epoch=0, time=0.1 * (t + 1), seconds=max(compute), batch=12 * workers, loads=[12] * workers,
            compute=compute, overhead=[0.001] * workers, shares=None, loss=1 / (t + 1),
        )  # fmt: skip


@pytest.fixture
def recorder(tmp_path):
    with Recorder.create(tmp_path / "run", {"policy": "equal", "workers": 3}) as recorder:
        yield recorder


def agrees(tail, run_dir):
    """The columns are those of the record as it is read whole."""
    run = read(run_dir)
    assert len(tail.columns) == len(run.round)
    for name in ("round", "time", "seconds", "batch", "loss"):
        assert np.array_equal(tail.columns[name], getattr(run, name), equal_nan=True)
    part = tail.columns.part(0, len(run.round))
    for name in ("loads", "compute", "overhead", "wait"):
        assert np.array_equal(getattr(part, name), getattr(run, name), equal_nan=True)
    assert tail.columns["ideal"] == pytest.approx(ideal_seconds(run), nan_ok=True)


def test_new_rounds_are_read_as_they_come(recorder):
    tail = Tail(recorder.run_dir)
    assert tail.poll()
    assert (len(tail.columns), tail.config["policy"], tail.gone) == (0, "equal", "")
    for end in (1, 2, 7, 40):
        write(recorder, len(tail.columns), end)
        assert tail.poll()
        agrees(tail, recorder.run_dir)
        assert not tail.poll()
    recorder.finish()
    assert tail.poll()
    assert tail.summary["steps"] == 40


def test_a_line_that_is_being_written_waits_for_its_end(recorder):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 3)
    path = recorder.run_dir / "rounds.jsonl"
    last = path.read_bytes().splitlines()[2]
    fields = json.loads(last) | {"round": 3}
    line, _ = with_checksum(json.dumps(fields), fields.pop("sum"))
    with path.open("ab") as file:
        file.write(line[:50])
        file.flush()
        tail.poll()
        assert len(tail.columns) == 3
        file.write(line[50:])
    tail.poll()
    agrees(tail, recorder.run_dir)
    assert len(tail.columns) == 4


def test_resumed_run_is_read_again(recorder):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 20)
    recorder.close()
    tail.poll()
    with Recorder.create(recorder.run_dir, {"policy": "level"}, resume=10) as again:
        tail.poll()
        agrees(tail, recorder.run_dir)
        write(again, 10, 12, workers=4)
        tail.poll()
        agrees(tail, recorder.run_dir)


def test_record_cut_and_grown_is_read_again(recorder):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 20)
    recorder.close()
    tail.poll()
    with Recorder.create(recorder.run_dir, {"policy": "level"}, resume=5) as again:
        write(again, 7, 60)
    tail.poll()
    agrees(tail, recorder.run_dir)


def test_replaced_file_is_read_again(recorder, tmp_path):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 20)
    tail.poll()
    with Recorder.create(tmp_path / "other", {"policy": "level", "workers": 3}) as other:
        write(other, 0, 30)
    os.replace(tmp_path / "other" / "rounds.jsonl", recorder.run_dir / "rounds.jsonl")
    tail.poll()
    agrees(tail, recorder.run_dir)
    assert len(tail.columns) == 30


def test_a_directory_that_vanishes_and_comes_back(recorder, tmp_path):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 5)
    tail.poll()
    shutil.move(recorder.run_dir, tmp_path / "away")
    assert tail.poll()
    assert "is gone" in tail.gone
    assert len(tail.columns) == 5
    assert not tail.poll()
    shutil.move(tmp_path / "away", recorder.run_dir)
    write(recorder, 5, 8)
    assert tail.poll()
    assert tail.gone == ""
    agrees(tail, recorder.run_dir)


def test_damaged_line_is_named_and_earlier_lines_stay(recorder):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 5)
    path = recorder.run_dir / "rounds.jsonl"
    sound = path.read_bytes()
    path.write_bytes(sound + b'{"round": 5}\n')
    tail.poll()
    assert "line 6 is damaged: it has no checksum at its end" in tail.damaged
    assert len(tail.columns) == 5
    assert not tail.poll()
    path.write_bytes(sound)
    tail.poll()
    assert tail.damaged == ""
    agrees(tail, recorder.run_dir)


def test_rounds_are_read_beside_a_damaged_summary(recorder):
    write(recorder, 0, 5)
    path = recorder.run_dir / "summary.json"
    path.write_text("{")
    tail = Tail(recorder.run_dir)
    tail.poll()
    assert "summary.json is damaged" in tail.damaged
    assert len(tail.columns) == 5
    path.write_text('{"steps": 5}')
    tail.poll()
    assert (tail.damaged, tail.summary) == ("", {"steps": 5})


def test_rounds_are_read_beside_a_damaged_configuration(recorder):
    tail = Tail(recorder.run_dir)
    write(recorder, 0, 5)
    assert tail.poll()
    path = recorder.run_dir / "run.json"
    sound = path.read_bytes()
    path.write_text("{")
    write(recorder, 5, 8)
    assert tail.poll()
    assert "run.json is damaged" in tail.damaged
    assert (len(tail.columns), tail.config["policy"]) == (8, "equal")
    path.write_bytes(sound)
    recorder.finish()
    assert tail.poll()
    assert (tail.damaged, tail.summary["steps"]) == ("", 8)


def test_what_has_not_changed_is_not_read_again(recorder, monkeypatch):
    """Neither the two small files, nor what stands behind a damaged line, while the record grows or not."""
    tail, path = Tail(recorder.run_dir), recorder.run_dir / "rounds.jsonl"
    write(recorder, 0, 5)
    (recorder.run_dir / "summary.json").write_text("{")
    with path.open("ab") as file:
        file.write(b'{"round": 5}\n')
    write(recorder, 6, 300)
    tail.poll()
    told = tail.damaged
    assert "line 6 is damaged" in told
    parsed = []
    loads = json.loads
    monkeypatch.setattr("paceline.runs.run.json.loads", lambda text: parsed.append(text) or loads(text))
    for end in (300, 310, 320):
        write(recorder, end, end + 10)
        tail.poll()
        assert not tail.poll()
    assert (parsed, tail.damaged, len(tail.columns)) == ([], told, 5)


def test_a_file_that_may_be_read_again_is(recorder):
    tail, path = Tail(recorder.run_dir), recorder.run_dir / "summary.json"
    path.mkdir()
    tail.poll()
    assert "cannot read" in tail.damaged
    path.rmdir()
    path.write_text('{"steps": 0}')
    tail.poll()
    assert (tail.damaged, tail.summary) == ("", {"steps": 0})


def test_problem_solved_before_the_first_round_is_not_reported(recorder):
    path = recorder.run_dir / "run.json"
    sound = path.read_bytes()
    (recorder.run_dir / "rounds.jsonl").unlink(missing_ok=True)
    path.write_text("{")
    tail = Tail(recorder.run_dir)
    tail.poll()
    assert "run.json is damaged" in tail.damaged
    path.write_bytes(sound)
    assert tail.poll()
    assert (tail.damaged, tail.config["policy"]) == ("", "equal")


def test_a_long_record_is_read_in_pieces(recorder, monkeypatch):
    monkeypatch.setattr("paceline.live.tail.CHUNK", 700)
    write(recorder, 0, 50)
    tail = Tail(recorder.run_dir)
    polls = 0
    while tail.poll():
        polls += 1
    assert polls > 5
    assert not tail.more
    agrees(tail, recorder.run_dir)


def test_reading_costs_what_is_new(recorder, monkeypatch):
    write(recorder, 0, 300)
    tail = Tail(recorder.run_dir)
    tail.poll()
    parsed = []
    loads = json.loads
    monkeypatch.setattr("paceline.runs.run.json.loads", lambda text: parsed.append(text) or loads(text))
    write(recorder, 300, 303)
    tail.poll()
    assert sum(b'"loads"' in text for text in parsed) == 3
