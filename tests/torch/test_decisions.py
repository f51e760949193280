"""Short rounds are decided in intervals."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from paceline.balancer import Balancer
from paceline.errors import PacelineError
from paceline.torch import Pace, piece_reports, rows
from paceline.torch.callbacks import OnRound
from paceline.torch.decisions import mean_losses, ran_in_pieces
from paceline.torch.feed.pieces import Order
from paceline.torch.plan import RoundPlan

SAMPLES, BATCH, EPOCHS, SEED = 320, 8, 4, 3


def test_rounds_divided_by_cost_share_decisions_once_the_costs_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = np.random.default_rng(0).integers(1, 10, SAMPLES).astype(float)
    decided, results = list[int](), list[Any]()
    report = Balancer.report

    def counted(self: Balancer, step: int, *given: Any, **named: Any) -> Any:
        decided.append(step)
        return report(self, step, *given, **named)

    monkeypatch.setattr(Balancer, "report", counted)
    model = nn.Linear(1, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = torch.utils.data.TensorDataset(torch.as_tensor(lengths)[:, None])
    with Pace(model, BATCH, "level", callbacks=[OnRound(results.append)]) as pace:
        loader = pace.loader(data, seed=SEED, cost=lengths)
        for _ in range(EPOCHS):
            for (x,) in loader:
                pace.backward(model(x).square().mean())
                pace.step(optimizer)
    rounds = EPOCHS * SAMPLES // BATCH
    assert [each.step for each in results] == list(range(rounds))
    assert decided[:32] == list(range(32)), "each of the first rounds teaches the cost model"
    assert len(decided) < rounds
    orders = [Order(SAMPLES, SEED).epoch(epoch) for epoch in range(EPOCHS)]
    sums = lengths[np.concatenate(orders)].reshape(rounds, BATCH).sum(1)
    assert [each.parts[0, 0] for each in results] == sums.tolist()


def test_ranks_that_ran_several_pieces_have_the_cost_of_each_further_one_as_overhead() -> None:
    plan = RoundPlan(7, np.array([6, 4]), 10)
    reports = [piece_reports.report([3, 2, 2], [0.3, 0.2, 0.2], 0.01), piece_reports.report([3], [0.6], 0.02)]
    ran = ran_in_pieces(plan, reported(reports, overhead=[0.5, 0.25]))
    assert ran.loads.tolist() == [7, 3], "what they ran, not what was planned"
    assert ran.overhead == pytest.approx([0.5 + 2 * 0.01, 0.25])
    assert ran.parts is None
    assert ran.within is not None
    assert ran.within.pieces == [[3, 2, 2], [3]]


def test_rank_that_leaves_out_samples_raises_with_both_numbers() -> None:
    plan = RoundPlan(7, np.array([6, 4]), 10)
    reports = [piece_reports.report([6], [0.3], 0.01), piece_reports.report([3], [0.6], 0.02)]
    with pytest.raises(
        PacelineError, match=r"^round 7: the ranks ran 9 of its 10 samples; expected all: check"
    ):
        ran_in_pieces(plan, reported(reports, overhead=[0.0, 0.0]))


def reported(reports: list[list[float]], overhead: list[float]) -> Any:
    """The ranks' rows, (n,), of one round, in which they ran pieces."""
    found = np.zeros(len(reports), rows.layout(pieces=True))
    found["pieces"] = [np.array(each).view(piece_reports.ROW)[0] for each in reports]
    found["overhead"] = overhead
    return found


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 50), rounds=st.integers(1, 32), counted=st.booleans())
def test_mean_losses_are_exact_sums_over_the_counts(seed: int, n: int, rounds: int, counted: bool) -> None:
    rng = np.random.default_rng(seed)
    losses = rng.lognormal(0, 5, (n, rounds))
    counts = rng.lognormal(0, 5, (n, rounds)) if counted else np.full((n, rounds), np.nan)
    batches = rng.integers(1, 99, rounds)
    found = mean_losses(losses, counts, batches)
    for at in range(rounds):
        over = math.fsum(counts[:, at]) if counted else batches[at]
        assert found[at] == pytest.approx(math.fsum(losses[:, at]) / over, rel=1e-12)
    assert np.isnan(mean_losses(losses, np.zeros((n, rounds)), batches)).all(), "a mean over nothing"
