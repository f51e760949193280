"""The record on disk: what is written is read, also after a kill, and a resumed run is one run."""

import errno
import json
import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

import paceline
from paceline.errors import PacelineError
from paceline.runs import Recorder, read
from support.guarantees import guarantee
from support.mutilate import with_new_checksums
from support.records import line

FINDS_DAMAGE = guarantee(
    "A record that was changed or damaged is refused with the line's number; one that is cut off is read "
    "up to there, with a message."
)


def test_what_is_written_is_read(tmp_path, config):
    with Recorder.create(tmp_path / "run", config) as recorder:
        line(recorder, 0, overhead=np.array([0.1, 0.2]), shares=np.array([0.75, 0.25]), loss=2.5)
        line(
            recorder, 1, compute=[0.25, None], loads=np.array([8, 0]), pieces=np.array([[1, 2]]), loss=np.nan
        )
    run = read(tmp_path / "run")
    assert run.config.items() >= config.items()
    assert run.config["version"] == paceline.__version__
    assert run.round.tolist() == [0, 1]
    assert run.time.tolist() == [1, 2]
    assert run.loads.tolist() == [[6, 2], [8, 0]]
    nan = np.nan
    assert np.array_equal(run.compute, [[0.5, 1], [0.25, nan]], equal_nan=True)
    assert np.array_equal(run.overhead, [[0.1, 0.2], [0, nan]], equal_nan=True)
    assert np.array_equal(run.wait, [[0.5, 0], [0, nan]], equal_nan=True)
    assert np.array_equal(run.loss, [2.5, nan], equal_nan=True)
    assert run.extras == {"shares": [[0.75, 0.25], None], "pieces": [None, [[1, 2]]]}
    assert (run.summary, run.notes, run.workers, run.policy) == ({}, [], 2, "level")


def test_every_line_is_json_and_on_disk_at_once(tmp_path, config):
    recorder = Recorder.create(tmp_path / "run", config)
    line(recorder, 0, loss=float("inf"))
    text = (tmp_path / "run" / "rounds.jsonl").read_text()
    assert text.count("\n") == 1
    assert json.loads(text, parse_constant=pytest.fail)["loss"] is None
    recorder.close()
    recorder.close()


def test_a_killed_writer_leaves_every_finished_round(tmp_path):
    program = (
        "import sys, time\nfrom paceline.runs import Recorder\n"
        "recorder = Recorder.create(sys.argv[1], {'policy': 'level', 'workers': 2})\n"
        "for t in range(5):\n"
        "    recorder.round(round=t, epoch=0, time=t, seconds=1, batch=2, loads=[1, 1], compute=[1, 1])\n"
        "print('written', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "run")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ) as writer:
        assert writer.stdout.readline() == b"written\n"
        writer.send_signal(signal.SIGKILL)
    assert read(tmp_path / "run").round.tolist() == [0, 1, 2, 3, 4]


@FINDS_DAMAGE
def test_cut_off_last_line_is_left_out_with_a_note(write):
    folder = write("run", [16] * 4, 1.0, rounds=5)
    path = folder / "rounds.jsonl"
    whole = path.read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(whole) if byte == 10)]
    for cut in range(starts[3], starts[4], 7):
        path.write_bytes(whole[:cut])
        run = read(folder)
        assert run.round.tolist() == [0, 1, 2]
        assert len(run.notes) == (cut > starts[3])
        assert all("cut off" in note for note in run.notes)


@FINDS_DAMAGE
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("{oops", "line 2 is damaged: it is not valid JSON"),
        ("[]", "line 2 is damaged: it has no checksum"),
        ('{"a":1}', "line 2 is damaged: it has no number for round"),
        ("", "line 2 is damaged: it is not valid JSON"),
        ({"loads": [1]}, "no list of one number per worker for compute"),
        ({"loads": 3}, "no list of one number per worker for loads"),
        ({"wait": [1, 2, 3, "x"]}, "a value that is not a number in wait"),
        ({"seconds": None}, "no number for seconds"),
        ({"round": 0}, "is round 0, after round 0"),
        ({"round": 2}, "line 3 is damaged: it is round 2, after round 2"),
        ({"round": 1.5}, "has 1.5 for round; expected a whole number"),
        ({"epoch": -1}, "has -1 for epoch"),
        ({"batch": 10**400}, "no number for batch"),
        ({"seconds": float("nan")}, "no number for seconds"),
        ({"seconds": True}, "no number for seconds"),
        ({"seconds": 1e308}, "no number for seconds"),
        ({"seconds": 1e100}, "has 1e\\+100 for seconds"),
        ({"time": -1.0}, "has -1 for time"),
        ({"loss": float("inf")}, "no number for loss"),
        ({"loss": "low"}, "no number for loss"),
        ({"compute": [1, 1, 1, -1]}, "has -1 in compute; expected 0 or more"),
        ({"compute": [1, 1, 1, 1e10]}, "has 1e\\+10 in compute"),
        ({"loads": [16, 16, 16, -16]}, "has -16 in loads"),
        ({"loads": [16, 16, 16, float("nan")]}, "a value that is not a number in loads"),
        ({"pieces": 3}, "an invalid value for pieces"),
        ({"pieces": [[1, 2]], "piece_seconds": [[1]]}, "has pieces without their seconds"),
        ({"staleness": ["x"]}, "an invalid value for staleness"),
        ({"dropped": [1]}, "an invalid value for dropped"),
        ({"at_once": "all"}, "an invalid value for at_once"),
    ],
)
def test_a_damaged_line_is_named(write, damage, words):
    folder = write("run", [16] * 4, 1.0, rounds=3)
    path = folder / "rounds.jsonl"
    lines = path.read_text().splitlines()
    fields = json.loads(lines[1])
    del fields["sum"]
    lines[1] = damage if isinstance(damage, str) else json.dumps(fields | damage)
    path.write_bytes(with_new_checksums(("\n".join(lines) + "\n").encode()))
    with pytest.raises(PacelineError, match=words):
        read(folder)


@FINDS_DAMAGE
def test_a_line_without_a_checksum_is_refused(write):
    folder = write("run", [16] * 4, 1.0, rounds=3)
    path = folder / "rounds.jsonl"
    path.write_text(re.sub(r',"sum":"[0-9a-f]{8}"\}', "}", path.read_text()))
    with pytest.raises(PacelineError, match="line 1 is damaged: it has no checksum at its end"):
        read(folder)


def test_a_summary_does_not_outlive_further_rounds(tmp_path, config):
    with Recorder.create(tmp_path / "run", config) as recorder:
        line(recorder, 0)
        recorder.finish()
        line(recorder, 1)
        assert len(read(tmp_path / "run").round) == 2
        recorder.finish()
    assert read(tmp_path / "run").summary["steps"] == 2


@guarantee("A full disk, a power cut or a clock that is set back leaves a record that can be read.")
def test_a_full_disk_leaves_no_half_line(tmp_path, config):
    """Half of the bytes fit: the round is refused, and the next one, once there is room, is a line of its own."""

    class Full:
        def __init__(self, file):
            self._file, self.name, self.room = file, file.name, 60

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            data, self.room = data[: self.room], 0
            return self._file.write(data)

        def fileno(self):
            return self._file.fileno()

    with Recorder.create(tmp_path / "run", config) as recorder:
        line(recorder, 0)
        disk = recorder._file
        recorder._file = Full(disk)
        with pytest.raises(PacelineError, match="No space left on device; free some"):
            line(recorder, 1)
        recorder._file = disk
        line(recorder, 1)
    assert read(tmp_path / "run").round.tolist() == [0, 1]


@guarantee("A full disk, a power cut or a clock that is set back leaves a record that can be read.")
def test_what_could_not_be_read_again_is_not_written(tmp_path, config):
    with Recorder.create(tmp_path / "run", config) as recorder:
        line(recorder, 0, seconds=-1e-6, time=-2.0, compute=[-1.0, 1.0])  # a clock that was set back
        for wrong in ({"loads": [8, -1]}, {"loads": [8]}, {"batch": -8}, {"pieces": "x"}, {"round": -1}):
            with pytest.raises(PacelineError, match="cannot record round"):
                line(recorder, 1, **wrong)
        line(recorder, 1)
    run = read(tmp_path / "run")
    assert run.seconds.tolist() == [0, 1]
    assert run.compute.tolist() == [[0, 1], [0.5, 1]]


def test_what_is_no_run(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(PacelineError, match=r"not a run directory \(it has no run\.json\)"):
            read(path)
    for content in ("", "{", "[]"):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(PacelineError, match="damaged"):
            read(tmp_path)


def test_a_run_without_rounds_is_a_run(tmp_path, config):
    Recorder.create(tmp_path / "run", config).close()
    run = read(tmp_path / "run")
    assert run.loads.shape == (0, 4)
    (tmp_path / "run" / "rounds.jsonl").unlink()
    assert len(read(tmp_path / "run").round) == 0


def test_an_existing_directory_is_refused_and_untouched(tmp_path, config):
    (tmp_path / "mine").write_text("text")
    with pytest.raises(PacelineError, match="exists; choose another"):
        Recorder.create(tmp_path, config)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(PacelineError, match="cannot write"):
        Recorder.create(tmp_path / "mine", config)
    with pytest.raises(PacelineError, match="cannot write"):
        Recorder.create(tmp_path / "mine" / "run", config)
    (tmp_path / "empty").mkdir()
    Recorder.create(tmp_path / "empty", config).close()


def test_resume_continues_after_the_checkpoint(write):
    folder = write("run", [16] * 4, 1.0, rounds=6, finish={"test_accuracy": 0.5})
    path = folder / "rounds.jsonl"
    kept = path.read_bytes().splitlines(keepends=True)[:4]
    with path.open("ab") as file:
        file.write(b'{"round": 6, "epo')
    with Recorder.create(folder, {"workers": 2}, resume=4) as recorder:
        assert not (folder / "summary.json").exists()
        line(recorder, 4, time=0.25)
    assert path.read_bytes().splitlines(keepends=True)[:4] == kept
    run = read(folder)
    assert run.round.tolist() == [0, 1, 2, 3, 4]
    assert run.time[4] == run.time[3] + 0.25
    assert run.loads.shape == (5, 4)
    assert np.array_equal(run.loads[4], [6, 2, np.nan, np.nan], equal_nan=True)
    assert run.config["workers"] == 4
    assert run.config["resumed"][0].items() >= {"workers": 2, "round": 4}.items()
    with Recorder.create(folder, {"workers": 3}, resume=0):
        pass
    assert [part["round"] for part in read(folder).config["resumed"]] == [4, 0]
    assert len(read(folder).round) == 0


def test_resume_where_the_last_round_before_the_checkpoint_was_lost(write):
    folder = write("run", [16] * 4, 1.0, rounds=3)
    with Recorder.create(folder, {}, resume=5) as recorder:
        line(recorder, 5, loads=[16] * 4, compute=[1] * 4)
    run = read(folder)
    assert run.round.tolist() == [0, 1, 2, 5]
    assert run.notes == ["Rounds are missing from the record, first before round 5."]


def test_resume_of_what_is_no_run(tmp_path, config):
    with pytest.raises(PacelineError, match="not a run directory"):
        Recorder.create(tmp_path / "none", config, resume=0)
    assert not (tmp_path / "none").exists()


def test_floats_come_back_to_the_last_bit(tmp_path, config):
    random = np.random.default_rng(0).random((4, 64))
    with Recorder.create(tmp_path / "run", config) as recorder:
        line(recorder, 0, loads=random[0], compute=random[1], shares=random[3])
    run = read(tmp_path / "run")
    assert np.array_equal([run.loads[0], run.compute[0], run.extras["shares"][0]], random[[0, 1, 3]])
