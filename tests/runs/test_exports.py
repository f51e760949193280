"""The trace that Perfetto opens, and TensorBoard's scalars."""

import json
import sys
from collections import defaultdict

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.runs import Recorder, read, trace

SLOW = np.array([0.001, 0.001, 0.001, 0.004])


def events_of(path):
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["displayTimeUnit"] == "ms"
    return content["traceEvents"]


def spans(events, name, pid):
    return [(e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["name"] == name and e["pid"] == pid]


def test_microseconds_of_each_worker(tmp_path, write):
    events = events_of(trace.write(read(write(tmp_path / "run", np.full((3, 4), 16), np.tile(SLOW, (3, 1))))))
    assert spans(events, "compute", 3) == [(0, 64000), (64000, 64000), (128000, 64000)]
    assert spans(events, "compute", 0) == [(0, 16000), (64000, 16000), (128000, 16000)]
    assert spans(events, "wait", 0) == [(16000, 48000), (80000, 48000), (144000, 48000)]
    assert spans(events, "wait", 3) == []
    assert spans(events, "round 1", trace.CLUSTER) == [(64000, 64000)]
    names = {e["pid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {
        0: "worker 0",
        1: "worker 1",
        2: "worker 2",
        3: "worker 3",
        trace.CLUSTER: "cluster, level",
    }
    loads = [e["args"]["samples"] for e in events if e["ph"] == "C" and e["name"] == "load" and e["pid"] == 0]
    assert loads == [16, 16, 16]


def test_events_on_a_track_nest_whatever_the_clocks_said(tmp_path, config):
    """Overlapping rounds, compute beyond the round's end, overhead beyond compute."""
    random = np.random.default_rng(0)
    with Recorder.create(tmp_path / "run", config) as recorder:
        for t in range(50):
            recorder.round(
                round=t, epoch=0, time=float(t) / 3, seconds=random.random(), batch=8, loads=random.random(3),
                compute=[random.random(), random.random() * 2, None if t % 7 == 0 else 0.1],
                overhead=random.random(3), wait=random.random(3), loss=None,
                events=["worker 2 left", {"kind": "drop"}] if t == 7 else None,
            )  # fmt: skip
    events = events_of(trace.write(read(tmp_path / "run"), tmp_path / "trace.json"))
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] >= 0
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        open_ends = []
        for start, end in sorted(track, key=lambda span: (span[0], -span[1])):
            while open_ends and open_ends[-1] <= start + 1e-3:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-3
            open_ends.append(end)
    assert [e["name"] for e in events if e["ph"] == "i"] == ["worker 2 left", '{"kind": "drop"}']


def test_a_long_run_keeps_its_first_middle_and_last_rounds(tmp_path, write, monkeypatch):
    monkeypatch.setattr(trace, "EVENTS", 9 * 24)
    run = read(write(tmp_path / "run", np.full((100, 4), 16), np.tile(SLOW, (100, 1))))
    assert trace.kept(run) == [0, 1, 2, 48, 49, 50, 97, 98, 99]
    events = events_of(trace.write(run))
    assert len(events) <= 9 * 24 + 6
    assert events[5]["name"] == "9 of 100 rounds: the first, the middle and the last"


def test_tensorboard_scalars_are_the_record(tmp_path, write):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from paceline.runs import tensorboard

    run = read(write(tmp_path / "run", np.full((5, 4), 16), np.tile(SLOW, (5, 1))))
    board = EventAccumulator(str(tensorboard.write(run)))
    board.Reload()
    assert [event.step for event in board.Scalars("round/seconds")] == [0, 1, 2, 3, 4]
    assert [event.value for event in board.Scalars("round/samples_per_second")] == pytest.approx([1000] * 5)
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(run.loss.tolist())
    assert [event.value for event in board.Scalars("round/idle_share")] == pytest.approx([0.5625] * 5)
    assert [event.value for event in board.Scalars("load/worker_3")] == [16] * 5
    assert [event.value for event in board.Scalars("compute_seconds/worker_3")] == pytest.approx([0.064] * 5)


def test_no_tensorboard_no_traceback(tmp_path, monkeypatch):
    from paceline.runs import tensorboard

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PacelineError, match=r"pip install 'paceline\[torch,tensorboard\]'"):
        tensorboard.Board(tmp_path)
