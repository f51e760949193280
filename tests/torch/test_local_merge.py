"""The counters of a merge: whose values count, from the table of all ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.torch import Merge
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.local_merge import Merges
from paceline.torch.members import Ranks


@pytest.mark.parametrize(
    ("weights", "most"),
    [((2.0, 1.0, 0.0, 0.0), 4.0), ((0.0, 0.0, 0.0, 0.0), 7.0)],
    ids=["ranks with a weight", "ranks that are present, if none has a weight"],
)
def test_counter_is_the_largest_of_the_ranks_that_count(weights: tuple[float, ...], most: float) -> None:
    model = torch.nn.BatchNorm1d(2).double()
    members: Any = SimpleNamespace(chief=True)
    merges = Merges(model, Merge(), Ranks(Reducer(), members))
    merges.begin()
    projected = merges._projection.of(merges.base[:2])
    counters, present = (3.0, 4.0, 7.0, 9.0), (1.0, 1.0, 1.0, 0.0)  # the last rank is lost
    table = [
        [here, weight, *(projected if here else (0.0, 0.0)), 0.1 * here, counter]
        for here, weight, counter in zip(present, weights, counters, strict=True)
    ]
    merges.apply(0, [torch.zeros(8, dtype=torch.float64), torch.tensor(table, dtype=torch.float64)])
    assert float(model.num_batches_tracked) == most
    merges.close()
