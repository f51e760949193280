"""Each sample of a round and of an epoch once: orders, pools, claims that come at the same time, and what was run."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.pieces import rule
from paceline.rounds import Cluster, PiecePlan
from paceline.torch.claims import Claims
from paceline.torch.counter import Count, LocalCounter
from paceline.torch.decisions import Decisions
from paceline.torch.feed.pieces import Order
from paceline.torch.meter import OpenRound
from paceline.torch.plan import Division, Piece, RoundPlan
from paceline.torch.rows import layout

GUARANTEES = (
    "Each epoch has its own order, and loader processes draw no random number twice; both repeat with the "
    "same `seed`.",
)

HALF = np.array(0.5)


def test_each_epoch_has_an_order_of_its_own_that_can_be_had_again() -> None:
    order = Order(100, seed=5)
    epochs = [order.epoch(number).tolist() for number in range(4)]
    assert all(sorted(each) == list(range(100)) for each in epochs)
    assert len({tuple(each) for each in epochs}) == 4
    assert epochs == [Order(100, seed=5).epoch(number).tolist() for number in range(4)]
    assert epochs[0] != Order(100, seed=6).epoch(0).tolist()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(1, 7), st.floats(0, 0.99))
def test_a_pool_holds_whole_units_of_every_load(loads: list[int], unit: int, at_once: float) -> None:
    ones = np.ones(len(loads))
    plan = PiecePlan(np.array(at_once), HALF, HALF, least=3 * ones, speeds=ones)
    first, kept = rule.divide(plan, np.array(loads), unit)
    assert ((first >= 0) & (kept >= 0) & (first + kept <= loads)).all()
    assert not ((np.array(loads) - first - kept) % unit).any()


class Meanwhile(LocalCounter):
    """Another rank claims ``samples`` between this rank's look at what is left and its own claim."""

    samples = 0

    def add(self, step: int, samples: int = 0, reported: int = 0, speed: int = 0) -> Count:
        if samples:
            super().add(step, self.samples)
        return super().add(step, samples, reported, speed)


@pytest.mark.parametrize(("others", "claimed"), [(0, 10), (17, 3), (20, None)])
def test_a_claim_ends_with_the_pool_whatever_was_claimed_meanwhile(others: int, claimed: int | None) -> None:
    plan = PiecePlan(HALF, HALF, HALF, least=np.ones(1), speeds=1e3 * np.ones(1))
    division = Division(np.array([10]), np.array([0]), start=10, pool=20, piece_plan=plan)
    claims = Claims(torch.device("cpu"), unit=1, largest=None, most=100)
    claims._counter = counter = Meanwhile()
    counter.samples = others
    claims.open(time.perf_counter())
    claims.done(Piece(RoundPlan(0, np.array([30]), 30, division), 10, first=True, last=False))
    found = claims.take(division)
    claims.close()
    assert (None if found is None else sum(found.sizes)) == claimed
    assert found is None or found.start == 10 + others


@pytest.mark.parametrize("ran", [(5, 5), (5, 4), (6, 5)])
def test_what_the_ranks_ran_is_all_of_the_round_or_it_is_told(ran: tuple[int, int]) -> None:
    rows: Any = np.zeros(2, layout(True))
    rows["rounds"], rows["has_loss"], rows["seconds"], rows["count"] = 1, 1, 0.2, np.nan
    rows["pieces"]["samples"], rows["pieces"]["pieces"] = ran, 1
    rows["pieces"]["sizes"][:, 0] = rows["pieces"]["amounts"][:, 0] = ran
    rows["pieces"]["times"][:, 0] = 0.2
    only = OpenRound(0, 0, 0.0, 0.0, None)
    only.read(RoundPlan(0, np.array([5, 5]), 10), 0.2, None)
    meter: Any = SimpleNamespace(
        reported=True,
        light=False,
        lag=0,
        due=0,
        intervals=True,
        by_itself=False,
        drops=False,
        counts=False,
        limits=False,
        decided=lambda due, light: None,
        took=lambda deciding: None,
        collect=lambda: ([only], rows),
    )
    balancer = Balancer(policies.create("factoring", Cluster(2, 10)))
    rounds = Decisions(balancer, meter, True, [])
    if sum(ran) == 10:
        rounds.settle()
        return
    with pytest.raises(
        PacelineError, match=f"round 0: the ranks ran {sum(ran)} of its 10 samples; expected all"
    ):
        rounds.settle()
