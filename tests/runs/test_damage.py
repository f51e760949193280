"""A damaged record is refused: what is read is what was written, up to where a kill cut it off."""

import functools
import json
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.runs import Recorder, read, report, trace
from paceline.simulate.whatif import of_run
from support.guarantees import guarantee
from support.mutilate import mutilations, with_new_checksums
from support.records import line

FINDS_DAMAGE = guarantee(
    "A record that was changed or damaged is refused with the line's number; one that is cut off is read "
    "up to there, with a message."
)


@FINDS_DAMAGE
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_mutilated_record_is_refused_or_is_a_run_that_was_killed(tmp_path_factory, data):
    """Nothing but the end of the record may be lost in silence: what is read is what was written, up to there."""
    folder = tmp_path_factory.mktemp("run")
    with Recorder.create(folder, {"policy": "level", "workers": 2}) as recorder:
        for t in range(6):
            line(recorder, t, seconds=1.0 + t / 8, loss=1.0 / (t + 1), pieces=[[3, 3], [2]])
    sound, path = read(folder), folder / "rounds.jsonl"
    path.write_bytes(data.draw(mutilations(path.read_bytes())))
    try:
        found = read(folder)
    except PacelineError as refused:
        assert "is damaged: it" in str(refused)  # noqa: PT017  # or nothing is raised
        return
    kept = len(found.round)
    for name in ("round", "time", "seconds", "batch", "loss", "loads", "compute", "overhead", "wait"):
        assert np.array_equal(getattr(found, name), getattr(sound, name)[:kept], equal_nan=True)


@functools.cache
def finished():
    """The files of a finished run, always the same: a file says when it was written, in more or fewer digits."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        facts = {"policy": "level", "workers": 2, "limits": [[1, 9], [None, 8]]}
        with Recorder.create(folder, facts) as recorder:
            for t in range(6):
                pieces = {"pieces": [[6], [2]], "at_once": 0.5, "piece_cost": 0.001}
                line(recorder, t, loss=1.0 / (t + 1), time=t + 1.5, **pieces)
            recorder.finish(test_accuracy=0.5)
        return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@FINDS_DAMAGE
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_damaged_run_makes_a_report_or_one_error(tmp_path_factory, data):
    """Any file of a run, also with checksums that fit: no traceback, no warning, no infinite figure."""
    folder = tmp_path_factory.mktemp("run")
    for name, content in finished().items():
        (folder / name).write_bytes(content)
    path = folder / data.draw(st.sampled_from(["rounds.jsonl", "run.json", "summary.json"]))
    path.write_bytes(data.draw(mutilations(path.read_bytes())))
    if data.draw(st.booleans()):
        (folder / "rounds.jsonl").write_bytes(with_new_checksums((folder / "rounds.jsonl").read_bytes()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            found = read(folder)
            report.render(found)
            json.dumps(list(trace._events(found, 1, "run")), allow_nan=False)
            answer = of_run(found, ["level", "auto"])
        except PacelineError as refused:
            assert str(folder) in str(refused)  # noqa: PT017
            assert "\n" not in str(refused)  # noqa: PT017
            return
    assert np.isfinite(
        [answer.seconds, answer.idle, *(each.seconds for each in answer.policies.values())]
    ).all()


@FINDS_DAMAGE
def test_a_finished_run_that_lost_its_last_rounds_is_refused(write):
    folder = write("run", [16] * 4, 1.0, rounds=6, finish={})
    path = folder / "rounds.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    with pytest.raises(PacelineError, match=r"4 rounds, but summary.json reports 6: lines at its end"):
        read(folder)
    (folder / "summary.json").unlink()
    assert len(read(folder).round) == 4


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("run.json", {"workers": "two"}, "workers is two; expected a whole number"),
        ("run.json", {"limits": [[1]]}, "limits is"),
        ("run.json", {"loader_workers": 1.5}, "loader_workers is 1.5"),
        ("run.json", {"resumed": [{"round": "x"}]}, "resumed is"),
        ("run.json", {"policy": 5}, "policy is 5; expected a string"),
        ("summary.json", {"samples": "many"}, "samples is many"),
        ("summary.json", {"share_of_bound": [1]}, "share_of_bound is"),
        ("summary.json", {"final_batches": 3}, "final_batches is 3"),
    ],
)
def test_odd_facts_are_refused(write, name, change, words):
    folder = write("run", [16] * 4, 1.0, rounds=3, finish={})
    (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | change))
    with pytest.raises(PacelineError, match=rf"{name} is damaged: {words}"):
        read(folder)
