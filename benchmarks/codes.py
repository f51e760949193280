"""Which real-valued code decodes accurately, and what do encoding and decoding cost?

Worst k-of-n condition numbers and errors for Paceline's own and three other constructions; errors of float32 with
the blocks that suffice, and with further ones as ``CodedMatrix`` waits for them; encoding and decoding beside the
BLAS product of the same shape, CPU time of one thread each, in one run.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from functools import cached_property, partial
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.coded.codes import MDS
from paceline.costs import Array

SIZES = ((6, 4), (8, 4), (10, 7), (12, 8), (16, 11), (20, 14), (32, 22), (64, 32), (64, 44), (64, 60))


class Gaussian(MDS):
    """Parities of independent normal entries, rows of length 1."""

    @cached_property
    def parity(self) -> Array:
        rows = np.random.default_rng(self.seed).standard_normal((self.n - self.k, self.k))
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Cauchy(MDS):
    """1 / (x_i - y_j) on interleaved Chebyshev nodes, rows of length 1: every square part is invertible."""

    @cached_property
    def parity(self) -> Array:
        nodes = np.cos((2 * np.arange(self.n) + 1) * np.pi / (2 * self.n))
        first = spread(self.n, self.n - self.k)
        x, y = nodes[first], np.delete(nodes, first)
        rows = 1 / (x[:, None] - y[None, :])
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Chebyshev(MDS):
    """Vandermonde in Chebyshev polynomials on Chebyshev nodes, made systematic at evenly spread nodes."""

    @cached_property
    def parity(self) -> Array:
        angles = (2 * np.arange(self.n) + 1) * np.pi / (2 * self.n)
        full = np.cos(angles[:, None] * np.arange(self.k)[None, :])
        first = spread(self.n, self.n - self.k)
        return np.linalg.solve(np.delete(full, first, axis=0).T, full[first].T).T


def spread(n: int, count: int) -> NDArray[np.intp]:
    """``count`` positions evenly spread over n."""
    return ((np.arange(count) + 0.5) * n / max(count, 1)).astype(np.intp)


CONSTRUCTIONS = {"orthogonal": MDS, "gaussian": Gaussian, "cauchy": Cauchy, "chebyshev": Chebyshev}


def worst_condition(code: MDS, samples: int = 2000, seed: int = 0) -> tuple[float, bool]:
    """(largest condition number over k-of-n choices, whether every choice was looked at).

    All choices where there are at most ``samples``; else random ones, the worst of which is then made worse
    by exchanging one block at a time as long as that helps.
    """
    generator, n, k = code.generator, code.n, code.k
    if math.comb(n, k) <= samples:
        return float(np.linalg.cond(generator[list(combinations(range(n), k))]).max()), True
    rng = np.random.default_rng(seed)
    choices = [rng.permutation(n) for _ in range(samples // 2)]
    values = np.linalg.cond(generator[np.array([c[:k] for c in choices])])
    order = choices[int(np.argmax(values))]
    worst, left = float(values.max()), samples - samples // 2
    improved = True
    while improved and left > 0:
        improved = False
        for i in rng.permutation(k):
            trials = np.repeat(order[None, :], n - k, axis=0)
            trials[:, i] = order[k:]
            found = np.linalg.cond(generator[trials[:, :k]])
            left -= n - k
            if found.max() > worst:
                worst, j = float(found.max()), int(np.argmax(found))
                order[i], order[k + j] = order[k + j], order[i]
                improved = True
            if left <= 0:
                break
    return worst, False


def median(run: Callable[[], object], repeats: int = 15) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds)


def error(code: MDS, trials: int = 300) -> float:
    """Largest relative error of A x over random choices of k blocks, and those with every parity."""
    rng = np.random.default_rng(0)
    a, x = rng.standard_normal((3 * code.k, 7)), rng.standard_normal(7)
    y = a @ x
    products = [block @ x for block in code.encode(a)]
    worst = 0.0
    for trial in range(trials):
        order = rng.permutation(code.n)
        if trial % 2:
            order = np.concatenate([order[order >= code.k], order[order < code.k]])
        found = code.decode({int(i): products[i] for i in order[: code.k]}, len(a))
        worst = max(worst, float(np.linalg.norm(found - y) / np.linalg.norm(y)))
    return worst


def conditions() -> None:
    print(
        "worst condition number of k of n blocks (* = hill climbing from random choices), largest relative "
        "error"
    )
    print(f"{'n':>4} {'k':>4}" + "".join(f"{name:>22}" for name in CONSTRUCTIONS))
    for n, k in SIZES:
        cells = []
        for construction in CONSTRUCTIONS.values():
            code = construction(k, n)
            worst, everything = worst_condition(code, 15_000 if n <= 16 else 6000)
            cells.append(f"{worst:>12.1e}{' ' if everything else '*'} {error(code):>8.0e}")
        print(f"{n:>4} {k:>4}" + "".join(cells))
    for n, k in ((200, 137), (800, 546)):
        print(f"{n:>4} {k:>4} orthogonal: error {error(MDS(k, n), 60):.0e}")


def single(trials: int = 1500) -> None:
    from paceline.ray.matmul import TOLERATED

    print(
        f"\nfloat32, {trials} random orders of arrival: relative errors with k blocks | with further ones until "
        f"{np.finfo(np.float32).eps * TOLERATED:.1e} is expected"
    )
    for n, k in ((64, 32), (64, 43)):
        code, rng = MDS(k, n), np.random.default_rng(0)
        a: NDArray[Any] = rng.standard_normal((3 * k, 40)).astype(np.float32)
        blocks = code.encode(a)
        found = []
        for _ in range(trials):
            x, order = rng.standard_normal(40).astype(np.float32), rng.permutation(n).tolist()
            y = a.astype(float) @ x
            more = k
            while code.amplification(order[:more]) > TOLERATED:
                more += 1
            answers = [code.decode({i: blocks[i] @ x for i in order[:count]}, len(a)) for count in (k, more)]
            plain = np.linalg.norm(a @ x - y) / np.linalg.norm(y)
            found.append(
                [*(np.linalg.norm(each - y) / np.linalg.norm(y) for each in answers), plain, more - k]
            )
        few, waited, plain, further = np.array(found).T
        shown = [f"worst {e.max():.0e}, 99 % {np.quantile(e, 0.99):.0e}" for e in (few, waited)]
        print(
            f"  {n} blocks of which {k}: {' | '.join(shown)}; {further.mean():.2f} further blocks, at most "
            f"{further.max():.0f}; plain product at most {plain.max():.0e}"
        )


def speeds() -> None:
    print("\nspeed beside the BLAS product of the same shape and operations (ratio; 0.33 wanted)")
    rng = np.random.default_rng(0)
    for rows, columns, n, k in (
        (4400, 1000, 64, 44),
        (8790, 500, 64, 44),
        (6000, 500, 18, 12),
        (6000, 500, 64, 60),
    ):
        a = rng.standard_normal((rows, columns))
        code = MDS(k, n)
        blocks = code.encode(a)
        flat = rng.standard_normal((k, blocks[0].size))
        encode, blas = median(partial(code.encode, a)), median(partial(np.matmul, code.parity, flat))
        x = rng.standard_normal((columns, 64))
        products = {i: blocks[i] @ x for i in range(n - k, n)}  # every parity is needed
        missing = n - k
        small, wide = rng.standard_normal((missing, k)), rng.standard_normal((k, products[n - 1].size))
        decode = median(partial(code.decode, products, rows))
        product = median(partial(np.matmul, small, wide))
        print(
            f"  {rows} x {columns}, {n} blocks of which {k}: encode {1e3 * encode:6.2f} ms, BLAS "
            f"{1e3 * blas:6.2f} ms, "
            f"ratio {blas / encode:.2f}; decode {1e3 * decode:6.2f} ms, BLAS {1e3 * product:6.2f} ms, "
            f"ratio {product / decode:.2f}"
        )


if __name__ == "__main__":
    conditions()
    single()
    speeds()
