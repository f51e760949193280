"""Runs as a trace file for ui.perfetto.dev or chrome://tracing: a process per run, a track per worker.

The Trace Event Format: "X" events have a start and a duration in microseconds and must nest on a track. A round
holds compute, which starts with its overhead, then the wait for the last worker, then the exchange of gradients
and the rest of the round. "C" are counters, "i" instants, "M" names and their order.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.files import write_whole
from paceline.runs.findings import labels
from paceline.runs.run import Run

TRACE = "trace.json"
EVENTS = 200_000  # a browser stays fast with this many
ROUNDS, WORKERS = 1, 2  # threads of a run's process: its rounds, then two a worker

Event = dict[str, Any]


def write(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the trace to ``path``, by default into the run's directory; returns the file's path."""
    return write_comparison([run], path if path is not None else run.path / TRACE)


def write_comparison(runs: Sequence[Run], path: str | os.PathLike[str]) -> Path:
    """Write several runs into one trace, each as a process that begins at time 0; returns the file's path."""
    events = (event for pid, run in enumerate(runs, 1) for event in _events(run, pid, labels(runs)[pid - 1]))
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events)
    return write_whole(Path(path), f'{{"displayTimeUnit":"ms","traceEvents":[\n{lines}\n]}}\n')


def kept(run: Run) -> list[int]:
    """The rounds in the trace: all, or the first, the middle and the last of a long run."""
    total, most = len(run.round), max(EVENTS // (6 * run.workers + 4), 3) if run.workers else 0
    if total <= most:
        return list(range(total))
    part = most // 3
    starts = (0, (total - part) // 2, total - part)
    return sorted({t for start in starts for t in range(start, start + part)})


def thread(worker: int) -> int:
    """A worker's thread; its pieces are on the next thread, since pieces and overhead would not nest."""
    return WORKERS + 2 * worker


def _events(run: Run, pid: int, label: str) -> Iterator[Event]:
    return (event | {"pid": pid} for event in (*_names(run, label), *_rounds(run)))


def _names(run: Run, label: str) -> Iterator[Event]:
    yield _event("M", "process_name", 0, args={"name": label})
    pieces = any(each is not None for each in run.extras.get("pieces", []))
    named = [(ROUNDS, "rounds")]
    for worker in range(run.workers):
        named.append((thread(worker), f"worker {worker}"))
        if pieces:
            named.append((thread(worker) + 1, f"worker {worker}: pieces"))
    for place, (tid, name) in enumerate(named):
        yield _event("M", "thread_name", tid, args={"name": name})
        yield _event("M", "thread_sort_index", tid, args={"sort_index": place})


def _rounds(run: Run) -> Iterator[Event]:
    rounds = kept(run)
    if len(rounds) < len(run.round):
        note = f"{len(rounds):,} of {len(run.round):,} rounds: the first, the middle and the last"
        yield _event("i", note, ROUNDS, cat="event", ts=0, s="p")
    before = 0.0
    for t in rounds:
        # A round ends where the next begins at the latest, so that rounds on one track never overlap.
        end = max(_micro(run.time[t]), before)
        start = min(max(_micro(run.time[t] - run.seconds[t]), before), end)
        before = end
        yield from _round(run, t, start, end)


def _round(run: Run, t: int, start: float, end: float) -> Iterator[Event]:
    number = int(run.round[t])
    whole = {"round": number, "epoch": int(run.epoch[t]), "batch": int(run.batch[t])}
    yield _span(ROUNDS, "round", f"round {number}", start, end, whole)
    counters = [("round seconds", {"seconds": float(run.seconds[t])})]
    if np.isfinite(run.loss[t]):
        counters.append(("loss", {"loss": float(run.loss[t])}))
    for name, values in counters:
        yield _event("C", name, 0, cat="counter", ts=start, args=values)
    for worker in range(run.workers):
        if not np.isfinite(run.compute[t, worker]):
            continue
        done = min(start + _micro(run.compute[t, worker]), end)
        yield from _worker(run, t, worker, start, done, end)
        yield from _pieces(run, t, worker, start, done)
    happened = run.extras.get("events")
    for event in (happened[t] if happened else None) or []:
        yield _event("i", _words(event), ROUNDS, cat="event", ts=start, s="p")


def _worker(run: Run, t: int, worker: int, start: float, done: float, end: float) -> Iterator[Event]:
    number, load, tid = int(run.round[t]), float(np.nan_to_num(run.loads[t, worker])), thread(worker)
    yield _span(tid, "round", f"round {number}", start, end, {"round": number, "samples": load})
    yield _span(tid, "compute", "compute", start, done, {"samples": load})
    extra = np.nan_to_num(run.overhead[t, worker])
    if extra > 0:
        yield _span(tid, "overhead", "overhead", start, min(start + _micro(extra), done), {})
    last = min(done + _micro(np.nan_to_num(run.wait[t, worker])), end)
    if last > done:
        yield _span(tid, "wait", "wait", done, last, {})
    if end > last:
        yield _span(tid, "exchange", "all-reduce and step", last, end, {})
    yield _event("C", f"samples of worker {worker}", 0, cat="counter", ts=start, args={"samples": load})


def _pieces(run: Run, t: int, worker: int, start: float, done: float) -> Iterator[Event]:
    """The pieces that a worker ran."""
    sizes, lengths = (run.extras.get(name) for name in ("pieces", "piece_seconds"))
    if not sizes or not lengths or sizes[t] is None or lengths[t] is None or worker >= len(sizes[t]):
        return
    at = start
    for number, (samples, length) in enumerate(zip(sizes[t][worker], lengths[t][worker], strict=True)):
        end = min(at + _micro(length), done)
        yield _span(thread(worker) + 1, "piece", f"piece {number}", at, end, {"samples": samples})
        at = end


def _micro(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _event(kind: str, name: str, tid: int, **more: Any) -> Event:
    return {"ph": kind, "name": name, "tid": tid, **more}


def _span(tid: int, category: str, name: str, start: float, end: float, args: dict[str, Any]) -> Event:
    return _event("X", name, tid, cat=category, ts=start, dur=round(end - start, 3), args=args)


def _words(event: Any) -> str:
    if isinstance(event, dict) and isinstance(event.get("what"), str):  # a worker was lost, or joined
        lost = event.get("seconds_lost")
        return event["what"] + (f", {lost:.2f} s lost" if isinstance(lost, float) else "")
    return event if isinstance(event, str) else json.dumps(event)
