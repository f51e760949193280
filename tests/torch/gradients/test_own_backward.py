"""``loss.backward()`` in place of ``pace.backward(loss)`` is told before a step is taken with what it left."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.small_net import Samples, fresh, optimizer_of

GUARANTEES = (
    "A loss that bypasses DDP or `pace.backward`, as with `model(x)`, `no_sync()` or `loss.backward()`, "
    "raises before a step.",
)


@pytest.mark.parametrize("by", ["pace.step", "optimizer.step"])
def test_no_step_is_taken(by: str) -> None:
    model = fresh(torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer, pace = optimizer_of(model), Pace(model, 16)

    def train() -> None:
        for x, y, _ in pace.loader(Samples(48)):
            nn.functional.cross_entropy(model(x), y).backward()
            if by == "pace.step":
                pace.step(optimizer)
            else:
                optimizer.step()

    with pytest.raises(PacelineError, match=r"pace\.backward\(loss\)"):
        train()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    pace.host.detach()
