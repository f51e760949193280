"""A maximum distance separable code over row blocks of a matrix: any k of its n coded blocks give A x back.

It is real-valued and systematic: the first k coded blocks are the rows of A themselves, so that most of a product
needs no decoding and missing blocks cost one small linear system. The condition of that system depends on the
parities: docs/coded.md shows why they are rows of random orthogonal matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array
from paceline.errors import PacelineError

__all__ = ["MDS"]


def split(rows: int, k: int) -> int:
    """Rows of each block if ``rows`` are cut into k blocks; the last blocks are padded with zeros."""
    return -(-rows // k)


def own_block(a: Array, k: int, i: int) -> Array:
    """Block i of k of a matrix: a view if it is whole, otherwise a copy padded with zeros."""
    size = split(len(a), k)
    block = a[i * size : (i + 1) * size]
    if len(block) == size:
        return block
    padded = np.zeros((size, a.shape[1]), a.dtype)
    padded[: len(block)] = block
    return padded


def combine(coefficients: Array, a: Array) -> Array:
    """Sums of a matrix's k blocks, shape (len(coefficients), ceil(rows / k), columns), as one BLAS product.

    coefficients: shape (any, k).
    """
    (rows, columns), k = a.shape, coefficients.shape[1]
    size = split(rows, k)
    whole = rows // size  # blocks that need no padding
    coefficients = coefficients.astype(a.dtype, copy=False)
    flat = np.ascontiguousarray(a[: whole * size]).reshape(whole, size * columns)
    sums = coefficients[:, :whole] @ flat
    rest = np.ascontiguousarray(a[whole * size :]).reshape(-1)
    if len(rest):
        sums[:, : len(rest)] += coefficients[:, whole, None] * rest
    return sums.reshape(-1, size, columns)


@dataclass(frozen=True)
class MDS:
    """n coded blocks of which any k suffice (Sun et al., section II-A).

    Attributes:
        k: Blocks of A.
        n: Coded blocks, k of them A's own.
        seed: Of the parities.
    """

    k: int
    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.n:
            raise PacelineError(f"a code of {self.n} blocks of which {self.k} suffice: expected 1 <= k <= n")

    @cached_property
    def parity(self) -> Array:
        """Coefficients of the n - k coded blocks over the k blocks of A, shape (n - k, k): rows of random orthogonal
        matrices of order k, one after another.

        Matrices are always drawn whole, so that a row does not depend on n, and a code can grow.
        """
        groups = [np.zeros((0, self.k))]
        for group in range(-(-(self.n - self.k) // self.k)):
            drawn = np.random.default_rng([self.seed, group]).standard_normal((self.k, self.k))
            q, r = np.linalg.qr(drawn)
            groups.append(q * np.sign(np.diag(r)))
        return np.vstack(groups)[: self.n - self.k]

    @property
    def generator(self) -> Array:
        """Coefficients of all coded blocks, shape (n, k): the identity above ``parity``."""
        return np.vstack([np.eye(self.k), self.parity])

    def encode(self, a: Array, chosen: Sequence[int] | None = None) -> list[Array]:
        """Code a matrix.

        A's own blocks are views of ``a`` if they need no padding, so that only the parities take further memory.
        float32 stays float32.

        Args:
            a: The matrix, shape (rows, columns).
            chosen: Positions of coded blocks from 0; None for all n.

        Returns:
            The n coded blocks, or the chosen ones, each of shape (ceil(rows / k), columns).
        """
        order = range(self.n) if chosen is None else chosen
        parities = [i - self.k for i in order if i >= self.k]
        coded = iter(combine(self.parity[parities], a) if parities else ())
        return [own_block(a, self.k, i) if i < self.k else next(coded) for i in order]

    def decode(self, blocks: Mapping[int, Array], rows: int) -> Array:
        """Compute A x from the products of at least k coded blocks.

        Only the missing blocks of A are computed, as one product with a small matrix. If more parities arrived than
        blocks are missing, least squares uses all of them, which is more accurate.

        Args:
            blocks: Products by the position of their coded block, each of shape (block rows, ...).
            rows: Rows of A.

        Returns:
            A x, shape (rows, ...).

        Raises:
            PacelineError: For fewer than k products.
        """
        if len(blocks) < self.k:
            raise PacelineError(
                f"{len(blocks)} coded products have arrived: expected {self.k} of {self.n} to decode"
            )
        missing, order, recover = _recovery(self, frozenset(blocks))
        used = np.stack([blocks[i] for i in order])
        filled = used[: self.k]
        if len(missing):
            recovered = recover.astype(used.dtype) @ used.reshape(len(used), -1)
            filled[missing] = recovered.reshape(-1, *used.shape[1:])
        return filled.reshape(-1, *filled.shape[2:])[:rows]

    def amplification(self, blocks: Iterable[int]) -> float:
        """How much decoding from these blocks enlarges rounding errors.

        Args:
            blocks: Positions of the coded blocks that arrived.

        Returns:
            The factor, as a root mean square over the k blocks of A.
        """
        missing, _, recover = _recovery(self, frozenset(blocks))
        return float(np.sqrt((self.k - len(missing) + np.square(recover).sum()) / self.k))


@lru_cache(maxsize=8)  # decoding and its amplification ask for the same blocks
def _recovery(code: MDS, there: frozenset[int]) -> tuple[NDArray[np.intp], tuple[int, ...], Array]:
    """(missing blocks of A, the blocks to use, coefficients that give the missing ones from these), by least squares
    over all parities. The first k blocks to use are A's own, in order, with parities in the places of the missing.
    """
    missing = np.array([i for i in range(code.k) if i not in there], np.intp)
    parities = np.array(sorted(i for i in there if i >= code.k), np.intp)
    order = np.arange(code.k)
    if not len(missing):
        return missing, tuple(order.tolist()), np.zeros((0, code.k))
    order[missing] = parities[: len(missing)]
    coefficients = code.parity[parities - code.k]
    inverse = np.linalg.pinv(coefficients[:, missing], rcond=1e-15)
    recover = -inverse @ coefficients  # parity = known blocks + missing blocks
    recover[:, missing] = inverse[:, : len(missing)]
    further = parities[len(missing) :].tolist()
    return missing, (*order.tolist(), *further), np.hstack([recover, inverse[:, len(missing) :]])
