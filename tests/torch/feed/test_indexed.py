"""Which data sets can be divided otherwise in each round."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import IterableDataset

from paceline import PacelineError
from paceline.torch import Pace
from paceline.torch.feed.loader import check_indexed


class Lists:
    """Gives a list of items at once, which is all that torch's loader asks of it."""

    def __len__(self) -> int:
        return 3

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(IterableDataset):
    def __len__(self) -> int:
        return 3

    def __iter__(self):
        return iter(range(3))


def test_indexed_by_item_or_by_list() -> None:
    check_indexed(torch.arange(3))
    check_indexed([1, 2, 3])
    check_indexed(Lists())


@pytest.mark.parametrize("stream", [Stream(), iter([1, 2]), (i for i in range(3))])
def test_streams_are_refused(stream: object) -> None:
    with pytest.raises(PacelineError, match="expected one with a length and indexed items"):
        check_indexed(stream)


def test_dict_of_columns_is_refused_and_one_of_indices_accepted() -> None:
    with pytest.raises(PacelineError, match=r"a dict with the keys \['x', 'y'\]; expected indexed samples"):
        check_indexed({"x": torch.arange(3), "y": torch.arange(3)})
    check_indexed({0: "first", 1: "second"})


def test_loader_has_no_attributes_of_a_dataloader() -> None:
    with Pace(torch.nn.Linear(1, 1), 2, "equal") as pace:
        loader = pace.loader(torch.arange(4))
        assert not hasattr(loader, "worker_init_fn")
        with pytest.raises(AttributeError, match="is no DataLoader, since its batches are planned"):
            loader.worker_init_fn  # noqa: B018
