"""Work that moves within the round: the same model and the same samples, whoever claims what and when."""

from __future__ import annotations

import dataclasses
import math
import random
import time
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.balance.factoring import Factoring, FactoringState
from paceline.errors import PacelineError, WorkerError
from paceline.hosts.accumulating import HostedPace
from paceline.rounds import PiecePlan, Plan
from paceline.torch import Pace, RoundResult, shared_memory
from paceline.torch.callbacks import OnRound
from paceline.torch.claims import Claims
from paceline.torch.counter import LENGTH, SPEED_UNITS, LocalCounter, NearbyCounter, StoreCounter
from paceline.torch.gradients.same_bits import ExactSum
from paceline.torch.plan import Division, Piece, RoundPlan, divide
from support.events import Events
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.small_net import (
    Samples,
    difference,
    fresh,
    optimizer_of,
    reference,
)

pytestmark = pytest.mark.processes


class Slow(Samples):
    """Samples that take 15 ms to load, with the time at which that began, by the machine's clock."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        began = time.monotonic()
        time.sleep(15e-3)
        return *super().__getitem__(index), began


def nap(seconds: float, _: torch.Tensor) -> None:
    """For a hook: the backward pass takes so much longer."""
    time.sleep(seconds)


def samples_and_ahead(rank: int, ranks: int, loader_workers: int) -> tuple[list[int], list[float]]:
    """The samples that this rank ran; of each claim, the part of its samples whose loading had begun when they were
    asked for."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    used: list[int] = []
    ahead: list[float] = []
    with Pace(ddp, 120, "factoring:portion=0.3", loop="pieces") as pace:
        loader = pace.loader(Slow(120 * 4), seed=5, num_workers=loader_workers)
        load = loader.load

        def timed(start: int, size: int) -> Any:
            asked = time.monotonic()
            batch = load(start, size)
            ahead.append(float((batch[-1] < asked).double().mean()))
            return batch

        loader.load = timed  # type: ignore[method-assign]
        for x, y, index, _ in loader:
            used += index.tolist()
            loss = loss_of(ddp(x), y)
            loss.register_hook(partial(nap, 18e-3 * len(x)))
            pace.backward(loss)
            pace.step(optimizer)
    return used, ahead


def test_claimed_samples_are_loaded_while_a_piece_runs() -> None:
    ranks = run_ranks(2, samples_and_ahead, 2)
    assert sorted(chain.from_iterable(used for used, _ in ranks)) == list(range(480))
    ahead = list(chain.from_iterable(claims for _, claims in ranks))
    assert len(ahead) > 15
    assert np.mean(ahead) > 0.5, "0 where nothing is loaded ahead"
    assert np.mean(np.array(ahead) > 0) > 0.8


def bits(rank: int, ranks: int, seed: int, dtype: str, steps: int, **options: Any) -> list[torch.Tensor]:
    """The parameters after some rounds of ranks that stall at random, in another order for another seed."""
    kind = getattr(torch, dtype)
    model = fresh(kind)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    pace = Pace(ddp, 48, "factoring", loop="pieces", deterministic=True, **options)
    loader = pace.loader(Samples(230, kind), seed=5)
    stalls = random.Random(seed * ranks + rank)
    while pace.rounds < steps:
        for x, y, _ in loader:
            time.sleep(1e-3 * stalls.expovariate(1.0) * len(x))
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer) and pace.rounds == steps:
                break
    pace.host.detach()
    return [p.detach().clone() for p in model.parameters()]


def parameters_of_two_runs(rank: int, ranks: int, dtype: str) -> list[list[Any]]:
    """The parameters of two runs with other claims, as plain lists."""
    return [[p.tolist() for p in bits(rank, ranks, seed, dtype, 8)] for seed in (1, 2)]


def test_deterministic_runs_have_the_same_bits() -> None:
    runs = [
        run
        for ranks in (3, 2)
        for rank in run_ranks(ranks, parameters_of_two_runs, "float32")
        for run in rank
    ]
    assert all(run == runs[0] for run in runs[1:])


def test_exact_sum_does_not_depend_on_its_order() -> None:
    rng = np.random.default_rng(2)
    addends = rng.standard_normal((40, 30)) * 10.0 ** rng.integers(-9, 5, (40, 30))
    found = []
    for order in (np.arange(40), rng.permutation(40), rng.permutation(40)):
        parameter = torch.nn.Parameter(torch.zeros(30, dtype=torch.float64))
        total = ExactSum([parameter])
        for row in addends[order]:
            parameter.grad = torch.from_numpy(row.copy())
            total.add()
        total.finish()
        found.append(parameter.grad.numpy().copy())
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    expected = [math.fsum(column) for column in addends.T]
    np.testing.assert_allclose(found[0], expected, rtol=1e-14, atol=1e-20)
    parameter.grad = torch.full((30,), float("inf"), dtype=torch.float64)
    total.add()
    total.finish()
    assert torch.isnan(parameter.grad).all()


def test_unsupported_deterministic_options_raise() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(PacelineError, match="does not move work"):
        Pace(model, 16, "level", loop="pieces", deterministic=True)
    with pytest.raises(PacelineError, match="batch norm"):
        Pace(model, 16, "factoring", loop="pieces", deterministic=True)
    with pytest.raises(PacelineError, match="hook"):
        Pace(model[0], 16, "factoring", loop="pieces", deterministic=True, weigh="hook")
    with pytest.raises(PacelineError, match="holds no chunk"):
        Pace(model[0], 64, "factoring", loop="pieces", deterministic=True, micro_batch=1)


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch": 5}, {"quantum": 4}, {"micro_steps": 2}, {"deterministic": True}]
)
def test_single_rank_runs_whole_rounds(options: dict[str, Any]) -> None:
    count = 84 if "quantum" in options else 83
    model, data = fresh(torch.float64), Samples(count)
    optimizer, used, micro_steps = optimizer_of(model), [], 0
    with HostedPace(model, 16, "auto", loop="pieces", **options) as pace:
        for x, y, index in pace.loader(data, seed=5):
            used += index.tolist()
            micro_steps += 1
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
    assert sorted(used) == list(range(count))
    assert micro_steps == 6 or options.keys() & {"micro_batch", "micro_steps", "deterministic"}
    for mine, theirs in zip(model.parameters(), reference(count, 16, 6, torch.float64), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_left_round_runs_again() -> None:
    model = fresh(torch.float64)
    optimizer, used, left = optimizer_of(model), [], False
    with Pace(model, 24, "factoring:portion=0.3", loop="pieces") as pace:
        loader = pace.loader(Samples(83), seed=5)
        while not left or len(used) < 83:
            for x, y, index in loader:
                pace.backward(torch.nn.functional.cross_entropy(model(x), y))
                if not left:
                    left = True
                    optimizer.zero_grad()
                    break
                used += index.tolist()
                pace.step(optimizer)
    assert sorted(used) == list(range(83))


class PiecesLater(Factoring):
    """A policy whose first plan is whole."""

    def init(self) -> tuple[Plan, FactoringState]:
        plan, state = super().init()
        return dataclasses.replace(plan, piece_plan=None), state


@guarantee(
    "`auto` plans whole rounds where a round takes less than 50 times what a piece costs, and tries pieces "
    "again later."
)
def test_policy_with_a_whole_first_plan_moves_no_work() -> None:
    model = fresh(torch.float64)
    optimizer, used = optimizer_of(model), []
    with Pace(model, 16, lambda cluster: PiecesLater(cluster, portion=0.3), loop="pieces") as pace:
        for x, y, index in pace.loader(Samples(83), seed=5):
            used += index.tolist()
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
    assert sorted(used) == list(range(83))


def test_auto_plans_whole_rounds_for_batch_norm_and_micro_steps() -> None:
    normed = torch.nn.Sequential(fresh(torch.float64), torch.nn.BatchNorm1d(3))
    for pace in (Pace(normed, 16, "auto"), HostedPace(fresh(torch.float64), 16, "auto", micro_steps=2)):
        assert pace.host.terms.policy == "level"
        pace.close()
    with pytest.raises(PacelineError, match="different numbers of micro-steps"):
        HostedPace(fresh(torch.float64), 16, "factoring", micro_steps=2)


def test_claim_without_rank_0_raises() -> None:
    counter = StoreCounter.__new__(StoreCounter)
    server = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counter._store = torch.distributed.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
    counter._rank, counter._newest = 1, -1
    assert counter.add(3, 7, reported=1, speed=2) == (0, 1, 2)
    assert counter.add(3, 5, reported=1, speed=-3) == (7, 2, -1)
    del server
    with pytest.raises(WorkerError, match="no answer from rank 0, where work is claimed"):
        counter.add(4, 1)


@settings(deadline=None, max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 1), st.integers(-(2**15), 2**15)), max_size=20)
)
def test_all_counters_add_alike(additions: list[tuple[int, int, int]]) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counter, alone = StoreCounter.__new__(StoreCounter), LocalCounter()
    counter._store, counter._rank, counter._newest = store, 1, -1
    nearby = NearbyCounter(shared_memory.make(LENGTH)[0], 1.0)
    for samples, reported, speed in additions:
        expected = alone.add(7, samples, reported, speed)
        assert counter.add(7, samples, reported, speed) == nearby.add(7, samples, reported, speed) == expected
    nearby.close()


def test_short_round_has_room_for_its_last_cell() -> None:
    """Of 10 samples in chunks of 4, one rank runs 8 as planned, and claims the other 2."""
    half, one = np.array(0.5), np.ones(1)
    piece_plan, most = PiecePlan(half, half, half, least=one, speeds=one), np.array([48])
    division = divide(piece_plan, np.array([10]), 0, most, most, unit=4, chunk=4)
    assert division is not None
    assert (division.pool, division.batch) == (10 - int(division.first[0] + division.kept[0]), 10)
    with pytest.raises(PacelineError, match="no room for whole chunks"):
        divide(piece_plan, np.array([10]), 0, np.array([7]), most, unit=4, chunk=4)


def test_rank_without_room_for_a_claim_reports_its_speed() -> None:
    half, ones = np.array(0.5), np.ones(2)
    piece_plan = PiecePlan(half, half, half, least=ones, speeds=1e3 * ones)
    division = Division(np.array([10, 10]), np.array([0, 0]), start=20, pool=20, piece_plan=piece_plan)
    claims = Claims(torch.device("cpu"), unit=1, largest=None, most=10)
    claims._counter = counter = LocalCounter()
    claims.open(time.perf_counter())
    time.sleep(0.02)
    plan = RoundPlan(0, np.array([20, 20]), 40, division)
    claims.done(Piece(plan, 10, first=True, last=False))
    assert claims.take(division) is None
    claims.close()
    claimed, reported, speed = counter.add(1)
    assert (claimed, reported) == (0, 1)
    assert -SPEED_UNITS / 2 <= speed < -SPEED_UNITS / 8  # 500 a second at most, instead of 1,000 of 2,000


def frozen(rank: int, ranks: int, steps: int, folder: str) -> tuple[float, list[RoundResult]]:
    """Rank 1 is stopped in its first piece of round 5 until the others are at their last: the difference from one
    process, and the rounds."""
    events = Events(folder)
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    count = 60 * steps
    with Pace(ddp, 60, "factoring:portion=0.3", loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(count), seed=5):
            if rank == 1 and pace.rounds == 5 and pace.host.first:
                events.stop("0", "2")
            if rank != 1 and pace.rounds == 5 and pace.host.last:
                events.tell(str(rank))
            time.sleep(1e-3 * len(x))
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
    return difference(model.parameters(), reference(count, 60, steps, torch.float64)), results


def test_work_that_a_frozen_rank_has_not_begun_runs_elsewhere(tmp_path: Path) -> None:
    found = run_ranks(3, frozen, 8, str(tmp_path))
    assert max(far for far, _ in found) < 1e-12
    rounds = found[0][1]
    stuck = rounds[5]
    assert stuck.loads.sum() == 60
    assert stuck.within is not None
    plan = stuck.within.at_once * 20  # of an even plan, as rank 1's was to be
    assert stuck.within.pieces[1][0] <= 2 * plan
    assert len(stuck.within.pieces[1]) <= 3  # that piece, a claim at most, and its end
    assert stuck.loads[1] < 20, "less than its even part, however the others fared beside other programs"


@pytest.mark.parametrize("once_a_round", [True, False])
@pytest.mark.parametrize("rates", [(0.1,), (0.1, 0.01)])
def test_schedule_stepped_within_a_round_warns(
    once_a_round: bool, rates: tuple[float, ...], recwarn: pytest.WarningsRecorder
) -> None:
    model = torch.nn.Linear(2, 2)
    parts = [[model.weight], [model.bias]] if len(rates) > 1 else [[*model.parameters()]]
    optimizers = [torch.optim.SGD(part, lr=rate) for part, rate in zip(parts, rates, strict=True)]
    optimizer = optimizers[0]
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    micro_steps = 0
    with Pace(model, 16, "factoring:portion=0.5", loop="pieces") as pace:
        for x in pace.loader(torch.randn(64, 2)):
            pace.backward(model(x).square().mean())
            if pace.step(optimizers) or not once_a_round:
                scheduler.step()
            micro_steps += 1
        assert pace.rounds == 4 < micro_steps
    said = [
        str(each.message) for each in recwarn if "learning rate was changed within round" in str(each.message)
    ]
    assert len(said) == (0 if once_a_round else 1)
