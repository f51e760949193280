"""The layer of docs/porting.md: a loss that compares samples across ranks that have unlike numbers of them."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace
from support.ranks import run_ranks
from support.small_net import Samples, fresh, optimizer_of

GUARANTEES = (
    'Losses over the samples of all ranks (`reduction="global"`, gathered keys) train the model of one '
    "process.",
)

PAGE = Path(__file__).parents[3] / "docs" / "porting.md"
COUNT, BATCH, STEPS = 40, 20, 6
LIMITS = [(None, 2), (None, 5), (None, None)]  # samples: the third rank takes 13 of 20


def of_the_page() -> dict[str, Any]:
    """What the block with the layer defines."""
    names: dict[str, Any] = {"torch": torch}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    exec(next(block for block in blocks if "def compared" in block), names)
    return names


def train(rank: int, ranks: int) -> tuple[list[float], set[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # the loss is that of one process
        return _train(ranks)


def _train(ranks: int) -> tuple[list[float], set[int]]:
    names = of_the_page()
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer = optimizer_of(model)
    seen: set[int] = set()
    pace = Pace(ddp, BATCH, limits=LIMITS if ranks > 1 else None)
    loader = pace.loader(Samples(COUNT), seed=5, drop_last=True)
    for _ in range(STEPS * BATCH // COUNT):
        for x, _, _ in loader:
            seen.add(len(x))
            y = ddp(x)
            if ranks > 1:
                loss = names["compared"](y, y.roll(1, 1))
            else:  # all in one place, without the layer
                loss = torch.nn.functional.cross_entropy(y @ y.roll(1, 1).T, torch.arange(len(y)))
            pace.backward(loss)
            pace.step(optimizer)
    values = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    pace.close()
    return values, seen


@pytest.mark.processes
def test_equals_one_process_that_compares_the_whole_batch() -> None:
    ((expected, _),) = run_ranks(1, train)
    found = run_ranks(3, train)
    assert max(found[0][1]) <= 2
    assert max(found[2][1]) >= 13
    for values, _ in found:
        assert torch.allclose(torch.tensor(values), torch.tensor(expected), rtol=0, atol=1e-12)
