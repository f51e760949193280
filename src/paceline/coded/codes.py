"""Codes over row blocks of a matrix. ``encode`` makes the coded blocks, ``decoder`` takes their products with x.

``MDS`` is a real-valued maximum distance separable code: any k of n coded blocks give A x back. It is systematic: the
first k coded blocks are the rows of A themselves, so that most of a product needs no decoding
and what arrives late costs one small linear system. How well that system is conditioned depends on the parities:
docs/coded.md shows why they are rows of random orthogonal matrices.

``LT`` is a rateless code (Luby 2002; for matrix products Mallick et al. 2019, arXiv 1804.10331). Each coded block
is the sum of a few blocks of A, chosen at random with a robust soliton number of terms. Any (1 + overhead) k of them
give A x back by peeling: a sum of which all but one term are known yields that one. Blocks may be many and decoding
stays cheap, so that every row a straggler finished counts. The price is the overhead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array
from paceline.errors import PacelineError

__all__ = ["LT", "MDS", "Replicated", "robust_soliton"]

STEADY = 1e6  # condition number up to which what peeling leaves is solved as a linear system
DENSE = 200  # blocks up to which one BLAS product, zeros included, is faster than adding term by term
SMALL = 400  # unknown blocks up to which that is cheaper than waiting for more


def split(rows: int, k: int) -> int:
    """Rows of each block when ``rows`` are cut into k blocks; the last ones are filled up with zeros."""
    return -(-rows // k)


def own_block(a: Array, k: int, i: int) -> Array:
    """Block i of k of a matrix: a view if it is whole, else a copy filled up with zeros."""
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
    whole = rows // size  # blocks that need no filling up
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

    k: blocks of A; n: coded blocks, k of them A's own; seed: of the parities.
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

        A matrix is always made whole, so that a row is the same however large n is: a code can grow.
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
        """The n coded blocks of a matrix, or the chosen ones, each of shape (ceil(rows / k), columns).

        A's own blocks are views of ``a`` where they need no filling up, so that memory beyond ``a`` is what
        the parities take. float32 stays float32.
        """
        order = range(self.n) if chosen is None else chosen
        parities = [i - self.k for i in order if i >= self.k]
        coded = iter(combine(self.parity[parities], a) if parities else ())
        return [own_block(a, self.k, i) if i < self.k else next(coded) for i in order]

    def decode(self, blocks: Mapping[int, Array], rows: int) -> Array:
        """A x from the products of at least k coded blocks: by position, each of shape (block rows, ...).

        Only the missing blocks of A are computed, as one product with a small matrix. Where more parities
        arrived than are missing, those that make the better conditioned system are used. Raises PacelineError
        where fewer than k products are given.
        """
        if len(blocks) < self.k:
            raise PacelineError(
                f"{len(blocks)} coded products have arrived: expected {self.k} of {self.n} to decode"
            )
        missing = np.array([i for i in range(self.k) if i not in blocks], np.intp)
        parities = np.array(sorted(i for i in blocks if i >= self.k), np.intp)
        if len(parities) > len(missing) > 0:
            from scipy.linalg import qr

            order = qr(self.parity[parities - self.k][:, missing].T, mode="r", pivoting=True)[1]
            parities = np.sort(parities[order[: len(missing)]])
        standing = np.arange(self.k)
        standing[missing] = parities[: len(missing)]  # the parities stand where the missing blocks will
        filled = np.stack([blocks[i] for i in standing.tolist()])
        if len(missing):  # parity = P_known known + P_missing missing
            coefficients = self.parity[standing[missing] - self.k]
            right = -coefficients
            right[:, missing] = np.eye(len(missing))
            recover = np.linalg.solve(coefficients[:, missing], right).astype(filled.dtype)
            filled[missing] = (recover @ filled.reshape(self.k, -1)).reshape(-1, *filled.shape[1:])
        return filled.reshape(-1, *filled.shape[2:])[:rows]

    def decoder(self) -> Collector:
        """A new decoder, for one product."""
        return Collector(self)


class Collector:
    """Keeps products as they arrive, until k of different blocks are there."""

    def __init__(self, code: MDS) -> None:
        self._code = code
        self._blocks: dict[int, Array] = {}

    def add(self, block: int, product: Array) -> bool:
        """Take the product of one coded block; True once A x can be computed."""
        self._blocks[block] = product
        return len(self._blocks) >= self._code.k

    def result(self, rows: int) -> Array:
        """A x, its first ``rows`` rows."""
        return self._code.decode(self._blocks, rows)


def robust_soliton(k: int, c: float = 0.03, delta: float = 0.5) -> Array:
    """Probabilities of 1, ..., k terms: the ideal soliton with more single terms and a spike at k / R.

    R = c ln(k / delta) sqrt(k) is the number of sums with one unknown that peeling keeps in expectation;
    delta bounds the probability that it runs dry.
    """
    if k < 1 or c <= 0 or not 0 < delta < 1:
        raise PacelineError(
            f"robust soliton of k={k}, c={c:g}, delta={delta:g}: expected k >= 1, c > 0, 0 < delta < 1"
        )
    d = np.arange(1, k + 1)
    ideal = np.append(1 / k, 1 / (d[1:] * (d[1:] - 1.0)))
    ripple = c * np.log(k / delta) * np.sqrt(k)
    spike = min(max(round(k / ripple), 1), k)
    extra = np.where(d < spike, ripple / (d * k), 0.0)
    extra[spike - 1] = max(ripple * np.log(ripple / delta) / k, 0.0)
    return (ideal + extra) / (ideal + extra).sum()


@dataclass(frozen=True)
class LT:
    """n coded blocks over k blocks of A; n may be any number, and grow without changing the earlier ones.

    c, delta: of the robust soliton distribution; seed: of the choice of terms.
    """

    k: int
    n: int
    c: float = 0.03
    delta: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.n:
            raise PacelineError(f"a code of {self.n} blocks over {self.k}: expected 1 <= k <= n")

    @cached_property
    def terms(self) -> list[NDArray[np.intp]]:
        """The blocks of A that each coded block sums, in increasing order."""
        reach = np.cumsum(robust_soliton(self.k, self.c, self.delta))
        chosen = []
        for i in range(self.n):
            rng = np.random.default_rng([self.seed, i])
            degree = min(int(np.searchsorted(reach, rng.random())) + 1, self.k)
            chosen.append(np.sort(rng.choice(self.k, degree, replace=False)))
        return chosen

    @property
    def generator(self) -> Array:
        """Coefficients of the coded blocks, 0 or 1, shape (n, k)."""
        matrix = np.zeros((self.n, self.k))
        for i, terms in enumerate(self.terms):
            matrix[i, terms] = 1.0
        return matrix

    def encode(self, a: Array, chosen: Sequence[int] | None = None) -> list[Array]:
        """The n coded blocks of a matrix, or the chosen ones, each of shape (ceil(rows / k), columns)."""
        order = range(self.n) if chosen is None else chosen
        if self.k <= DENSE:
            return list(combine(self.generator[list(order)], a))
        size = split(len(a), self.k)
        coded = np.zeros((len(order), size, a.shape[1]), a.dtype)
        for row, i in enumerate(order):
            for j in self.terms[i]:
                part = a[j * size : (j + 1) * size]
                coded[row, : len(part)] += part
        return list(coded)

    def decoder(self) -> LTDecoder:
        """A new decoder, for one product."""
        return LTDecoder(self)

    def overhead(self, trials: int = 20, seed: int = 0) -> float:
        """Mean portion of k that decoding needs beyond k when coded blocks arrive in random order."""
        rng = np.random.default_rng(seed)
        needed = []
        for _ in range(trials):
            decoder, order = self.decoder(), enumerate(rng.permutation(self.n).tolist(), 1)
            enough = (count for count, i in order if decoder.add(i, np.zeros(1)))
            needed.append(next(enough, self.n + 1))  # if all of them are not enough: a lower bound
        return float(np.mean(needed)) / self.k - 1


@dataclass(frozen=True)
class Replicated(LT):
    """n coded blocks, of which block i is A's block i modulo k: the plainest code, here to compare with."""

    @cached_property
    def terms(self) -> list[NDArray[np.intp]]:
        """The block of A that each coded block is."""
        return list(np.arange(self.n)[:, None] % self.k)


class LTDecoder:
    """Peels as products arrive; what peeling leaves is solved at once where few, steady equations suffice."""

    def __init__(self, code: LT) -> None:
        self.code = code
        self.solved: dict[int, Array] = {}
        self.sums: dict[int, tuple[set[int], Array]] = {}  # by coded block: unknown terms, and their sum
        self.waiting: dict[int, set[int]] = {}  # by block of A: the sums it is an unknown term of
        self.tried = 0

    def add(self, block: int, product: Array) -> bool:
        """Take one product; True once all of A x can be computed."""
        value = np.array(product, copy=True)
        unknown = set()
        for j in self.code.terms[block].tolist():
            if j in self.solved:
                value -= self.solved[j]
            else:
                unknown.add(j)
        if unknown and block not in self.sums:
            self.sums[block] = (unknown, value)
            for j in unknown:
                self.waiting.setdefault(j, set()).add(block)
            if len(unknown) == 1:
                self._peel(block)
        left = self.code.k - len(self.solved)
        if 0 < left <= SMALL and len(self.sums) >= left and len(self.sums) != self.tried:
            self._solve(left)
        return len(self.solved) == self.code.k

    def result(self, rows: int) -> Array:
        """A x, its first ``rows`` rows; PacelineError while blocks are unknown."""
        if len(self.solved) < self.code.k:
            raise PacelineError(
                f"{self.code.k - len(self.solved)} of {self.code.k} blocks are still unknown: wait for more "
                f"products"
            )
        return np.concatenate([self.solved[j] for j in range(self.code.k)])[:rows]

    def _peel(self, first: int) -> None:
        ready = [first]
        while ready:
            sum_ = self.sums.pop(ready.pop(), None)
            if sum_ is None or len(sum_[0]) != 1:
                continue
            (j,), value = sum_
            self.solved[j] = value
            for other in sorted(self.waiting.pop(j, ())):
                if other in self.sums:
                    unknown, rest = self.sums[other]
                    unknown.discard(j)
                    rest -= value
                    if len(unknown) == 1:
                        ready.append(other)
                    elif not unknown:
                        del self.sums[other]

    def _solve(self, left: int) -> None:
        self.tried = len(self.sums)
        unknown = [j for j in range(self.code.k) if j not in self.solved]
        if any(j not in self.waiting or not self.waiting[j] & self.sums.keys() for j in unknown):
            return  # some block is in no sum yet
        column = {j: i for i, j in enumerate(unknown)}
        matrix = np.zeros((len(self.sums), left))
        for row, (terms, _) in enumerate(self.sums.values()):
            matrix[row, [column[j] for j in terms]] = 1.0
        right = np.stack([value for _, value in self.sums.values()])
        u, s, vt = np.linalg.svd(matrix, full_matrices=False)
        if s[-1] * STEADY < s[0]:
            return
        found = vt.T @ ((u.T @ right.reshape(len(right), -1)) / s[:, None])
        for j, value in zip(unknown, found.reshape(left, *right.shape[1:]), strict=True):
            self.solved[j] = value
        self.sums.clear()
        self.waiting.clear()
