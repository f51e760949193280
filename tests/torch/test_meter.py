"""Ranks measure their own seconds, not their wait, and plan alike from them."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace, RoundResult, decisions, exchange, meter, piece_reports
from paceline.torch.callbacks import OnRound, Record
from paceline.torch.gradients.reducers import LOOKS
from paceline.torch.meter import CpuStopwatch
from paceline.torch.rows import layout
from support.guarantees import guarantee
from support.ranks import errors_of, run_ranks
from support.scripted import Script
from support.small_net import Samples, fresh, optimizer_of

pytestmark = pytest.mark.processes


def measured(rank: int, ranks: int, policy: str, milliseconds: list[float], steps: int) -> list[RoundResult]:
    """Rounds of ranks that sleep for each sample."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    with Pace(ddp, 60, policy, loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(60 * steps), seed=5):
            time.sleep(milliseconds[rank] * len(x) / 1e3)
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
    return results


def test_seconds_are_the_same_on_all_ranks_and_shape_the_next_round() -> None:
    milliseconds = [1.0, 1.0, 10.0]
    results = run_ranks(3, measured, "level", milliseconds, 8)
    for rank in (1, 2):
        for first, other in zip(results[0], results[rank], strict=True):
            np.testing.assert_array_equal(first.loads, other.loads)
            np.testing.assert_array_equal(first.compute, other.compute)
    first, second = results[0][:2]
    assert first.loads.tolist() == [20, 20, 20]
    assert first.compute[2] >= 0.2
    slowest = first.compute.argmax()  # rank 2, but on a very busy machine
    assert second.loads[slowest] == second.loads.min() < 20, "what was measured in round 0 shapes round 1"


def in_intervals(
    rank: int, ranks: int, policy: str, milliseconds: list[float], steps: int
) -> tuple[list[RoundResult], dict[str, Any], int, int]:
    """Short rounds, without a sleep's inexactness: the rounds, the state after them, how many rows the ranks told of
    them, and how many rounds there were."""
    # Rounds count as short, and decisions as dear, however busy the machine is.
    decisions.LONG_SECONDS, decisions.MULTIPLE = math.inf, 10**6
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    told = []
    with Pace(ddp, 24, policy, loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        meter = pace._loop._meter
        announce = meter._announce
        meter._announce = lambda *lag: (told.append(1), announce(*lag))[1]  # type: ignore[method-assign]
        for x, y, _ in pace.loader(Samples(24 * steps), seed=5):
            until = time.perf_counter() + milliseconds[rank] * len(x) / 1e3
            while time.perf_counter() < until:
                pass
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
        state = pace.state_dict()
    return results, state, len(told), pace.rounds


@guarantee(
    "Every round is on record with its own loss and loads, also short rounds, which are reported in batches."
)
@pytest.mark.parametrize("policy", ["level", "auto", pytest.param("dolbie", marks=pytest.mark.nightly)])
def test_short_rounds_are_reported_in_batches(policy: str) -> None:
    ranks = run_ranks(3, in_intervals, policy, [0.02, 0.02, 0.06], 400)
    results, state, announced, rounds = ranks[0]
    assert [result.step for result in results] == list(range(400)), "every round is on record"
    assert announced < rounds / 4, "hardly any round was light"
    for others, stood, theirs, _ in ranks[1:]:
        assert json.dumps(stood) == json.dumps(state)
        assert theirs == announced
        for first, other in zip(results, others, strict=True):
            for name in ("loads", "compute", "overhead", "shares"):
                np.testing.assert_array_equal(getattr(first, name), getattr(other, name))
            assert (first.loss, first.within) == (other.loss, other.within)


@guarantee(
    "Every round is on record with its own loss and loads, also short rounds, which are reported in batches."
)
def test_batched_rounds_keep_their_losses_and_loads() -> None:
    """Against one process that is given the same batches, and the loads that each rank counted for itself."""
    ranks = run_ranks(2, in_intervals, "level", [0.02, 0.06], 200)
    alone = run_ranks(1, in_intervals, "equal", [0.0], 200)[0][0]
    assert len({tuple(result.loads) for result in ranks[0][0]}) > 1
    for two, one in zip(ranks[0][0], alone, strict=True):
        assert two.loss == pytest.approx(one.loss, rel=1e-12)
        assert two.loads.sum() == 24


def left_within_an_interval(rank: int, ranks: int, end: str) -> tuple[list[int], int]:
    """The rounds that listeners heard of, and those that there were."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    with Pace(ddp, 24, "level", loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(24 * (400 if end == "break" else 211)), seed=5):
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
            if end == "break" and pace.rounds == 211:
                break
        for size in pace.sizes(11) if end == "own" else ():  # its last round ends when the Pace does
            pace.backward(loss_of(ddp(torch.randn(size, 6, dtype=torch.float64)), torch.zeros(size).long()))
            optimizer.step()
            optimizer.zero_grad()
    return [result.step for result in results], pace.rounds


@guarantee(
    "Every round is on record with its own loss and loads, also short rounds, which are reported in batches."
)
@pytest.mark.parametrize("end", ["break", "exhausted", "own"])
def test_loop_that_ends_within_a_batch_misses_no_round(end: str) -> None:
    for steps, rounds in run_ranks(2, left_within_an_interval, end):
        assert steps == list(range(rounds))


def own_and_waiting(rank: int, ranks: int, milliseconds: list[float], steps: int) -> list[list[float]]:
    """Of each round: the seconds that Pace found, those until this rank's first gradient and until its last one, and
    those of its wait. (On a busy machine Pace may see the last one long before the clock here.)"""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    ready, seen, results = list[float](), [], []
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.append(time.perf_counter()))
    with Pace(ddp, 60, "equal", loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(60 * steps), seed=5):
            ready.clear()
            began = time.perf_counter()
            time.sleep(milliseconds[rank] * len(x) / 1e3)
            pace.backward(loss_of(ddp(x), y))
            seen.append([ready[0] - began, ready[-1] - began, time.perf_counter() - ready[-1]])
            pace.step(optimizer)
    return [[float(each.compute[rank]), *both] for each, both in zip(results, seen, strict=True)]


def test_seconds_leave_the_wait_out() -> None:
    """Against a clock of the loop's own: seconds that held the wait would hold it in every round."""
    for rank, rounds in enumerate(run_ranks(3, own_and_waiting, [1.0, 1.0, 10.0], 5)):
        assert all(found >= first for found, first, _, _ in rounds), rounds
        if rank < 2:
            assert min((found - last) / wait for found, _, last, wait in rounds) < 0.5, rounds


class LateWatch(CpuStopwatch):
    """A stopwatch whose readings come in a round later, as a GPU's do. It always shows these seconds."""

    lag = 1

    def __init__(self, shown: float) -> None:
        super().__init__()
        self._shown = shown

    def stop(self, mark: float) -> float:
        return self._shown


def measured_late(rank: int, ranks: int, milliseconds: list[float], steps: int) -> list[RoundResult]:
    """``measured`` with readings that come in a round later."""
    meter.stopwatch = lambda device: LateWatch(20 * milliseconds[rank] / 1e3)
    return measured(rank, ranks, "level", milliseconds, steps)


def test_late_readings_shape_the_round_after_the_next() -> None:
    results = run_ranks(3, measured_late, [1.0, 1.0, 10.0], 6)
    assert [result.step for result in results[0]] == list(range(6))
    loads = [result.loads.tolist() for result in results[0]]
    assert loads[0] == loads[1] == [20, 20, 20]
    assert loads[2][2] < 12
    assert loads == [result.loads.tolist() for result in results[2]]


def exchanged(rank: int, ranks: int) -> dict[str, list[dict[str, Any]]]:
    """What this rank receives of all ranks' reports by either exchange; rank r has run r + 1 pieces."""
    found: dict[str, list[dict[str, Any]]] = {}
    for kind in (exchange.MemoryExchange.of_all(layout(True)), exchange.GroupExchange(layout(True))):
        assert kind is not None
        row = np.zeros((), layout(True))
        row["first"], row["overhead"] = 7, rank / 2
        numbers = piece_reports.report(range(1, rank + 2), [1.0] * (rank + 1), 1e-3)
        row["pieces"] = np.array(numbers).view(piece_reports.ROW)[0]
        kind.send(7, row)
        rows = kind.receive(7)
        sizes = piece_reports.PieceReports.of(rows["pieces"]).pieces
        found[type(kind).__name__] = [
            {"first": one["first"], "overhead": one["overhead"], "sizes": size}
            for one, size in zip(rows, sizes, strict=True)
        ]
        kind.close()
    return found


@guarantee(
    "Each round has its own rows, in shared memory or over the network, if a report is early, half written "
    "or missing."
)
def test_every_exchange_brings_all_rows() -> None:
    for found in run_ranks(3, exchanged):
        for kind, rows in found.items():
            assert [row["first"] for row in rows] == [7, 7, 7], kind
            assert [row["overhead"] for row in rows] == [0.0, 0.5, 1.0], kind
            assert [row["sizes"] for row in rows] == [[1], [1, 2], [1, 2, 3]], kind


def test_exchanged_rows_are_one_array_of_float64() -> None:
    for dtype in (layout(False), layout(True)):
        assert np.full((), np.nan, dtype).tobytes() == np.full(dtype.itemsize // 8, np.nan).tobytes()


def test_pieces_beyond_the_record_are_added_to_the_last() -> None:
    sizes, seconds = list(range(1, 21)), [0.25] * 20
    reports = piece_reports.PieceReports.of(
        np.array(piece_reports.report(sizes, seconds, 1e-3)).view(piece_reports.ROW)
    )
    assert reports.loads.tolist() == [sum(sizes)]
    assert reports.counts.tolist() == [20]
    assert reports.pieces == [[*range(1, 16), sum(range(16, 21))]]
    assert reports.seconds == [[0.25] * 15 + [1.25]]


def test_loss_is_the_mean_over_the_whole_batch() -> None:
    equal = run_ranks(3, measured, "equal", [0.0] * 3, 2)
    alone = run_ranks(1, measured, "equal", [0.0] * 3, 2)
    for three, one in zip(equal[0], alone[0], strict=True):
        assert three.loss == pytest.approx(one.loss, rel=1e-12)


def misuse(rank: int, ranks: int, kind: str) -> None:
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    loss_of = nn.CrossEntropyLoss()
    if kind == "plain module":
        Pace(model, 16)
    if kind == "record":
        Pace(ddp, 16, callbacks=[Record("/dev/null/run")])
    if kind == "record on rank 1":
        Pace(ddp, 16, callbacks=[Record("/dev/null/run")] if rank == 1 else [])
    if kind == "global batch":
        Pace(ddp, 16 if rank == 0 else 18)
    with Pace(ddp, 16, Wavering(rank) if kind == "other plan" else "equal") as pace:
        for x, y, _ in pace.loader(Samples(16 * (LOOKS + 4)), seed=rank if kind == "seed" else 5):
            if kind == "no backward":
                continue
            with ddp.no_sync() if kind == "no_sync around the forward pass" else nullcontext():
                out = model(x) if kind == "the module itself" else ddp(x)
            if kind.startswith("another backward pass"):
                loss_of(out, y).backward(retain_graph=True)
            if kind == "another backward pass, zeroed":
                ddp.zero_grad()
            ends = kind == "no_sync around a late backward pass" and pace.rounds == LOOKS + 2
            with ddp.no_sync() if ends else nullcontext():
                pace.backward(loss_of(out, y))
            if kind == "a step left out" and (rank, pace.rounds) == (1, 2):
                ddp.zero_grad()
                continue
            pace.step(optimizer_of(ddp))


class Wavering:
    """A policy that decides otherwise on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, cluster: Any) -> Any:
        bias = (1.0,) * cluster.workers
        return Script((bias, bias, (1.0, 1.0 + 0.1 * (self._rank == 1), 1.0)))(cluster)


@guarantee(
    "A loss that bypasses DDP or `pace.backward`, as with `model(x)`, `no_sync()` or `loss.backward()`, "
    "raises before a step."
)
@guarantee(
    "Ranks that step differently, leave a round alone or are in different epochs raise on every rank, after "
    "at most 64 short rounds."
)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("plain module", "expected a DistributedDataParallel"),
        ("global batch", "rank 1 was given global_batch=18 and rank 0 global_batch=16"),
        ("record", "cannot write the run directory"),
        ("record on rank 1", "rank 1 was given callbacks=['Record'] and rank 0 callbacks=[]"),
        ("seed", "rank 1 was given seed=1 and rank 0 seed=0"),
        ("no backward", "without pace.backward(loss)"),
        ("other plan", "rank 1 decided another plan"),
        ("the module itself", "would not sum over the ranks; expected one of its own forward pass"),
        ("no_sync around the forward pass", "would not sum over the ranks"),
        (
            "no_sync around a late backward pass",
            "the model's no_sync() or require_backward_grad_sync was used",
        ),
        ("another backward pass", "a loss.backward() without a weight has left gradients in the model"),
        ("another backward pass, zeroed", "would not sum over the ranks"),
        ("a step left out", "rank 1 has left out another number of optimizer steps than the other ranks"),
    ],
)
def test_misuse_raises_on_every_rank(kind: str, words: str) -> None:
    for sentence in errors_of(3, misuse, kind):
        assert words in sentence
