"""Which real-valued code decodes accurately, and what do encoding and decoding cost?

Worst k-of-n condition numbers and errors for each construction; encoding and decoding beside the BLAS product
of the same shape, one thread each, in one run; the overhead of rateless codes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from paceline.coded import lt
from paceline.coded.codes import CONSTRUCTIONS, MDS, worst_condition
from paceline.coded.lt import LT

SIZES = ((6, 4), (8, 4), (10, 7), (12, 8), (16, 11), (20, 14), (32, 22), (64, 32), (64, 44), (64, 60))


def median(run: Callable[[], object], repeats: int = 15) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
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
        for name in CONSTRUCTIONS:
            worst, everything = worst_condition(MDS(k, n, name), 15_000 if n <= 16 else 6000)
            cells.append(f"{worst:>12.1e}{' ' if everything else '*'} {error(MDS(k, n, name)):>8.0e}")
        print(f"{n:>4} {k:>4}" + "".join(cells))
    for n, k in ((200, 137), (800, 546)):
        print(f"{n:>4} {k:>4} orthogonal: error {error(MDS(k, n), 60):.0e}")


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
    rateless = LT(100, 200)
    a = rng.standard_normal((6000, 500))
    coefficients, flat = rateless.generator, rng.standard_normal((100, 60 * 500))
    encode, blas = median(lambda: rateless.encode(a)), median(lambda: coefficients @ flat)
    print(
        f"  6000 x 500, rateless, 200 blocks over 100: encode {1e3 * encode:.2f} ms, BLAS {1e3 * blas:.2f} "
        f"ms, ratio {blas / encode:.2f}"
    )


def rateless() -> None:
    print("\nrateless codes: blocks needed beyond k, mean of 20 random orders")
    for k in (20, 50, 100, 200, 400, 1000):
        code = LT(k, 3 * k)
        solved = code.overhead()
        keep, lt.SMALL = lt.SMALL, 0
        peeled = code.overhead()
        lt.SMALL = keep
        print(
            f"  k = {k:<5} peeling {100 * peeled:5.1f} %, peeling and solving what is left "
            f"{100 * solved:5.1f} %"
        )


if __name__ == "__main__":
    conditions()
    speeds()
    rateless()
