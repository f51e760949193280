"""Work that moves within the round: the same model and the same samples, whoever claims what and when."""

from __future__ import annotations

import dataclasses
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.balance.factoring import Factoring, FactoringState
from paceline.errors import PacelineError, WorkerError
from paceline.hosts.accumulating import HostedPace
from paceline.rounds import PiecePlan, Plan
from paceline.torch import Pace, shared_memory
from paceline.torch.claims import Claims
from paceline.torch.counter import LENGTH, SPEED_UNITS, LocalCounter, NearbyCounter, StoreCounter
from paceline.torch.gradients.same_bits import ExactSum
from paceline.torch.plan import Division, Piece, RoundPlan, divide
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.torch_jobs import (
    Samples,
    differences_from_one_process,
    fresh,
    frozen,
    indices_used,
    optimizer_of,
    parameters_of_two_runs,
    part_of_an_epoch,
    reference,
    samples_and_ahead,
)

pytestmark = pytest.mark.processes

PULLED = {"policy": "factoring", "batch": 48, "count": 230, "jitter": 4e-4, "limits": None}
EXACT = {
    "factoring": {},
    "half at once": {"policy": "factoring:portion=0.5"},
    "self-scheduling": {"policy": "factoring:scheme=self,piece=3"},
    "guided": {"policy": "factoring:scheme=guided"},
    "auto": {"policy": "auto"},
    "auto, hook, micro-batches": {"policy": "auto", "weigh": "hook", "micro_batch": 5},
    "auto, quantum, prefetching": {"policy": "auto", "quantum": 4, "count": 232, "loader_workers": 1},
    "micro-batches": {"micro_batch": 5},
    "quantum": {"quantum": 4, "count": 232},
    "hook": {"weigh": "hook"},
    "hook, unused parameters": {"weigh": "hook", "sometimes": True},
    "unused parameters": {"sometimes": True},
    "sum loss": {"reduction": "sum"},
    "a rank without a plan": {
        "policy": "factoring:scheme=self,piece=2",
        "limits": [(0, None)] * 3,
        "batch": 2,
    },
    "limits": {"limits": [(1, 20), (1, 20), (1, 20)]},
    "prefetching": {"loader_workers": 1},
}
ONCE = {
    "in the main process": {},
    "prefetching by 1": {"loader_workers": 1, "micro_batch": 7},
    "prefetching by 4": {"loader_workers": 4},
    "batch norm": {"count": 97, "norm": True},
    "batch norm, micro-batches": {"norm": True, "micro_batch": 5},
    "batch norm, prefetching by 2": {"norm": True, "loader_workers": 2, "count": 97},
    "fewer samples than a batch": {"count": 31},
    "self-scheduling": {"policy": "factoring:scheme=self,piece=4"},
}


def test_parameters_equal_those_of_one_process() -> None:
    differences = run_ranks(
        3, differences_from_one_process, [PULLED | {"steps": 7} | case for case in EXACT.values()]
    )
    assert differences[0] == differences[1] == differences[2], "the ranks' parameters differ"
    for name, difference in zip(EXACT, differences[0], strict=True):
        assert difference < 1e-12, f"{name}: relative difference {difference:.1e}"


def test_each_sample_once_an_epoch() -> None:
    ranks = run_ranks(3, indices_used, [PULLED | {"count": 120} | case for case in ONCE.values()])
    for number, (name, case) in enumerate(ONCE.items()):
        count = case.get("count", 120)
        for epoch in range(2):
            used = list(chain.from_iterable(rank[number][epoch] for rank in ranks))
            assert sorted(used) == list(range(count)), name


def test_claimed_samples_are_loaded_while_the_piece_before_runs() -> None:
    ranks = run_ranks(2, samples_and_ahead, 2)
    assert sorted(chain.from_iterable(used for used, _ in ranks)) == list(range(480))
    ahead = list(chain.from_iterable(claims for _, claims in ranks))
    assert len(ahead) > 15
    assert np.mean(ahead) > 0.5, "0 where nothing is loaded ahead"
    assert np.mean(np.array(ahead) > 0) > 0.8


def test_deterministic_results_have_the_same_bits_whoever_claims_what() -> None:
    runs = [
        run
        for ranks in (3, 2)
        for rank in run_ranks(ranks, parameters_of_two_runs, "float32")
        for run in rank
    ]
    assert all(run == runs[0] for run in runs[1:])


def test_deterministic_results_are_those_of_one_process() -> None:
    options = {"deterministic": True, "jitter": 0.0}
    (difference, other), *_ = run_ranks(
        3,
        differences_from_one_process,
        [PULLED | {"steps": 7} | options, PULLED | {"steps": 7, "quantum": 8} | options],
    )
    assert difference < 1e-12
    assert other < 1e-12


def test_a_sum_does_not_depend_on_its_order() -> None:
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


def test_what_cannot_have_the_same_bits_is_said_in_a_sentence() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    with pytest.raises(PacelineError, match="does not move work"):
        Pace(model, 16, "level", loop="pieces", deterministic=True)
    with pytest.raises(PacelineError, match="batch norm"):
        Pace(model, 16, "factoring", loop="pieces", deterministic=True)
    with pytest.raises(PacelineError, match="hook"):
        Pace(model[0], 16, "factoring", loop="pieces", deterministic=True, weigh="hook")
    with pytest.raises(PacelineError, match="holds no cell"):
        Pace(model[0], 64, "factoring", loop="pieces", deterministic=True, micro_batch=1)


@pytest.mark.parametrize(
    "options", [{}, {"micro_batch": 5}, {"quantum": 4}, {"micro_steps": 2}, {"deterministic": True}]
)
def test_a_rank_alone_runs_whole_rounds(options: dict[str, Any]) -> None:
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


def test_a_round_that_was_left_is_run_again_in_whole() -> None:
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
def test_a_policy_whose_first_plan_is_whole_moves_no_work_later() -> None:
    model = fresh(torch.float64)
    optimizer, used = optimizer_of(model), []
    with Pace(model, 16, lambda cluster: PiecesLater(cluster, portion=0.3), loop="pieces") as pace:
        for x, y, index in pace.loader(Samples(83), seed=5):
            used += index.tolist()
            pace.backward(torch.nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
    assert sorted(used) == list(range(83))


def test_auto_plans_whole_rounds_where_pieces_do_not_suit() -> None:
    normed = torch.nn.Sequential(fresh(torch.float64), torch.nn.BatchNorm1d(3))
    for pace in (Pace(normed, 16, "auto"), HostedPace(fresh(torch.float64), 16, "auto", micro_steps=2)):
        assert pace.host.terms.policy == "level"
        pace.close()
    with pytest.raises(PacelineError, match="different numbers of micro-steps"):
        HostedPace(fresh(torch.float64), 16, "factoring", micro_steps=2)


def test_stopped_and_resumed_in_mid_epoch() -> None:
    before = run_ranks(3, part_of_an_epoch, 2, None, 0, "auto")
    after = run_ranks(2, part_of_an_epoch, 99, before[0]["saved"], 0, "auto")
    used = list(chain.from_iterable(part["used"] for part in before + after))
    assert sorted(used) == list(range(83))
    assert {part["rounds"] for part in after} == {6}


def test_a_rank_that_cannot_claim_any_more_says_where_to_look() -> None:
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
def test_three_numbers_travel_in_one(additions: list[tuple[int, int, int]]) -> None:
    store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    counter, alone = StoreCounter.__new__(StoreCounter), LocalCounter()
    counter._store, counter._rank, counter._newest = store, 1, -1
    nearby = NearbyCounter(shared_memory.make(LENGTH)[0], 1.0)
    for samples, reported, speed in additions:
        expected = alone.add(7, samples, reported, speed)
        assert counter.add(7, samples, reported, speed) == nearby.add(7, samples, reported, speed) == expected
    nearby.close()


def test_a_short_round_on_few_ranks_has_room_for_its_last_cell() -> None:
    """Of 10 samples in cells of 4, one rank runs 8 as planned, and claims the other 2."""
    half, one = np.array(0.5), np.ones(1)
    piece_plan, most = PiecePlan(half, half, half, least=one, speeds=one), np.array([48])
    division = divide(piece_plan, np.array([10]), 0, most, most, unit=4, cell=4)
    assert division is not None
    assert (division.pool, division.batch) == (10 - int(division.first[0] + division.kept[0]), 10)
    with pytest.raises(PacelineError, match="no room for whole cells"):
        divide(piece_plan, np.array([10]), 0, np.array([7]), most, unit=4, cell=4)


def test_a_rank_that_has_no_room_for_a_claim_reports_its_speed_all_the_same() -> None:
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


def test_what_a_frozen_rank_has_not_begun_the_others_run(tmp_path: Path) -> None:
    (difference, rounds), *others = run_ranks(3, frozen, 8, str(tmp_path))
    assert max(difference, *(other for other, _ in others)) < 1e-12
    stuck = rounds[5]
    assert stuck.loads.sum() == 60
    assert stuck.within is not None
    plan = stuck.within.at_once * 20  # of an even plan, as rank 1's was to be
    assert stuck.within.pieces[1][0] <= 2 * plan
    assert len(stuck.within.pieces[1]) <= 3  # that piece, a claim at most, and its end
    assert stuck.loads[1] < 20, "less than its even part, however the others fared beside other programs"


@pytest.mark.parametrize("once_a_round", [True, False])
def test_a_schedule_that_follows_the_turns_is_noticed(
    once_a_round: bool, recwarn: pytest.WarningsRecorder
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    micro_steps = 0
    with Pace(model, 16, "factoring:portion=0.5", loop="pieces") as pace:
        for x in pace.loader(torch.randn(64, 2)):
            pace.backward(model(x).square().mean())
            if pace.step(optimizer) or not once_a_round:
                scheduler.step()
            micro_steps += 1
        assert pace.rounds == 4 < micro_steps
    said = [
        str(each.message) for each in recwarn if "learning rate was changed within round" in str(each.message)
    ]
    assert len(said) == (0 if once_a_round else 1)
