"""The figures of a run against hand-computed ones."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from paceline.runs import Recorder, Run, summarize
from paceline.runs.summary import ideal_seconds, speeds

SLOW = np.array([0.001, 0.001, 0.001, 0.004])


def test_an_equal_split_over_one_slow_worker(tmp_path, ran):
    run = ran("run", 16, SLOW, rounds=10, finish={"test_accuracy": 0.9})
    summary = summarize(run)
    # 16 samples at 4 ms: 64 ms a round; together the workers make 3250 samples a second.
    assert summary["seconds"] == pytest.approx(0.64)
    assert summary["samples_per_second"] == pytest.approx(1000)
    assert summary["bound_samples_per_second"] == pytest.approx(3250)
    assert summary["share_of_bound"] == pytest.approx(1000 / 3250)
    assert summary["idle_share"] == pytest.approx(3 * 48 / (4 * 64))
    assert summary["final_batches"] == [16, 16, 16, 16]
    assert (summary["policy"], summary["workers"], summary["global_batch"]) == ("level", 4, 64)
    assert (summary["steps"], summary["samples"], summary["test_accuracy"]) == (10, 640, 0.9)
    assert summary["train_loss"] == pytest.approx(np.mean(2 / np.arange(1, 11)))
    assert summary["run_dir"] == str(tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_the_split_by_speed_is_at_the_bound(ran):
    summary = summarize(ran("run", [20, 20, 20, 5], SLOW, rounds=4))
    assert summary["share_of_bound"] == pytest.approx(1)
    assert summary["idle_share"] == pytest.approx(0)


def test_the_last_short_round_is_not_the_final_split_and_weighs_less(ran):
    loads = np.array([[8, 8], [12, 4], [2, 1]])
    summary = summarize(ran("run", loads, 1.0, epoch=2))
    assert summary["final_batches"] == [12, 4]
    assert summary["train_loss"] == pytest.approx(2 / 3)  # epoch 1 has but the short round
    one = summarize(ran("one", loads, 1.0))
    assert one["train_loss"] == pytest.approx((16 * 2 + 16 * 1 + 3 * 2 / 3) / 35)


def test_a_worker_without_load_keeps_its_last_speed_and_an_absent_one_has_none(ran):
    loads = np.array([[0, 10], [5, 5], [0, 10], [5, 5], [0, 10]])
    seconds = np.array([[1, 1], [2, 1], [3, 1], [np.nan, 1], [1, 1]])
    run = ran("run", loads, seconds)
    assert np.array_equal(
        speeds(run), [[np.nan, 1], [0.5, 1], [0.5, 1], [np.nan, 1], [0.5, 1]], equal_nan=True
    )
    assert ideal_seconds(run) == pytest.approx([10, 10 / 1.5, 10 / 1.5, 10, 10 / 1.5])


def test_no_rounds_no_figures(tmp_path, config):
    with Recorder.create(tmp_path / "run", config) as recorder:
        summary = recorder.finish(stopped="before the first round")
    assert summary["steps"] == 0
    assert summary["samples_per_second"] is summary["share_of_bound"] is summary["train_loss"] is None
    assert summary["stopped"] == "before the first round"
    assert summary["final_batches"] == []


@settings(max_examples=60, deadline=None)
@given(
    loads=arrays(np.int64, (6, 3), elements=st.integers(0, 50)),
    seconds=arrays(np.float64, (6, 3), elements=st.floats(1e-3, 1e3)),
)
def test_no_run_beats_its_bound(loads, seconds):
    """With costs linear in the load, no split of a round is faster than the split by speed."""
    loads[:, 0] += 1
    compute = np.where(loads > 0, loads * seconds, 0)
    wall = compute.max(axis=1)
    blank = np.zeros((6, 3))
    run = Run(
        path="", config={}, round=np.arange(6), epoch=np.zeros(6, int), time=np.cumsum(wall), seconds=wall,
        batch=loads.sum(axis=1).astype(float), loss=np.full(6, np.nan), loads=loads.astype(float),
        compute=compute, overhead=blank, wait=wall[:, None] - compute, extras={}, summary={},
        notes=[],
    )  # fmt: skip
    # A worker without load in a round counts at its last speed, so the sum of speeds is at least that of
    # the workers that ran.
    assert (ideal_seconds(run) <= wall * (1 + 1e-9)).all()
    summary = summarize(run)
    assert 0 < summary["share_of_bound"] <= 1 + 1e-9
    assert -1e-9 <= summary["idle_share"] < 1
