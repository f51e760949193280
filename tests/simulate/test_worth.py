"""Who is worth having, against all subsets of some workers and against recorded rounds whose answer is known."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq

from paceline.runs import Recorder, read
from paceline.simulate import worth
from support.blocks import ROOT
from support.guarantees import guarantee
from support.records import line

WORTH = guarantee(
    "`whatif` names the best subset of workers, and calls a worker not worth having only if the gain is sure."
)


def seconds(members, pace, overhead, batch, exchange, links, least=1.0) -> float:
    """By root finding: the moment until which these workers hold the batch, and then their sum."""
    chosen = list(members)
    held = lambda end: np.maximum(end - overhead[chosen], 0.0) @ (1 / pace[chosen]) - batch  # noqa: E731
    end = brentq(held, 0.0, float((overhead[chosen] + (batch + 1) * pace[chosen]).max()), xtol=1e-13)
    end = max(end, float((overhead[chosen] + least * pace[chosen]).max()))
    return end + (exchange[len(chosen)] * links[chosen].max() if len(chosen) > 1 else 0.0)


speed = st.floats(0.1, 10.0)


@WORTH
@given(
    st.lists(
        st.tuples(speed, st.floats(0.0, 40.0), st.sampled_from([1.0, 1.0, 3.0, 20.0])), min_size=1, max_size=7
    ),
    st.floats(1.0, 100.0),
    st.floats(0.0, 30.0),
    st.booleans(),
)
def test_no_subset_is_better_than_those_that_are_named(workers, batch, summed, alike) -> None:
    pace, overhead, links = (np.array(column) for column in zip(*workers, strict=True))
    links = np.ones(len(pace)) if alike else links
    batch, n = max(batch, len(pace)), len(pace)
    exchange = worth.growth(summed, n)
    found = worth.best(pace, overhead, batch, exchange, links)
    for k in range(1, n + 1):
        every = {
            members: seconds(members, pace, overhead, batch, exchange, links)
            for members in itertools.combinations(range(n), k)
        }
        assert found[k - 1].seconds == pytest.approx(min(every.values()), rel=1e-9)
        assert every[found[k - 1].members] == pytest.approx(min(every.values()), rel=1e-9)
    assert found[-1].members == tuple(range(n))


def test_a_sum_over_fewer_takes_less_and_alone_none() -> None:
    assert worth.growth(6.0, 4) == pytest.approx([0.0, 0.0, 4.0, 16 / 3, 6.0])


def said(pace, exchange, error=0.0):
    pace, none = np.array(pace), np.zeros(len(pace))
    found = worth.best(pace, none, 120.0, worth.growth(exchange, len(pace)))
    return worth.sentences(found, none, pace, 120.0, error)


def test_fastest_worker_alone_is_reported() -> None:
    assert said([1.0, 1.0, 4.0], 0.0) == [
        "Worker 0 alone, the fastest, would be 2.2x slower than all 3 together, balanced."
    ]
    faster = said([1.0, 8.0], 40.0)[0]
    assert faster == "Worker 0 alone, the fastest, would be 1.22x as fast as all 2 together, balanced."


def test_worker_that_costs_more_than_it_brings_is_named_if_sure() -> None:
    # 120 samples take 60 + 30 s on two, and 120 / 2.02 + 40 s on three
    alone, without = said([1.0, 1.0, 50.0], 40.0)
    assert alone == "Worker 0 alone, the fastest, would be 1.21x slower than all 3 together, balanced."
    assert without == (
        "Without worker 2 the others would be 1.10x as fast: it brings 1 % more speed, but the sums with it cost "
        "10 % of a round."
    )
    assert len(said([1.0, 1.0, 50.0], 40.0, error=0.1)) == 1
    assert len(said([1.0, 1.0, 2.0], 4.0)) == 1


def recorded(tmp_path, pace, exchange, rounds=40, noise=0.0, fixed=0.0, **config):
    """A run of these seconds per sample, whose rounds take so much longer than their slowest worker. fixed: seconds
    of each worker that don't grow with its samples, which the record does not know."""
    rng, n = np.random.default_rng(1), len(pace)
    facts = {"policy": "level", "workers": n, "global_batch": 120} | config
    with Recorder.create(tmp_path / "run", facts) as recorder:
        loads = np.full(n, 120 // n)
        for t in range(rounds):
            compute = fixed + loads * np.array(pace) * (1 + noise * rng.standard_normal(n))
            line(recorder, t, seconds=compute.max() + exchange, loads=loads, compute=compute)
    return worth.of_run(read(tmp_path / "run"))


@WORTH
def test_record_gives_both_and_scattered_rounds_only_what_is_sure(tmp_path) -> None:
    assert len(recorded(tmp_path / "steady", [0.01, 0.01, 0.5], 0.4)) == 2
    assert len(recorded(tmp_path / "scattered", [0.01, 0.01, 0.5], 0.4, noise=0.3)) == 1


@WORTH
def test_of_a_record_that_does_not_know_all_overheads_it_is_a_bound(tmp_path) -> None:
    # 40 samples each take 0.6 s, so that alone 120 seem to take 1.8 s; of the 0.6 s 0.2 s do not grow: 1.4 s
    [alone] = recorded(tmp_path, [0.01, 0.01, 0.01], 0.0, fixed=0.2)
    assert alone == "Worker 0 alone, the fastest, would be at most 3.0x slower than all 3 together, balanced."


def with_links(tmp_path, links):
    """Three workers of 10, 10 and 30 ms a sample, whose sums take .4 s."""
    pace, loads = np.array([0.01, 0.01, 0.03]), np.array([52, 51, 17])
    with Recorder.create(tmp_path, {"policy": "level", "workers": 3, "global_batch": 120}) as recorder:
        for t in range(40):
            told = {"links": links} if t == 12 else {}
            line(recorder, t, seconds=(loads * pace).max() + 0.4, loads=loads, compute=loads * pace, **told)
    return read(tmp_path)


def test_a_slow_link_is_distinguished_from_links_that_are_all_slow(tmp_path) -> None:
    own = with_links(tmp_path / "own", [0.005, 0.005, 0.05])
    _, without, link = worth.of_run(own)
    # 103 samples take 0.51 s on all and 120 take 0.6 s on two, whose sums take .4 * 3/4 / 10
    assert without == (
        "Without worker 2 the others would be 1.45x as fast: it brings 17 % more speed, but the sums with it cost "
        "40 % of a round."
    )
    assert link == "The link of worker 2 is 10x slower than the fastest, and every sum waits for it."
    alike = worth.of_run(with_links(tmp_path / "alike", [0.05, 0.05, 0.05]))
    assert alike[1:] == ["All workers' links are about equally fast: the sums do not wait for a single one."]


def test_updates_without_rounds_report_nothing(tmp_path) -> None:
    assert recorded(tmp_path, [0.01, 0.01, 0.5], 0.4, sync="asp") == []


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_the_benchmark_runs_all_and_then_the_fastest_alone() -> None:
    command = "benchmarks/worth.py --only 1/3 --rounds 8 --round-ms 40"
    done = subprocess.run(
        [sys.executable, *command.split()], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    title, both, alone, end = [line for line in done.stdout.splitlines()[1:] if line]
    assert title == "1/3 ms a sample, batch 53"
    assert both.split()[:3] == ["workers", "0,", "1"]
    assert alone.split()[:2] == ["workers", "0"]
    assert "of 1 clusters within 5%" in end
