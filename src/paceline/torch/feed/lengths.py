"""What a user says of the cost of each sample: numbers, a function, or the name that the data set has for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from paceline.errors import PacelineError, short
from paceline.rounds import Array
from paceline.samples import SampleCosts


def read(cost: Any, dataset: Any) -> SampleCosts:
    """The lengths of all samples, read once.

    cost: N positive numbers; a function of a sample's index that gives one; or the name of a column, an attribute or
        an item's field, which holds a number for each sample, or something whose length counts.
    Raises PacelineError for anything else.
    """
    samples = len(dataset)
    if isinstance(cost, str):
        return SampleCosts.checked(_named(cost, dataset, samples), samples, f"cost={cost!r}")
    if callable(cost):
        return SampleCosts.checked([_number(cost(index)) for index in range(samples)], samples, "cost")
    if isinstance(cost, torch.Tensor):
        cost = cost.detach().cpu().numpy()
    if isinstance(cost, bool | int | float):
        raise PacelineError(
            f"cost={short(cost)}: expected one number for each sample, a function of its index, or a column's name"
        )
    return SampleCosts.checked(cost, samples)


def digest(costs: SampleCosts) -> str:
    """The same on two ranks only if their lengths are."""
    return hashlib.sha256(np.ascontiguousarray(costs.lengths).tobytes()).hexdigest()[:16]


def pads(dataset: Any, collate: Callable[[list[Any]], Any], costs: SampleCosts) -> bool:
    """Whether ``collate`` fills up a batch to its longest sample, found by trying the shortest and the longest.

    A collate function that cannot take the two together, or makes nothing of tensors, is taken not to.
    """
    short_one, long_one = int(costs.lengths.argmin()), int(costs.lengths.argmax())
    if costs.lengths[short_one] == costs.lengths[long_one]:
        return False
    try:
        alone = [_elements(collate([dataset[index]])) for index in (short_one, long_one)]
        both = _elements(collate([dataset[short_one], dataset[long_one]]))
    except Exception:  # whatever a user's function raises: then it is not made for unlike samples
        return False
    return alone[0] < alone[1] and both >= 2 * alone[1]


def _named(name: str, dataset: Any, samples: int) -> Array:
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list | tuple):
        if name not in columns:
            raise PacelineError(
                f"cost={name!r}: the data set has the columns {', '.join(map(str, columns))}; expected one of them"
            )
        return np.array([_number(value) for value in dataset[name]])
    whole = getattr(dataset, name, None)
    if whole is not None and hasattr(whole, "__len__") and len(whole) == samples:
        return np.array([_number(value) for value in whole])
    found = []
    for index in range(samples):
        item = dataset[index]
        value = item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
        if value is None:
            raise PacelineError(
                f"cost={name!r}: sample {index} has no field of that name, nor has the data set; expected the "
                "name of a column or field, one number for each sample, or a function of its index"
            )
        found.append(_number(value))
    return np.array(found)


def _number(value: Any) -> float:
    """A number as it is, anything longer by its length."""
    if isinstance(value, torch.Tensor | np.ndarray) and value.ndim == 0:
        return float(value)
    if hasattr(value, "__len__") and not isinstance(value, str | bytes):
        return float(len(value))
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")  # which is refused, with the place where it stands


def _elements(batch: Any) -> int:
    return sum(leaf.numel() for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, torch.Tensor))


def _plain(batch: Any) -> Any:
    """Mappings as dicts: of the others, pytrees know nothing."""
    return {key: _plain(value) for key, value in batch.items()} if isinstance(batch, Mapping) else batch
