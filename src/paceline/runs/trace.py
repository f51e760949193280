"""The run as a trace file for ui.perfetto.dev or chrome://tracing: a track a worker, counters beside it.

The Trace Event Format: "X" events with a start and a duration in microseconds, which must nest on a track: a
round holds compute, which starts with its overhead, and then wait. "C" are counters, "i" instants, "M" names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.files import write_whole
from paceline.runs.run import Run

TRACE = "trace.json"
EVENTS = 200_000  # a browser stays quick with as many
CLUSTER = 1_000_000  # pid of what concerns all workers


def write(run: Run, path: str | os.PathLike[str] | None = None) -> Path:
    """Write the trace, into the run's directory unless ``path`` says where; the file's path."""
    events = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in _events(run))
    content = f'{{"displayTimeUnit":"ms","traceEvents":[\n{events}\n]}}\n'
    return write_whole(Path(path) if path is not None else run.path / TRACE, content)


def kept(run: Run) -> list[int]:
    """The rounds in the trace: all, or of a long run the first, the middle and the last."""
    total, most = len(run.round), max(EVENTS // (5 * run.workers + 4), 3) if run.workers else 0
    if total <= most:
        return list(range(total))
    part = most // 3
    starts = (0, (total - part) // 2, total - part)
    return sorted({t for start in starts for t in range(start, start + part)})


def _events(run: Run) -> Iterator[dict[str, Any]]:
    yield _name(CLUSTER, f"cluster, {run.policy}")
    for worker in range(run.workers):
        yield _name(worker, f"worker {worker}")
    rounds = kept(run)
    if len(rounds) < len(run.round):
        shown = f"{len(rounds):,} of {len(run.round):,} rounds: the first, the middle and the last"
        yield {"ph": "i", "name": shown, "pid": CLUSTER, "tid": 0, "ts": 0, "s": "g"}
    before = 0.0
    for t in rounds:
        # A round ends where the next begins at the latest, so that rounds on one track never overlap.
        end = max(_micro(run.time[t]), before)
        start = min(max(_micro(run.time[t] - run.seconds[t]), before), end)
        before = end
        yield from _round(run, t, start, end)


def _round(run: Run, t: int, start: float, end: float) -> Iterator[dict[str, Any]]:
    number = int(run.round[t])
    whole = {"round": number, "epoch": int(run.epoch[t]), "batch": int(run.batch[t])}
    yield _span(CLUSTER, f"round {number}", start, end, whole)
    yield _counter(CLUSTER, "round seconds", start, {"seconds": float(run.seconds[t])})
    if np.isfinite(run.loss[t]):
        yield _counter(CLUSTER, "loss", start, {"loss": float(run.loss[t])})
    for worker in range(run.workers):
        compute = run.compute[t, worker]
        if not np.isfinite(compute):
            continue
        load = float(np.nan_to_num(run.loads[t, worker]))
        done = min(start + _micro(compute), end)
        yield _span(worker, f"round {number}", start, end, {"round": number, "samples": load})
        yield _span(worker, "compute", start, done, {"samples": load})
        yield from _pieces(run, t, worker, start, done)
        extra = np.nan_to_num(run.overhead[t, worker])
        if extra > 0:
            yield _span(worker, "overhead", start, min(start + _micro(extra), done), {})
        wait = np.nan_to_num(run.wait[t, worker])
        if wait > 0 and done < end:
            yield _span(worker, "wait", done, min(done + _micro(wait), end), {})
        yield _counter(worker, "load", start, {"samples": load})
    happened = run.extras.get("events")
    for event in (happened[t] if happened else None) or []:
        yield {"ph": "i", "name": _text(event), "pid": CLUSTER, "tid": 0, "ts": start, "s": "g"}


def _pieces(run: Run, t: int, worker: int, start: float, done: float) -> Iterator[dict[str, Any]]:
    """The pieces that a worker ran, on a track of their own: they and the overhead would not nest."""
    sizes, lengths = (run.extras.get(name) for name in ("pieces", "piece_seconds"))
    if not sizes or not lengths or sizes[t] is None or lengths[t] is None or worker >= len(sizes[t]):
        return
    at = start
    for number, (samples, length) in enumerate(zip(sizes[t][worker], lengths[t][worker], strict=True)):
        end = min(at + _micro(length), done)
        yield _span(worker, f"piece {number}", at, end, {"samples": samples}) | {"tid": 1}
        at = end


def _text(event: Any) -> str:
    return event if isinstance(event, str) else json.dumps(event)


def _micro(seconds: float) -> float:
    return round(float(seconds) * 1e6, 3)


def _name(pid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}


def _span(pid: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    length = round(end - start, 3)
    return {"ph": "X", "name": name, "pid": pid, "tid": 0, "ts": start, "dur": length, "args": args}


def _counter(pid: int, name: str, at: float, values: dict[str, float]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at, "args": values}
