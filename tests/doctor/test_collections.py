"""Garbage collections that others wait for, and how they are seen."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest

from paceline.doctor.sentences import collections, waited_for
from paceline.doctor.watches import Collections
from paceline.runs import Recorder, Run, read
from support.records import line


def record(place: Path, share: float) -> Run:
    """Three ranks that take 0.1 s; each collects for 0.05 s every ninth step, the ranks one after another."""
    with Recorder.create(place, {"policy": "equal", "workers": 3}) as recorder:
        for step in range(90):
            collecting = np.where(np.arange(3) == step // 3 % 3, 0.05 * (step % 3 == 0), 0.0)
            lasting = np.array([0.1, 0.1, 0.1 + share])
            spent = {"compute": lasting + collecting, "collecting": collecting}
            line(recorder, step, seconds=0.2, loads=[16] * 3, **spent)
    return read(place)


def test_waiting_for_one_ranks_collection_at_a_time_is_named(tmp_path: Path) -> None:
    run = record(tmp_path / "run", 0.0)
    assert waited_for(run) == pytest.approx(1.0)
    assert "garbage collection at a time" in collections(run)[0]
    assert "GarbageCollection(100)" in collections(run)[0]


def test_collections_without_waiting_ranks_are_not(tmp_path: Path) -> None:
    assert collections(record(tmp_path / "run", 5.0)) == []


def test_only_the_watched_threads_collections_count() -> None:
    watch = Collections()
    try:
        gc.collect()
        assert watch.taken() > 0
        assert watch.taken() == 0
        other = threading.Thread(target=gc.collect)
        other.start()
        other.join()
        assert watch.taken() == 0
    finally:
        watch.remove()
    gc.collect()
    assert watch.taken() == 0
