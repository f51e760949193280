"""Short rounds are settled in intervals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.balancer import Balancer
from paceline.torch import Pace
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order

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
