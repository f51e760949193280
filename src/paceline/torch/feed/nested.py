"""Batches as data sets make them, tensors within tuples, lists and mappings: joined, cut, counted and emptied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError


def nothing_of(batch: Any) -> Any:
    """The same structure with no samples in it."""
    if isinstance(batch, torch.Tensor):
        return batch[:0]
    if isinstance(batch, Mapping):
        return type(batch)({key: nothing_of(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(nothing_of(value) for value in batch))
    if (
        isinstance(batch, list | tuple)
        and batch
        and isinstance(batch[0], torch.Tensor | Mapping | list | tuple)
    ):
        return type(batch)(nothing_of(value) for value in batch)
    if isinstance(batch, Sequence) and not isinstance(batch, str):
        return batch[:0]
    return batch


def joinable(batch: Any) -> bool:
    """Whether parts of such a batch can be joined to the whole: tensors and strings, however nested."""
    if isinstance(batch, torch.Tensor):
        return True
    if isinstance(batch, Mapping):
        return all(joinable(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return all(isinstance(value, str | bytes) or joinable(value) for value in batch)
    return False


def joined(parts: Sequence[Any]) -> Any:
    """The batch whose parts, one after the other, these are."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return type(first)({key: joined([part[key] for part in parts]) for key in first})  # type: ignore[call-arg]
    if first and isinstance(first[0], str | bytes):
        return type(first)(value for part in parts for value in part)
    fields = [joined(values) for values in zip(*parts, strict=True)]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def length(batch: Any) -> int:
    """Samples of a batch: the first dimension of its first tensor. Raises PacelineError where it has none."""
    if isinstance(batch, torch.Tensor) and batch.ndim:
        return len(batch)
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for one in parts:
        if isinstance(one, torch.Tensor | Mapping | list | tuple):
            return length(one)
    raise PacelineError(
        f"batches=True: the stream gave a {type(batch).__name__} without a tensor; expected tensors, or tuples, "
        "lists or dicts of them, whose first dimension counts samples"
    )


def part(batch: Any, start: int, end: int) -> Any:
    """The samples from ``start`` to ``end`` of a batch."""
    if isinstance(batch, Mapping):
        return type(batch)({key: part(value, start, end) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(part(value, start, end) for value in batch))
    if isinstance(batch, list | tuple) and batch and not isinstance(batch[0], str | bytes):
        return type(batch)(part(value, start, end) for value in batch)
    return batch[start:end]
