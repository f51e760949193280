"""Whether all ranks have the same data set. Each rank takes its part of one order of the samples, so that with other
samples on each rank some would be used several times in an epoch, and others never.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset

from paceline.errors import PacelineError
from paceline.torch import peers, timing

ROWS, TENSORS = 16, 8  # samples that are compared, and tensors of each
CLOSE = 1e-5  # relative difference of the same numbers on two machines


Looked = tuple[str, list[float]]
"""What is known of a rank's data set without a call of the program's own code: a digest of the indices of its
``Subset``, "" for none; and a number for each tensor of some samples that are in memory, NaN where one has none."""


def looked(dataset: Any) -> Looked:
    """Look at this rank's data set."""
    digest, places = hashlib.sha256(), np.unique(np.linspace(0, len(dataset) - 1, ROWS).astype(int)).tolist()
    divided = False
    while isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        divided = True
        indices = dataset.indices
        try:
            digest.update(np.array(indices, np.int64).tobytes())
        except (TypeError, ValueError, OverflowError):  # the data set's keys are no numbers
            digest.update(repr(list(indices)).encode())
        places = [indices[place] for place in places]
        dataset = dataset.dataset
    numbers = list[float]()
    if type(dataset) is TensorDataset or type(dataset) in (list, tuple, torch.Tensor, np.ndarray):
        for place in places:
            numbers += list(_numbers(dataset[place]))[:TENSORS]
    return digest.hexdigest()[:16] if divided else "", numbers


def agree(dataset: Any, facts: dict[str, Any], extra: int) -> list[int]:
    """Compare the data sets of all ranks, and their ``facts`` about it; returns every rank's ``extra``. Collective.
    Warns if the samples differ.

    Raises PacelineError, on every rank, if the facts or the indices of a ``Subset`` differ."""
    everyone = peers.agree(facts, (extra, *looked(dataset)))
    peers.together(lambda: _check([(chosen, numbers) for _, chosen, numbers in everyone]))
    return [theirs for theirs, *_ in everyone]


def _check(ranks: list[Looked]) -> None:
    """Compare what was seen of all ranks' data sets."""
    first_chosen, first_numbers = ranks[0]
    for rank, (chosen, numbers) in enumerate(ranks):
        if chosen != first_chosen:
            raise PacelineError(
                f"rank {rank}'s data set is a Subset with other indices than rank 0's; expected the same on every "
                "rank, since each takes its part of one order: give the split a seed, as "
                "random_split(dataset, lengths, torch.Generator().manual_seed(0))"
            )
        alike = len(numbers) == len(first_numbers)
        if (
            not (alike and np.allclose(numbers, first_numbers, CLOSE, 0.0, equal_nan=True))
            and peers.rank() == 0
        ):
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
    positive ones do not cancel."""
    if isinstance(sample, torch.Tensor):
        dense = sample.layout is torch.strided and sample.numel() > 0 and not sample.is_quantized
        yield (
            float(sample.detach().to(torch.float64).abs().mean())
            if dense and not sample.is_complex()
            else np.nan
        )
    elif isinstance(sample, np.ndarray | np.number | int | float):
        values = np.asarray(sample)
        yield (
            float(np.abs(values.astype(float)).mean())
            if values.size and values.dtype.kind in "biuf"
            else np.nan
        )
    elif isinstance(sample, dict):
        for each in sample.values():
            yield from _numbers(each)
    elif isinstance(sample, list | tuple):
        for each in sample[:TENSORS]:
            yield from _numbers(each)
