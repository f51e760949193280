"""A rank with other samples than the others is found when a loader is made."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

from paceline.errors import PacelineError
from paceline.torch import Pace, peers
from support.guarantees import guarantee
from support.ranks import run_ranks

pytestmark = pytest.mark.processes


class Files(Dataset[int]):
    """Samples that only the program's own code can read; it counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        self.asked += 1
        return index


def data_set(kind: str, rank: int) -> Any:
    seed = torch.Generator().manual_seed(rank if kind.startswith("own") else 0)
    x = torch.randn(40, 3, generator=seed)
    if kind.endswith("split"):
        return random_split(Files(), [30, 10], seed)[0]
    if kind.endswith("subset of a subset"):
        first = Subset(Files(), range(0, 40, 2))
        return Subset(first, torch.randperm(20, generator=seed).tolist())
    if kind.endswith("names"):
        names = [f"name {place}" for place in torch.randperm(40, generator=seed).tolist()]
        return Subset(dict.fromkeys(names, 0), names)  # type: ignore[arg-type]
    if kind.endswith("tensors"):
        return TensorDataset(x, torch.arange(40))
    if kind.endswith("list"):
        return [({"x": one}, float(one[0])) for one in x]
    if kind.endswith("array"):
        return x.numpy()
    if kind == "rounded":
        return TensorDataset(x.double() * (1 + 1e-9 * rank))
    return Files()


def made(rank: int, ranks: int, kind: str, sampler: bool) -> tuple[str, list[str]]:
    """The error message with which a loader of this data set is refused on this rank, and its warnings."""
    model = DistributedDataParallel(torch.nn.Linear(3, 1))
    with Pace(model, 8, "equal") as pace, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data, refused = data_set(kind, peers.rank()), ""
        try:
            pace.batch_sampler(data) if sampler else pace.loader(data)
        except PacelineError as error:
            refused = str(error)
        while isinstance(data, Subset):
            data = data.dataset
        assert not isinstance(data, Files) or data.asked == 0
    return refused, [str(one.message) for one in caught]


@guarantee("`pace.loader` raises if the ranks' `Subset`s differ, and warns if samples in memory do.")
@pytest.mark.parametrize("sampler", [False, True], ids=["loader", "sampler"])
@pytest.mark.parametrize("kind", ["own split", "own subset of a subset", "own names"])
def test_subset_with_other_indices_raises_on_every_rank(kind: str, sampler: bool) -> None:
    for refused, _ in run_ranks(2, made, kind, sampler):
        given = r"rank 1 was given subset='\w{16}' and rank 0 subset='\w{16}'"
        assert re.match(rf"{given}; expected the same .*: give the split a seed, as random_split\(", refused)


@pytest.mark.parametrize("kind", ["own tensors", "own list", "own array"])
def test_other_samples_in_memory_warn_once(kind: str) -> None:
    (refused, first), (_, second) = run_ranks(2, made, kind, False)
    assert not refused
    assert [words.split(";")[0] for words in first] == ["rank 1's data set has other samples than rank 0's"]
    assert not second


@pytest.mark.parametrize(
    "kind", ["split", "subset of a subset", "names", "tensors", "list", "array", "rounded", "files"]
)
def test_same_data_set_is_accepted_in_silence(kind: str) -> None:
    assert run_ranks(2, made, kind, False) == [("", [])] * 2
