"""How long does DBW's time estimate (eq. 17) take, and is it the optimum?

Beside it cvxpy with OSQP, as a user would write the problem, and with Clarabel for the optimum itself (off: largest
difference of a sampled cell from it). Times are medians; run it on a quiet machine. Usage: python
benchmarks/arrival_times.py [--peers]
"""

from __future__ import annotations

import time

import numpy as np
from scaffold import command_line, progress

from paceline.backup import arrival_times

SIZES = {16: 30, 200: 5, 1000: 2}  # workers: repetitions
PEER_UP_TO = 200


def samples(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Means and counts of arrivals: every cell sampled, more noise than order."""
    k, h = np.mgrid[1 : n + 1, 1 : n + 1]
    means = np.log(n / (n - k + 0.5)) + 0.5 * (n - h) / n + rng.normal(0, 0.5, (n, n))
    return means, rng.integers(1, 5, (n, n)).astype(float)


def peer(means: np.ndarray, counts: np.ndarray, solver: str, **options: float) -> tuple[np.ndarray, float]:
    """Eq. (17) by cvxpy; values and seconds."""
    import cvxpy as cp

    x = cp.Variable(means.shape)
    order = [x[1:] >= x[:-1], x[:, 1:] <= x[:, :-1], cp.diag(x)[1:] >= cp.diag(x)[:-1]]
    problem = cp.Problem(cp.Minimize(cp.sum(cp.multiply(counts, cp.square(x - means)))), order)
    began = time.perf_counter()
    problem.solve(solver=solver, **options)
    assert x.value is not None, f"{solver} found nothing"
    return x.value, time.perf_counter() - began


def main() -> None:
    """Print the table."""
    parser = command_line(__doc__)
    parser.add_argument("--peers", action="store_true", help="up to 200 workers also with OSQP and Clarabel")
    peers = parser.parse_args().peers
    rng = np.random.default_rng(0)
    print(f"{'workers':>8} {'ms':>9} {'OSQP ms':>9} {'off':>9} {'OSQP off':>9}")
    for n, times in SIZES.items():
        spent = []
        for _ in progress(range(times), f"{n} workers"):
            means, counts = samples(n, rng)
            began = time.perf_counter()
            found = arrival_times.fit(means, counts)
            spent.append(time.perf_counter() - began)
        line = f"{n:>8} {np.median(spent) * 1e3:>9.2f}"
        if n <= (PEER_UP_TO if peers else 16):
            exact, _ = peer(means, counts, "CLARABEL", tol_gap_abs=1e-12, tol_gap_rel=1e-12, tol_feas=1e-12)
            rough, seconds = peer(means, counts, "OSQP")
            off, theirs = (np.abs(values - exact).max() for values in (found, rough))
            line += f" {seconds * 1e3:>9.1f} {off:>9.1e} {theirs:>9.1e}"
        print(line)


if __name__ == "__main__":
    main()
