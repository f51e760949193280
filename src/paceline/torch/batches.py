"""Batches as data sets make them, tensors within tuples, lists and mappings: joined, cut, counted, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from paceline.errors import PacelineError, short
from paceline.torch.gradients.same_bits import begins_well

PLAIN = list, tuple


def mapped(batch: Any, change: Callable[[Any], Any]) -> Any:
    """The same structure with ``change`` applied to each tensor, and to parts without tensors, such as texts."""
    if isinstance(batch, Mapping):
        return type(batch)({key: mapped(value, change) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, PLAIN) and not _of_rows(batch):
        values = [mapped(value, change) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return change(batch)


def _of_rows(batch: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list or tuple has a value for each sample, such as texts, and no parts with samples of their own."""
    apart = any(isinstance(value, torch.Tensor | Mapping | list | tuple) for value in batch)
    return not (apart or hasattr(batch, "_fields"))


def aligned(batch: Any) -> Any:
    """The same batch with a copy of every tensor that is not aligned, see ``begins_well``."""

    def moved(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) and not begins_well(value) else value

    return mapped(batch, moved)


def joinable(batch: Any) -> bool:
    """Whether parts of this kind of batch can be joined to a whole: tensors and strings, at any depth."""
    if isinstance(batch, torch.Tensor):
        return True
    if isinstance(batch, Mapping):
        return all(joinable(value) for value in batch.values())
    if isinstance(batch, list | tuple):
        return all(isinstance(value, str | bytes) or joinable(value) for value in batch)
    return False


def joined(parts: Sequence[Any]) -> Any:
    """The batch that consists of these parts, one after the other. Raises PacelineError if they differ in more than
    their rows."""
    first = parts[0]
    if len(parts) == 1:
        return first
    kind = _kind(first)
    for part in parts[1:]:
        if _kind(part) != kind or (not kind and part != first):
            raise _unlike(f"with {kind or short(first)} and with {_kind(part) or short(part)}")
    if not kind:
        return first
    if isinstance(first, torch.Tensor):
        try:
            return torch.cat(list(parts))
        except RuntimeError as error:
            for part in parts:
                if part.shape[1:] != first.shape[1:]:
                    given = f"with rows of shape {tuple(first.shape[1:])} and {tuple(part.shape[1:])}"
                    to_do = "pad all to one size or, without batches=True, pad in collate_fn="
                    raise _unlike(given, f"one shape in all batches: {to_do}") from error
            raise
    if isinstance(first, Mapping):
        for key in {key: None for part in parts for key in part}:
            if not all(key in part for part in parts):
                raise _unlike(f"with the key {short(key)} and without it", "the same keys in all batches")
        return type(first)({key: joined([part[key] for part in parts]) for key in first})  # type: ignore[call-arg]
    if _of_rows(first):
        return type(first)(value for part in parts for value in part)
    fields = [joined(values) for values in zip(*parts, strict=True)]
    return type(first)(*fields) if hasattr(first, "_fields") else type(first)(fields)


def _kind(batch: Any) -> str:
    """In words, what parts of a batch have in common; empty for a number or text for the whole batch."""
    if isinstance(batch, torch.Tensor):
        return "a tensor" if batch.ndim else ""
    if isinstance(batch, Mapping):
        return "a dict"
    if isinstance(batch, PLAIN):
        return "a value for each sample" if _of_rows(batch) else f"a list or tuple of {len(batch)}"
    return ""


def _unlike(given: str, expected: str = "the same in all batches, or a row for each sample") -> PacelineError:
    return PacelineError(f"batches {given} are to be joined; expected {expected}")


def has_rows(batch: Any, samples: int) -> bool:
    """Whether everything in a batch has a row for each sample, or is a number or text for the whole batch, so that
    ``part`` cuts it and ``joined`` joins it."""
    if isinstance(batch, torch.Tensor):
        return not batch.ndim or len(batch) == samples
    if isinstance(batch, PLAIN) and _of_rows(batch):
        return len(batch) == samples
    if isinstance(batch, Mapping | list | tuple):
        return all(
            has_rows(value, samples) for value in (batch.values() if isinstance(batch, Mapping) else batch)
        )
    return isinstance(batch, int | float | str | bytes | None)


def two_readings(batch: Any, samples: int, within: bool = False) -> bool:
    """Whether a list or tuple within a batch that ``has_rows`` may as well have an entry for each sample."""
    if isinstance(batch, Mapping):
        return any(two_readings(value, samples, True) for value in batch.values())
    if not isinstance(batch, PLAIN) or _of_rows(batch):
        return False
    # The entries of samples are alike but for their rows.
    kinds = {(v.dtype, v.shape[1:]) if isinstance(v, torch.Tensor) else type(v) for v in batch}
    unclear = within and len(batch) == samples and len(kinds) == 1 and not hasattr(batch, "_fields")
    return unclear or any(two_readings(value, samples, True) for value in batch)


def tensors(batch: Any) -> Iterator[torch.Tensor]:
    """All tensors of a batch."""
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping | list | tuple):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from tensors(part)


def length(batch: Any) -> int:
    """The number of samples in a batch: its first tensor's first dimension. Raises PacelineError if it has none."""
    for one in tensors(batch):
        if one.ndim:
            return len(one)
    raise PacelineError(
        f"batches=True: the stream gave a {type(batch).__name__} without a tensor; expected tensors, or tuples, "
        "lists or dicts of them, whose first dimension counts samples"
    )


def part(batch: Any, start: int, end: int) -> Any:
    """The samples from ``start`` to ``end`` of a batch, or their number if the batch is only a number of samples."""

    def rows(value: Any) -> Any:
        counts = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        return value[start:end] if counts or (isinstance(value, torch.Tensor) and value.ndim) else value

    return end - start if isinstance(batch, int) else mapped(batch, rows)


def all_shapes(batch: Any) -> list[tuple[int, ...]] | None:
    """The shapes of a batch's tensors and texts; None if it also holds objects that may have rows of their own."""
    if isinstance(batch, torch.Tensor):
        return [tuple(batch.shape)] if batch.ndim else []
    if isinstance(batch, int | float | None):
        return []
    if isinstance(batch, list | tuple) and all(isinstance(value, str | bytes) for value in batch):
        return [(len(batch),)]
    if isinstance(batch, Mapping | list | tuple):
        found: list[tuple[int, ...]] = []
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            nested = isinstance(value, list | tuple) and not all(
                isinstance(one, str | bytes) for one in value
            )
            shapes = None if nested else all_shapes(value)
            if shapes is None:
                return None
            found += shapes
        return found
    return None
