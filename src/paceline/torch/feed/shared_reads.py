"""What makes a shared stream the same on all ranks: common random numbers, and a checksum of its items."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import numpy as np
import torch

# Kinds of numbers that name a sample. Others may be augmented, or decoded by another version on another machine.
WHOLE = torch.int16, torch.int32, torch.int64
NAMED = "int16", "int32", "int64", "uint16", "uint32", "uint64"


class CommonNumbers:
    """The random numbers of torch, numpy and ``random`` that a stream draws in this process: the same on each rank,
    whatever else a rank has drawn. Call ``restart`` first."""

    def restart(self, generator: torch.Generator) -> None:
        """Begin with numbers that follow from this generator's seed."""
        seed = generator.initial_seed() % 2**32
        self._states = (
            random.Random(seed).getstate(),
            np.random.RandomState(seed).get_state(),
            generator.get_state(),
        )

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """The stream draws within."""
        outside, (own, numbers, state) = _states(), self._states
        _set(own, numbers, state)
        try:
            yield
        finally:
            self._states = _states()
            _set(*outside)


def _states() -> tuple[Any, Any, torch.Tensor]:
    numbers = np.random.get_state()  # noqa: NPY002 - what a stream draws without a generator
    return random.getstate(), numbers, torch.get_rng_state()


def _set(own: Any, numbers: Any, state: torch.Tensor) -> None:
    random.setstate(own)
    np.random.set_state(numbers)  # noqa: NPY002
    torch.set_rng_state(state)


def checksum(item: Any, before: int = 0) -> int:
    """A checksum of the whole numbers and text in an item of a stream, which goes on from ``before``. Everything else
    counts for nothing: floats and pixels may differ where samples do not."""
    if isinstance(item, str):
        return crc32(item.encode("utf-8", "surrogatepass"), before)
    if isinstance(item, bytes):
        return crc32(item, before)
    if isinstance(item, int):  # also a bool
        return crc32(str(int(item)).encode(), before)
    if isinstance(item, torch.Tensor):
        if item.dtype not in WHOLE or item.device.type != "cpu" or item.layout is not torch.strided:
            return before
        item = item.detach().numpy()
    if isinstance(item, np.ndarray | np.generic):
        return crc32(item.tobytes(), before) if item.dtype.name in NAMED else before
    if isinstance(item, Mapping):
        item = item.values()
    elif not isinstance(item, list | tuple):
        return before
    for each in item:
        before = checksum(each, before)
    return before
