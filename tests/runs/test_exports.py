"""The trace that Perfetto opens, and TensorBoard's scalars."""

import json
from collections import defaultdict

import numpy as np
import pytest

from paceline.runs import Recorder, read, trace
from support.records import line

GUARANTEES = ("The spans of a trace nest, and no process is number 0, also if clocks overlap.",)

SLOW = np.array([0.001, 0.001, 0.001, 0.004])


def events_of(path):
    content = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert content["displayTimeUnit"] == "ms"
    return content["traceEvents"]


def spans(events, name, tid, pid=1):
    return [
        (e["ts"], e["dur"])
        for e in events
        if (e["ph"], e["name"], e["tid"], e["pid"]) == ("X", name, tid, pid)
    ]


def test_microseconds_of_each_worker(ran):
    events = events_of(trace.write(ran("run", 16, SLOW, rounds=3)))
    slow, quick = trace.thread(3), trace.thread(0)
    assert spans(events, "compute", slow) == [(0, 64000), (64000, 64000), (128000, 64000)]
    assert spans(events, "compute", quick) == [(0, 16000), (64000, 16000), (128000, 16000)]
    assert spans(events, "wait", quick) == [(16000, 48000), (80000, 48000), (144000, 48000)]
    assert spans(events, "wait", slow) == []
    assert spans(events, "round 1", trace.ROUNDS) == [(64000, 64000)]
    assert {e["pid"] for e in events} == {1}, "viewers show no process 0"
    assert all(e["cat"] for e in events if e["ph"] != "M")
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    tracks = ["rounds", *(f"worker {i}" for i in range(4))]
    assert [named[tid] for tid in sorted(order, key=order.get)] == tracks
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["level"]
    loads = [e["args"]["samples"] for e in events if e["ph"] == "C" and e["name"] == "samples of worker 0"]
    assert loads == [16, 16, 16]


def test_the_exchange_is_apart_from_waiting(tmp_path, config):
    with Recorder.create(tmp_path / "run", config | {"workers": 2}) as recorder:
        line(recorder, 0, seconds=0.1, loads=[4, 4], compute=[0.03, 0.06])
    events = events_of(trace.write(read(tmp_path / "run")))
    assert spans(events, "wait", trace.thread(0)) == [(30000, 30000)]
    for worker in range(2):
        assert spans(events, "all-reduce and step", trace.thread(worker)) == [(60000, 40000)]


def test_the_pieces_of_a_worker_follow_one_another(tmp_path, config):
    with Recorder.create(tmp_path / "run", config | {"workers": 2}) as recorder:
        pieces = {"pieces": [[20, 15, 15], [20, 10]], "piece_seconds": [[0.04, 0.03, 0.03], [0.06, 0.04]]}
        pieces |= {"at_once": 0.5, "piece_cost": 0.001}
        line(recorder, 0, seconds=0.1, loads=[50, 30], compute=[0.1, 0.1], **pieces)
    events = events_of(trace.write(read(tmp_path / "run")))
    track = trace.thread(0) + 1
    assert [spans(events, f"piece {i}", track) for i in range(3)] == [
        [(0, 40000)], [(40000, 30000)], [(70000, 30000)]
    ]  # fmt: skip
    assert [e["args"]["samples"] for e in events if e["tid"] == track and e["ph"] == "X"] == [20, 15, 15]


def test_a_comparison_is_one_file(ran, tmp_path):
    runs = [ran(name, 16, SLOW, rounds=2, policy=name) for name in ("equal", "level")]
    events = events_of(trace.write_comparison(runs, tmp_path / "both.json"))
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "equal", 2: "level"}
    for pid in names:
        assert spans(events, "compute", trace.thread(3), pid) == [(0, 64000), (64000, 64000)]


def test_events_on_a_track_nest_for_any_clocks(tmp_path, config):
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


def test_a_long_run_keeps_its_first_middle_and_last_rounds(ran, monkeypatch):
    monkeypatch.setattr(trace, "EVENTS", 9 * 28)
    run = ran("run", 16, SLOW, rounds=100)
    assert trace.kept(run) == [0, 1, 2, 48, 49, 50, 97, 98, 99]
    events = events_of(trace.write(run))
    assert len(events) <= 9 * 28 + 12
    told = [e["name"] for e in events if e["ph"] == "i"]
    assert told == ["9 of 100 rounds: the first, the middle and the last"]
