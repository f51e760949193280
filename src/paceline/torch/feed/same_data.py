"""Whether all ranks have the same data set. Each rank takes its part of one order of the samples, so that with other
samples on each rank some would be used several times in an epoch, and others never.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from paceline.torch import peers, timing

ROWS, TENSORS = 16, 8  # samples that are compared, and tensors of each
CLOSE = 1e-5  # relative difference of the same numbers on two machines
IN_MEMORY = TensorDataset, list, tuple, torch.Tensor, np.ndarray


def agree(dataset: Any, facts: dict[str, Any], extra: int) -> list[int]:
    """Compare the data sets of all ranks, and their ``facts`` about it; returns every rank's ``extra``. Collective.
    Warns if samples in memory differ. No code of the program's own data set is called.

    Raises PacelineError, on every rank, if the facts or the indices of a ``Subset`` differ."""
    digest, numbers = _looked(dataset)
    seed = (
        ", since each takes its part of one order: give the split a seed, as random_split(dataset, lengths, "
    )
    advice = {"subset": f"{seed}torch.Generator().manual_seed(0))"}
    everyone = peers.agree(facts | {"subset": digest}, (extra, numbers), **advice)
    if peers.rank() == 0:
        _compare([found for _, found in everyone])
    return [theirs for theirs, _ in everyone]


def _looked(dataset: Any) -> tuple[str, list[float]]:
    """A digest of the indices of a ``Subset``, "" for none; and a number for each tensor of some samples that are in
    memory."""
    digest, places = "", np.unique(np.linspace(0, len(dataset) - 1, ROWS).astype(int)).tolist()
    while isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        indices = dataset.indices
        try:
            content = np.array(indices, np.int64).tobytes()
        except (TypeError, ValueError, OverflowError):  # the data set's keys are no numbers
            content = repr(list(indices)).encode()
        digest = hashlib.sha256(digest.encode() + content).hexdigest()[:16]
        places = [indices[place] for place in places]
        dataset = dataset.dataset
    if type(dataset) not in IN_MEMORY:
        return digest, []
    return digest, [number for place in places for number in islice(_numbers(dataset[place]), TENSORS)]


def _compare(ranks: list[list[float]]) -> None:
    """Warn if the numbers of the ranks' samples differ."""
    for rank, numbers in enumerate(ranks):
        if len(numbers) != len(ranks[0]) or not np.allclose(numbers, ranks[0], CLOSE, 0.0, equal_nan=True):
            warnings.warn(
                f"rank {rank}'s data set has other samples than rank 0's; expected the same on every rank, since "
                "each takes its part of one order, and now some samples are used several times in an epoch and "
                "others never: give what draws or divides the data a seed, as train_test_split(..., random_state=0)",
                RuntimeWarning,
                stacklevel=timing.level(),
            )
            return


def _numbers(sample: Any) -> Iterator[float]:
    """A number for each tensor, array and number in a sample: the mean of its elements, without their signs, since
    positive ones do not cancel. NaN for one that has none."""
    if isinstance(sample, torch.Tensor):
        whole = sample.layout is torch.strided and not (sample.is_quantized or sample.is_complex())
        yield float(sample.detach().double().abs().mean()) if whole and sample.numel() else math.nan
    elif isinstance(sample, np.ndarray | np.number | int | float):
        values = np.asarray(sample)
        known = values.size > 0 and values.dtype.kind in "biuf"
        yield float(np.abs(values.astype(float)).mean()) if known else math.nan
    elif isinstance(sample, dict | list | tuple):
        for each in sample.values() if isinstance(sample, dict) else sample:
            yield from _numbers(each)
