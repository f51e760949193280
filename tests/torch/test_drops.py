"""Pace(drop=...), DropCompute: late micro-batches are dropped, and the gradient is the mean over what ran."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.backup import dropcompute
from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.runs.findings import findings
from paceline.torch import Pace, timing
from paceline.torch.drops import WARM_UP, Drops, found
from paceline.torch.plan import Piece, RoundPlan
from support.drop_jobs import COUNT, alone, counting, dropping
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.torch_jobs import Samples, fresh

CASES: dict[str, dict[str, Any]] = {
    "samples": {"drop": "0.1 s"},
    "tokens": {"drop": 0.1, "tokens": True},
    "loaded by a process, in samples that cost differently": {
        "drop": "0.1 s",
        "loader": {"num_workers": 1, "cost": [1.0 + i % 3 for i in range(COUNT)]},
    },
    "balanced, and a round that is left": {"drop": "0.1 s", "policy": "level", "leave": True, "rounds": 12},
}


@pytest.mark.processes
@guarantee(
    "With `drop=`, the model is that of one process with the samples that ran; each rank runs at least one "
    "micro-batch."
)
def test_the_gradient_is_the_mean_over_what_ran() -> None:
    """Against one process that takes in each round the samples that the ranks really ran."""
    ranks = run_ranks(3, dropping, list(CASES.values()))
    for number, (name, case) in enumerate(CASES.items()):
        each = [rank[number] for rank in ranks]
        rounds = [list(chain(*parts)) for parts in zip(*(rank["used"] for rank in each), strict=True)]
        parameters, losses = alone(rounds, case.get("tokens", False))
        for rank in each:
            for ours, expected in zip(rank["parameters"], parameters, strict=True):
                assert np.abs(ours - expected).max() < 1e-12 * np.abs(expected).max(), name
            np.testing.assert_allclose(rank["losses"], losses, rtol=1e-12, err_msg=name)
            # all ranks are told the same of what ran, and of what did not
            assert [list(map(len, r["used"])) for r in each] == rank["loads"].T.tolist(), name
            planned = rank["loads"] + rank["dropped"]
            assert set(planned.sum(1)) <= {24, COUNT % 24}, name
            assert (rank["loads"] > 0).all(), name  # each runs one micro-batch at least
        assert each[0]["dropped"][:, 2].sum() > 0, name
        epoch = list(chain(*rounds[: -(-COUNT // 24)]))
        assert case.get("leave") or len(set(epoch)) == len(epoch), name  # nothing twice in an epoch


@pytest.mark.processes
@guarantee(
    "With `drop=`, the model is that of one process with the samples that ran; each rank runs at least one "
    "micro-batch."
)
def test_a_threshold_that_nobody_reaches_changes_no_bit() -> None:
    ranks = run_ranks(3, dropping, [{"stall": 0.0}, {"stall": 0.0, "drop": 600}])
    for without, rank in ranks:
        assert all(
            np.array_equal(a, b) for a, b in zip(without["parameters"], rank["parameters"], strict=True)
        )
        assert without["losses"] == rank["losses"]
        assert not rank["dropped"].any()
        assert without["dropped"] is None


@pytest.mark.processes
@guarantee("`count=` on one rank only, or for some losses under `drop=`, raises before any rank steps.")
def test_counts_with_some_losses_alone_are_refused() -> None:
    """Else tokens of some would be added to samples of others."""
    for said in run_ranks(3, counting, True):
        assert "rank 0 gave a count with the loss, and rank 1, 2 did not" in said
    for said in run_ranks(3, counting, False):
        assert "one piece was given a count and another was not" in said


@pytest.mark.processes
def test_a_threshold_is_found_from_the_first_rounds_and_recorded(tmp_path: Path) -> None:
    case = {"drop": "auto", "rounds": WARM_UP + 6, "record": str(tmp_path / "run"), "stall": 0.05}
    ranks = [rank[0] for rank in run_ranks(3, dropping, [case])]
    assert len({rank["tau"] for rank in ranks}) == 1
    dropped, record = ranks[0]["dropped"], ranks[0]["record"]
    assert not dropped[:WARM_UP].any()
    assert dropped[WARM_UP:, 2].any()
    assert ranks[0]["tau"] < 0.2  # rank 2 takes that for its four
    assert record.batch.tolist() == ranks[0]["loads"].sum(1).tolist()
    assert record.extras["dropped_loads"][-1] == dropped[-1].tolist()
    assert any("were dropped after the threshold" in each for each in findings(record))


def test_the_threshold_found_is_that_of_the_papers_rule() -> None:
    """Algorithm 2 by brute force, for ranks with unlike numbers of micro-steps."""
    rng = np.random.default_rng(3)
    pieces = (5, 3, 8)
    ends = [[np.cumsum(rng.exponential(0.1, many)).tolist() for _ in range(6)] for many in pieces]
    last = np.array([[each[-1] for each in rank] for rank in ends])
    traces = [[(each, whole + 0.05) for each, whole in zip(rank, last.max(0), strict=True)] for rank in ends]

    def gain(tau: float) -> float:
        gains = []
        for number in range(6):
            ran = [
                [end for i, end in enumerate(rank[number]) if not i or rank[number][i - 1] < tau]
                for rank in ends
            ]
            took = max(each[-1] for each in ran) + 0.05
            gains.append(sum(map(len, ran)) / sum(pieces) * (last[:, number].max() + 0.05) / took)
        return float(np.mean(gains))

    best = max(gain(end) for rank in ends for each in rank for end in each)
    assert gain(found(traces)) >= (1 - dropcompute.NEAR) * best
    assert gain(float("inf")) == pytest.approx(1.0)


def play(drops: Drops, monkeypatch: pytest.MonkeyPatch, step: int, seconds: Sequence[float]) -> list[bool]:
    """A round whose micro-steps take these seconds; which of those that ran were marked last."""
    clock, ran = [0.0], list[bool]()
    monkeypatch.setattr(timing, "now", lambda: clock[0])
    running: Any = SimpleNamespace(mark=0.0, began=0.0, ended=0.0, reading=0.0, ran=lambda piece: None)
    drops._meter.running = running
    plan = RoundPlan(step, np.array([len(seconds)]), len(seconds))
    for at, each in enumerate(seconds):
        ran.append(drops.begins(Piece(plan, 1, at == 0, at == len(seconds) - 1)).last)
        clock[0] += each
        if ran[-1]:
            break
    running.reading, running.ended = clock[0], clock[0] + 0.5
    return ran


def test_micro_step_expected_to_run_at_the_threshold_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    meter: Any = SimpleNamespace()
    drops = Drops(3.0, meter)
    assert play(drops, monkeypatch, 0, [1.0] * 3) == [False, False, True]
    assert drops.cut == -1  # none was dropped
    assert play(drops, monkeypatch, 1, [1.0] * 5) == [False, False, True]
    assert drops.cut == 1
    drops.again()
    assert drops.cut == -1


def test_threshold_is_found_after_the_warm_up_and_the_next_round_drops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meter: Any = SimpleNamespace()
    drops = Drops(math.nan, meter)
    for step in range(WARM_UP):
        assert len(play(drops, monkeypatch, step, [1.0] * 3 + [9.0] * (step % 4 == 0))) >= 3
        assert math.isnan(drops.tau)
    assert play(drops, monkeypatch, WARM_UP, [1.0] * 3 + [9.0] * 4)[-1]
    assert 0 < drops.tau < 12
    assert drops.cut == WARM_UP


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"drop": "soon"}, "expected seconds such as"),
        ({"drop": 0}, "expected seconds such as"),
        ({"drop": True}, "expected seconds such as"),
        ({"loop": "whole"}, "use loop='round'"),
        ({"micro_batch": None}, "set micro_batch="),
        ({"policy": "factoring"}, "moves what a late rank has not begun"),
        ({"weigh": "hook"}, "use weigh='loss'"),
        ({"limits": "memory"}, "set micro_batch= to what fits"),
        ({"micro_steps": 4}, "leave it out"),
        ({"policy": "auto", "deterministic": True}, "leave one of them out"),
    ],
)
def test_what_does_not_go_together_is_refused_in_a_sentence(options: dict[str, Any], words: str) -> None:
    chosen = {"drop": "0.5 s", "loop": "round", "micro_batch": 2} | options
    with pytest.raises(PacelineError, match=words):
        HostedPace(fresh(torch.float64), 8, **chosen)


def test_streams_and_own_samples_are_refused() -> None:
    pace = Pace(fresh(torch.float64), 8, loop="round", micro_batch=2, drop="0.5 s")
    assert pace.host.terms.policy == "level"
    with pytest.raises(PacelineError, match=r"use pace\.loader"):
        pace.stream(iter(Samples(20)))
    with pytest.raises(PacelineError, match=r"use pace\.loader"):
        next(iter(pace.sizes(3)))
    pace.close()
