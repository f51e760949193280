"""Columns that grow agree with the record read whole, over any stretch."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runs.columns import Columns, edges, short
from paceline.runs.run import Run
from paceline.runs.summary import ideal_seconds, slowness, straggler_share


def record(rounds, workers, seed, absent=0.1, path="run"):
    random = np.random.default_rng(seed)
    loads = random.integers(0, 20, (rounds, workers)).astype(float)
    compute = loads * random.random((rounds, workers)) + 0.01
    gone = random.random((rounds, workers)) < absent
    loads[gone] = compute[gone] = np.nan
    wall = np.nanmax(np.nan_to_num(compute), axis=1) + 0.01
    return Run(
        path=path, config={"policy": "level"}, round=np.arange(rounds) * 2, epoch=np.zeros(rounds, int),
        time=np.cumsum(wall), seconds=wall, batch=np.nansum(loads, axis=1), loss=random.random(rounds),
        loads=loads, compute=compute, overhead=np.where(gone, np.nan, 0.005), wait=wall[:, None] - compute,
        extras={}, summary={}, notes=[],
    )  # fmt: skip


def cut(run, start, end):
    names = ("round", "epoch", "time", "seconds", "batch", "loss", "loads", "compute", "overhead", "wait")
    return dataclasses.replace(run, **{name: getattr(run, name)[start:end] for name in names})


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 900), st.integers(1, 12), st.integers(0, 9), st.data())
def test_in_any_pieces_and_any_window(rounds, workers, seed, data):
    run = record(rounds, workers, seed)
    columns = Columns()
    places = sorted({0, rounds, *data.draw(st.lists(st.integers(0, rounds), max_size=5))})
    for start, end in itertools.pairwise(places):
        columns.extend(cut(run, start, end))
    assert len(columns) == rounds
    assert columns["ideal"] == pytest.approx(ideal_seconds(run), nan_ok=True)
    start = data.draw(st.integers(0, rounds - 1))
    end = data.draw(st.integers(start + 1, rounds))
    part, window = cut(run, start, end), columns.window(start, end)
    fewer = short(run.batch)[start:end]
    fewer = fewer & ~fewer.all()
    assert window.short == fewer.sum()
    assert len(window.edges) <= 302
    assert (window.edges[0], window.edges[-1]) == window.span == (2 * start, 2 * (end - 1) + 1)
    at = np.searchsorted(run.round[start:end], window.edges)
    for i, (first, final) in enumerate(itertools.pairwise(at)):
        usual = part.seconds[first:final][~fewer[first:final]]
        assert window.seconds.mean[i] == pytest.approx(usual.mean() if len(usual) else np.nan, nan_ok=True)
        assert window.seconds.high[i] == pytest.approx(usual.max() if len(usual) else np.nan, nan_ok=True)
        assert window.time[i] == part.time[final - 1]
    for i, (first, final) in enumerate(itertools.pairwise(at)):
        there = ~np.isnan(part.loads[first:final])
        total = np.nansum(part.loads[first:final], axis=0)
        spent = np.nansum((part.compute - part.overhead)[first:final], axis=0)
        with np.errstate(all="ignore"):
            assert window.loads[i] == pytest.approx(total / there.sum(axis=0), nan_ok=True)
            part_of_all = np.where(there.any(axis=0), total / total.sum(), np.nan)
            assert window.portions[i] == pytest.approx(part_of_all, nan_ok=True)
            assert window.pace[i] == pytest.approx(
                np.where(total > 0, spent / total, np.nan), nan_ok=True, abs=1e-9
            )
    assert window.waited == pytest.approx(np.nansum(part.wait, axis=0))
    assert window.computed + window.overhead == pytest.approx(np.nansum(part.compute, axis=0))
    assert window.elapsed == pytest.approx(part.seconds.sum())
    assert window.last == pytest.approx(straggler_share(part))
    assert window.slowness == pytest.approx(slowness(part), nan_ok=True)


def test_workers_that_join_later():
    columns = Columns()
    first = record(30, 2, 0, absent=0)
    later = dataclasses.replace(record(30, 4, 1, absent=0), round=np.arange(60, 90))
    columns.extend(first)
    columns.extend(later)
    assert columns.workers == 4
    part = columns.part(0, 60)
    assert np.isnan(part.loads[:30, 2:]).all()
    assert np.array_equal(part.loads[30:], later.loads)
    assert columns.sums(0, 60)[4].tolist() == [60, 60, 30, 30]


@given(st.integers(0, 10**6), st.integers(1, 10**6), st.integers(1, 500))
def test_buckets_are_few_and_stay_where_they_are(start, count, limit):
    at = edges(start, start + count, limit)
    assert (at[0], at[-1]) == (start, start + count)
    assert (np.diff(at) > 0).all()
    assert min(count, limit) / 2 - 1 <= len(at) - 1 <= limit + 1
    size = int(np.diff(at)[1]) if len(at) > 3 else 1
    assert all(inner % size == 0 for inner in at[1:-1].tolist())
    if len(at) > 3:  # a few rounds later only the last bucket is another, or all have grown
        later = edges(start, start + count + 1, limit)
        grown = len(later) < 4 or int(np.diff(later)[1]) > size
        assert grown or later[: len(at) - 1].tolist() == at[:-1].tolist()
