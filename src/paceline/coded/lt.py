"""Rateless codes over row blocks (Luby 2002; for matrix products Mallick et al. 2019, arXiv 1804.10331).

Each coded block is the sum of a few blocks of A, chosen at random with a robust soliton number of terms. Any
(1 + overhead) k of them give A x back by peeling: a sum of which all but one term are known yields that one.
Blocks may be many and decoding stays cheap, so that every row a straggler finished counts. The price is the
overhead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from paceline.coded.codes import combine, split
from paceline.coded.delay import Array
from paceline.errors import PacelineError

STEADY = 1e6  # condition number up to which what peeling leaves is solved as a linear system
DENSE = 200  # blocks up to which one BLAS product, zeros included, is faster than adding term by term
SMALL = 400  # unknown blocks up to which that is cheaper than waiting for more


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
            decoder = self.decoder()
            for count, i in enumerate(rng.permutation(self.n), 1):
                if decoder.add(int(i), np.zeros(1)):
                    needed.append(count)
                    break
            else:
                needed.append(self.n + 1)  # all of them were not enough: a lower bound
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


__all__ = ["LT", "Replicated", "robust_soliton"]
