"""Batches without samples, for a rank that has nothing to do in a round and joins the others all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch


class EmptyToo:
    """A collate function that can also make an empty batch, with the shapes of a real one."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate = dataset, collate

    def __call__(self, samples: list[Any]) -> Any:
        return self._collate(samples) if samples else nothing_of(self._collate([self._dataset[0]]))


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
