"""Measure workers, plan for the loss of one, and solve a linear system with SciPy while one is killed and replaced.

    python examples/coded_cg.py

Which digit is it? Kernel ridge regression solves (K + 0.1 I) c = y for 1,500 images, once for each of the ten digits.
K is on six Ray workers of different speeds, and every step of conjugate gradients is a coded product.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy.sparse.linalg import LinearOperator, aslinearoperator, cg

from paceline.coded import read_plan
from paceline.data.datasets import floats, load

WORKERS = tuple(f"w{n}" for n in range(6))
KILLED = "w1"


def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """exp(-|a_i - b_j|^2 / 4), for images as rows."""
    square = (a**2).sum(1)[:, None] + (b**2).sum(1) - 2 * a @ b.T
    return np.exp(-np.maximum(square, 0) / 4)


def stall(worker: str, master: str, turn: int, rows: int) -> float:
    """Seconds that the rows take: the last two workers are slow, and each is sometimes slower."""
    per_row = 4e-5 if worker in WORKERS[:4] else 16e-5
    draw = np.random.default_rng([WORKERS.index(worker), turn]).exponential()
    return rows * per_row * (0.5 + 0.5 * draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=1500)
    parser.add_argument("--digits", type=int, default=10, help="tell apart only the digits below this one")
    given = parser.parse_args()
    images, digits = given.images, given.digits
    if not 2 <= digits <= 10:
        parser.error(f"--digits {digits}: expected 2 to 10")
    if not 100 <= images <= 1500:
        parser.error(f"--images {images}: expected 100 to 1500")

    from paceline.ray import CodedMatrix, WorkerPool, measure

    data = load("digits")
    few, tested = np.flatnonzero(data.y_train < digits)[:images], data.y_test < digits
    x = floats(data.x_train).astype(float).reshape(len(data.x_train), -1)[few]
    test = floats(data.x_test).astype(float).reshape(len(data.x_test), -1)[tested]
    a = kernel(x, x) + 0.1 * np.eye(len(x))
    wanted = np.eye(digits)[data.y_train[few]]

    with tempfile.TemporaryDirectory() as folder, WorkerPool(WORKERS, cpus=0, delay=stall) as pool:
        times, file = Path(folder) / "times.csv", Path(folder) / "plan.json"
        measure(pool, {"kernel": a}, times)
        planned = ["plan", "--fit", str(times), "--rows", str(len(x)), "--redundancy", "2", "--survive", "1"]
        subprocess.run([sys.executable, "-m", "paceline", *planned, "--json", str(file)], check=True)

        steps, products = 0, []

        def step(_: np.ndarray) -> None:
            nonlocal steps
            steps += 1
            if steps == 20:
                os.kill(pool.processes[KILLED], signal.SIGKILL)
                print(f"step {steps}: {KILLED} is killed")
            if steps == 40:
                pool.replace(KILLED)
                print(f"step {steps}: {KILLED} is replaced")

        with CodedMatrix(a, read_plan(file), "kernel", pool, messages=6) as coded:
            operator = aslinearoperator(coded)

            def product(vector: np.ndarray) -> np.ndarray:
                start = time.perf_counter()
                answer = operator.matvec(vector)
                products.append(time.perf_counter() - start)
                return answer

            timed = LinearOperator(a.shape, matvec=product, dtype=a.dtype)
            c = np.empty(wanted.shape)
            for digit in range(digits):
                c[:, digit], left = cg(timed, wanted[:, digit], rtol=1e-8, callback=step)
                if left:
                    raise SystemExit(f"digit {digit} did not converge")

    right = np.mean((kernel(test, x) @ c).argmax(1) == data.y_test[tested])
    exact = np.linalg.solve(a, wanted)
    apart = np.linalg.norm(c - exact) / np.linalg.norm(exact)
    middle, longest = 1000 * np.median(products), 1000 * max(products)
    print(f"{len(products)} products: median {middle:.0f} ms, longest {longest:.0f} ms")
    print(f"{100 * right:.1f} % of the test digits are right; c differs from numpy's by {apart:.1e}")


if __name__ == "__main__":
    main()
