"""Loops that accumulate by themselves, and divide each loss by their number of micro-steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.hosts.accumulating import AccumulatingPace
from paceline.torch.callbacks import OnRound


@pytest.mark.parametrize("how", ["backward", "weighted"])
def test_a_loop_that_divides_its_loss_trains_the_model_of_one_process(how: str) -> None:
    data = torch.utils.data.TensorDataset(
        *torch.randn(2, 36, 3, generator=torch.Generator().manual_seed(1)).double()
    )
    ours, whole = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
    whole.load_state_dict(ours.state_dict())
    losses: list[float] = []
    options: dict[str, Any] = {
        "accumulate": 3,
        "callbacks": [OnRound(lambda result: losses.append(result.loss))],
    }
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1)
    with AccumulatingPace(ours, 12, "equal", **options) as pace:
        for number, (x, y) in enumerate(pace.loader(data, shuffle=False)):
            loss = nn.functional.mse_loss(ours(x), y) / 3
            if how == "backward":
                pace.backward(loss)
            else:
                pace.weighted(loss).backward()
                pace.host.backward_done()
            assert pace.step(optimizer) is (number % 3 == 2)
    expected = []
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    for x, y in torch.utils.data.DataLoader(data, batch_size=12):
        loss = nn.functional.mse_loss(whole(x), y)
        expected.append(loss.item())
        plain.zero_grad()
        loss.backward()
        plain.step()
    assert losses == pytest.approx(expected, abs=1e-12)
    for one, other in zip(ours.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
