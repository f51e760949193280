"""Train linear and logistic regression by gradient descent, both products of every step coded on uneven
workers.

    python examples/coded_regression.py

Is a digit a seven? Each step needs X w and X' r: two matrices, each coded once over the same six Ray workers.
One worker stalls now and then and another is far slower than planned; the result is numpy's all the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np

from paceline.coded import Problem, ShiftedExponential, plan
from paceline.data.datasets import floats, load

Product = Callable[[np.ndarray], np.ndarray]


def linear(forward: Product, backward: Product, y: np.ndarray, features: int, steps: int) -> np.ndarray:
    """Least squares: w <- w - rate X' (X w - y) / count."""
    w = np.zeros(features)
    for _ in range(steps):
        w -= 0.1 * backward(forward(w) - y) / len(y)
    return w


def logistic(forward: Product, backward: Product, y: np.ndarray, features: int, steps: int) -> np.ndarray:
    """Logistic loss: w <- w - rate X' (sigmoid(X w) - y) / count."""
    w = np.zeros(features)
    for _ in range(steps):
        w -= 0.5 * backward(1 / (1 + np.exp(-forward(w))) - y) / len(y)
    return w


def stall(worker: str, master: str, turn: int, rows: int) -> float:
    """Seconds: one slow worker, and one that hangs in every fifth product."""
    if worker == "w5":
        return 1e-4 * rows
    return 0.5 if worker == "w2" and turn % 5 == 0 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps

    from paceline.ray import CodedMatrix, WorkerPool

    data = load("digits")
    images = floats(data.x_train).astype(float).reshape(len(data.x_train), -1)
    x = np.hstack([images, np.ones((len(images), 1))])
    y = (np.asarray(data.y_train) == 7).astype(float)

    workers = tuple(f"w{n}" for n in range(6))
    u = np.full((1, 6), 2.0)

    def planned(name: str, rows: int) -> object:
        return plan(Problem((name,), workers, np.array([float(rows)]), ShiftedExponential(u, 1 / u)))

    with (
        WorkerPool(workers, cpus=0, delay=stall) as pool,  # starts Ray where it is not running
        CodedMatrix(x, planned("forward", len(x)), pool=pool, blocks=30) as coded,
        CodedMatrix(x.T, planned("backward", x.shape[1]), pool=pool, blocks=13) as transposed,
    ):
        for name, train in (("linear", linear), ("logistic", logistic)):
            w = train(coded.__matmul__, transposed.__matmul__, y, x.shape[1], steps)
            exact = train(x.__matmul__, x.T.__matmul__, y, x.shape[1], steps)
            right = np.mean((x @ w > (0.5 if name == "linear" else 0.0)) == y)
            apart = np.linalg.norm(w - exact) / np.linalg.norm(exact)
            print(f"{name}: {100 * right:.1f} % right after {steps} steps, {apart:.1e} from numpy")


if __name__ == "__main__":
    main()
