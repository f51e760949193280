"""Pace(drop=...), DropCompute: late micro-batches are dropped, and the gradient is the mean over what ran."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline import runs
from paceline.backup import dropcompute
from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.runs.findings import findings
from paceline.torch import Pace, timing
from paceline.torch.callbacks import OnRound, Record
from paceline.torch.drops import WARM_UP, Drops, threshold_of
from paceline.torch.plan import Piece, RoundPlan
from support.guarantees import guarantee
from support.ranks import errors_of, run_cases, run_ranks
from support.small_net import Samples, fresh, optimizer_of

COUNT, BATCH = 100, 24

CASES: dict[str, dict[str, Any]] = {
    "samples": {"drop": "0.1 s"},
    "tokens": {"drop": 0.1, "tokens": True},
    "loaded by a process, in samples that cost differently": {
        "drop": "0.1 s",
        "loader": {"num_workers": 1, "cost": [1.0 + i % 3 for i in range(COUNT)]},
    },
    "balanced, and a round that is left": {"drop": "0.1 s", "policy": "level", "leave": True, "rounds": 12},
}


def weight(index: torch.Tensor) -> torch.Tensor:
    """Tokens of each sample, where losses are means over tokens."""
    return 1 + index % 5


def loss_at(model: nn.Module, x: torch.Tensor, y: torch.Tensor, index: torch.Tensor, tokens: bool) -> Any:
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    many = weight(index) if tokens else torch.ones(len(index))
    return (each * many).sum() / many.sum(), many.sum()


def dropping(
    rank: int,
    ranks: int,
    stall: float = 0.06,
    rounds: int = 8,
    tokens: bool = False,
    leave: bool = False,
    loader: Any = None,
    record: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The parameters after some rounds, this rank's samples of each, and what was told."""
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(ddp)
    told: list[Any] = []
    chosen = {"policy": "equal", "loop": "round", "micro_batch": 2} | options
    pace = Pace(
        ddp, BATCH, callbacks=[OnRound(told.append), *([] if record is None else [Record(record)])], **chosen
    )
    batches = pace.loader(Samples(COUNT), seed=5, **(loader or {}))
    used: list[list[int]] = []

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Any:
        time.sleep(stall if rank == 2 else 0.001)
        used[-1].extend(index.tolist())
        loss, many = loss_at(ddp, x, y, index, tokens)
        return (loss, many) if tokens else loss

    while pace.rounds < rounds:
        for batch in batches:
            used.append([])
            pace.round(batch, function)
            if leave and pace.rounds == 2:
                leave = False
                used.pop()
                break  # its step is not taken
            pace.step(optimizer)
            if pace.rounds == rounds:
                break
    pace.host.flush()
    found = {
        "parameters": [p.detach().numpy() for p in model.parameters()],
        "used": used,
        "dropped": None if told[0].dropped_loads is None else np.array([each.dropped_loads for each in told]),
        "loads": np.array([each.loads for each in told]),
        "losses": [each.loss for each in told],
        "tau": None if pace._loop.drops is None else pace._loop.drops.tau,
    }
    pace.close()
    if record is not None and rank == 0:
        found["record"] = runs.read(record)
    return found


def alone(rounds: list[list[int]], tokens: bool) -> tuple[list[Any], list[float]]:
    """Parameters and losses of one process that takes just these samples in each round."""
    model, data, losses = fresh(torch.float64), Samples(COUNT), []
    optimizer = optimizer_of(model)
    for samples in rounds:
        index = torch.tensor(samples)
        loss, _ = loss_at(model, data.x[index], data.y[index], index, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return [p.detach().numpy() for p in model.parameters()], losses


@pytest.mark.processes
@guarantee(
    "With `drop=`, the model is that of one process with the samples that ran; each rank runs at least one "
    "micro-batch."
)
def test_dropped_rounds_train_the_model_of_the_samples_that_ran() -> None:
    """Against one process that takes in each round the samples that the ranks really ran."""
    for name, each in run_cases(3, dropping, CASES).items():
        case = CASES[name]
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
def test_threshold_that_no_rank_reaches_changes_no_bit() -> None:
    cases: dict[str, Any] = {"without": {"stall": 0.0}, "with": {"stall": 0.0, "drop": 600}}
    for without, rank in zip(*run_cases(3, dropping, cases).values(), strict=True):
        assert all(
            np.array_equal(a, b) for a, b in zip(without["parameters"], rank["parameters"], strict=True)
        )
        assert without["losses"] == rank["losses"]
        assert not rank["dropped"].any()
        assert without["dropped"] is None


def counting(rank: int, ranks: int, alone: bool) -> None:
    """Only some losses come with a count: those of rank 0, or every second one."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer = optimizer_of(ddp)
    pace = Pace(ddp, BATCH, "equal", loop="round", micro_batch=2, drop=600)
    calls: list[int] = []

    def function(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> Any:
        calls.append(len(x))
        loss, many = loss_at(ddp, x, y, index, False)
        return (loss, many) if (rank == 0 if alone else len(calls) % 2) else loss

    for batch in pace.loader(Samples(COUNT)):
        pace.round(batch, function)
        pace.step(optimizer)


@pytest.mark.processes
@guarantee("`count=` on one rank only, or for some losses under `drop=`, raises before any rank steps.")
def test_counts_with_some_losses_only_raise() -> None:
    """Else tokens of some would be added to samples of others."""
    for said in errors_of(3, counting, True):
        assert "rank 0 gave a count with the loss, and rank 1, 2 did not" in said
    for said in errors_of(3, counting, False):
        assert "one piece was given a count and another was not" in said


@pytest.mark.processes
def test_auto_threshold_is_found_and_recorded(tmp_path: Path) -> None:
    case: dict[str, Any] = {
        "drop": "auto",
        "rounds": WARM_UP + 6,
        "record": str(tmp_path / "run"),
        "stall": 0.05,
    }
    ranks = run_ranks(3, partial(dropping, **case))
    assert len({rank["tau"] for rank in ranks}) == 1
    dropped, record = ranks[0]["dropped"], ranks[0]["record"]
    assert not dropped[:WARM_UP].any()
    assert dropped[WARM_UP:, 2].any()
    assert ranks[0]["tau"] < 0.2  # rank 2 takes that for its four
    assert record.batch.tolist() == ranks[0]["loads"].sum(1).tolist()
    assert record.extras["dropped_loads"][-1] == dropped[-1].tolist()
    assert any("were dropped after the threshold" in each for each in findings(record))


def test_auto_threshold_is_that_of_the_paper() -> None:
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
    assert gain(threshold_of(traces)) >= (1 - dropcompute.NEAR) * best
    assert gain(float("inf")) == pytest.approx(1.0)


def play(drops: Drops, monkeypatch: pytest.MonkeyPatch, step: int, seconds: Sequence[float]) -> list[bool]:
    """A round whose micro-steps take these seconds; which of those that ran were marked last."""
    began = 100.0
    clock, ran = [began], list[bool]()
    monkeypatch.setattr(timing, "now", lambda: clock[0])
    running: Any = SimpleNamespace(mark=began, began=began, ended=0.0, reading=0.0, ran=lambda piece: None)
    drops._meter.running = running
    plan = RoundPlan(step, np.array([len(seconds)]), len(seconds))
    for at, each in enumerate(seconds):
        ran.append(drops.begins(Piece(plan, 1, at == 0, at == len(seconds) - 1)).last)
        clock[0] += each
        if ran[-1]:
            break
    running.reading, running.ended = clock[0] - began, clock[0] + 0.5
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


def test_first_micro_step_of_a_run_predicts_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    meter: Any = SimpleNamespace()
    assert play(Drops(2.0, meter), monkeypatch, 0, [1.0] * 3) == [False, True]


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
def test_unsupported_drop_options_raise(options: dict[str, Any], words: str) -> None:
    chosen = {"drop": "0.5 s", "loop": "round", "micro_batch": 2} | options
    with pytest.raises(PacelineError, match=words):
        HostedPace(fresh(torch.float64), 8, **chosen)


def test_drop_with_a_stream_or_own_samples_raises() -> None:
    pace = Pace(fresh(torch.float64), 8, loop="round", micro_batch=2, drop="0.5 s")
    assert pace.host.terms.policy == "level"
    with pytest.raises(PacelineError, match=r"use pace\.loader"):
        pace.stream(iter(Samples(20)))
    with pytest.raises(PacelineError, match=r"use pace\.loader"):
        next(iter(pace.sizes(3)))
    pace.close()
