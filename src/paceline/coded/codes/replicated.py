"""Replication: every block is computed by several workers. The plainest code, here to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.coded.codes.mds import own_block
from paceline.coded.delay import Array
from paceline.errors import PacelineError


@dataclass(frozen=True)
class Replicated:
    """n coded blocks, of which block i is A's block i modulo k."""

    k: int
    n: int

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.n:
            raise PacelineError(f"{self.n} copies of {self.k} blocks: expected 1 <= k <= n")

    @property
    def generator(self) -> Array:
        """Coefficients of the coded blocks, shape (n, k)."""
        return np.eye(self.k)[np.arange(self.n) % self.k]

    def encode(self, a: Array, chosen: Sequence[int] | None = None) -> list[Array]:
        """The n blocks, or the chosen ones: views of ``a``."""
        return [own_block(a, self.k, i % self.k) for i in (range(self.n) if chosen is None else chosen)]

    def decoder(self) -> ReplicatedDecoder:
        """What takes products as they arrive."""
        return ReplicatedDecoder(self)


class ReplicatedDecoder:
    """Keeps the first product of each block."""

    def __init__(self, code: Replicated) -> None:
        self.code, self.blocks = code, dict[int, Array]()

    def add(self, block: int, product: Array) -> bool:
        """Take one product; True once every block of A has one."""
        self.blocks.setdefault(block % self.code.k, product)
        return len(self.blocks) == self.code.k

    def result(self, rows: int) -> Array:
        """A x, its first ``rows`` rows."""
        return np.concatenate([self.blocks[i] for i in range(self.code.k)])[:rows]
