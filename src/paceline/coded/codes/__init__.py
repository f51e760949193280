"""Codes over row blocks of a matrix: maximum distance separable, rateless, and plain replication.

All have the same face: ``encode`` makes the coded blocks of a matrix, ``decoder`` takes their products with x
as they arrive and tells A x as soon as it can.
"""

from collections.abc import Sequence
from typing import Protocol

from paceline.coded.codes.lt import LT, robust_soliton
from paceline.coded.codes.mds import CONSTRUCTIONS, MDS, worst_condition
from paceline.coded.codes.replicated import Replicated
from paceline.coded.delay import Array


class Decoder(Protocol):
    """Takes products as they arrive."""

    def add(self, block: int, product: Array) -> bool:
        """Take the product of one coded block; True once A x can be told."""
        ...

    def result(self, rows: int) -> Array:
        """A x, its first ``rows`` rows."""
        ...


class Code(Protocol):
    """k blocks of A made into n coded ones."""

    @property
    def k(self) -> int:
        """Blocks of the matrix."""
        ...

    @property
    def n(self) -> int:
        """Coded blocks."""
        ...

    def encode(self, a: Array, chosen: Sequence[int] | None = None) -> list[Array]:
        """The coded blocks of a matrix, all or the chosen ones."""
        ...

    def decoder(self) -> Decoder:
        """A new decoder, for one product."""
        ...


__all__ = ["CONSTRUCTIONS", "LT", "MDS", "Code", "Decoder", "Replicated", "robust_soliton", "worst_condition"]
