"""A coded plan: who serves whom, with how many rows, by when; and how its loads follow from an assignment.

Theorem 1 of Sun et al. (2019), and beyond it: the expected rows by time t are sum_n k_n l_n F_n((t - d_n) / l_n),
with d the latency. The loads are separate terms of that sum, so each is best alone, at l_n = (t - d_n) / phi_n, where
a worker brings rate_n (t - d_n) rows in expectation. The paper asks that -l F(t / l) be convex for its multiplier
method; here no convexity is needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array, Delay
from paceline.coded.problem import Problem
from paceline.costs import Linear
from paceline.errors import PacelineError
from paceline.shares import water_level


@dataclass(frozen=True)
class CodedPlan:
    """An assignment with its loads.

    probability: k, shape (M, N), 1 for a dedicated worker; loads: rows as planned, fractional, shape (M, N).
    t_star: milliseconds by which each master's rows are expected, shape (M,); for an uncoded plan the mean
        time until all its workers are done.
    """

    problem: Problem
    assign: str
    coded: bool
    probability: Array
    loads: Array
    t_star: Array

    @property
    def rows_assigned(self) -> NDArray[np.int64]:
        """Loads in whole rows that still cover L, shape (M, N)."""
        return whole_rows(self.loads, self.problem.rows, self.coded)

    @property
    def dedicated(self) -> bool:
        """Whether each worker serves one master at most."""
        return not ((self.probability > 0) & (self.probability < 1)).any()

    @property
    def redundancy(self) -> Array:
        """Planned rows over L, weighted by how likely they are to be served, shape (M,); 1 for an uncoded plan."""
        return (self.probability * self.loads).sum(1) / self.problem.rows

    def workers_of(self, master: int | str) -> NDArray[np.intp]:
        """Positions of the workers that may serve a master, given by position or name."""
        return np.flatnonzero(self.probability[self.master(master)] > 0)

    def master(self, master: int | str) -> int:
        """Position of a master given by position or name."""
        names = self.problem.masters
        if isinstance(master, str) and master in names:
            return names.index(master)
        if not isinstance(master, str) and 0 <= master < len(names):
            return int(master)
        raise PacelineError(f"master {master!r} is not in the plan: expected one of {', '.join(names)}")

    def to_json(self) -> dict[str, Any]:
        """Plain data: overall ``t_star`` and one entry for each master, in milliseconds and rows."""
        whole = self.rows_assigned
        masters = []
        for m, name in enumerate(self.problem.masters):
            workers = [
                {
                    "worker": self.problem.workers[n],
                    "load": float(self.loads[m, n]),
                    "rows_assigned": int(whole[m, n]),
                    "probability": float(self.probability[m, n]),
                }
                for n in self.workers_of(m)
            ]
            masters.append(
                {
                    "master": name,
                    "t_star": float(self.t_star[m]),
                    "rows": int(self.problem.rows[m]),
                    "redundancy": float(self.redundancy[m]),
                    "workers": workers,
                }
            )
        return {
            "t_star": float(self.t_star.max()),
            "assign": self.assign,
            "coded": self.coded,
            "masters": masters,
        }

    def dumps(self) -> str:
        """``to_json`` as text."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n"


def finish(problem: Problem, assign: str, k: Array, coded: bool, phi: Array, rate: Array) -> CodedPlan:
    """The plan for a given k: loads and times; PacelineError if a master's rows are not covered."""
    if not coded:
        loads = uncoded_loads(problem, k, equal=assign == "uniform")
        return CodedPlan(problem, assign, coded, k, loads, expected_completion(problem, loads))
    t = completion(problem, k, rate)
    if not np.isfinite(t).all():
        name = problem.masters[int(np.argmax(~np.isfinite(t)))]
        raise PacelineError(
            f"the plan cannot cover the rows of master {name!r}: {assign!r} leaves it without workers; choose "
            "another assignment or add workers"
        )
    loads = coded_loads(problem, k, t, phi)
    k = np.where(loads > 0, k, 0.0)  # a worker whose latency exceeds t* brings nothing
    return CodedPlan(problem, assign, coded, k, loads, t)


def completion(problem: Problem, k: Array, rate: Array) -> Array:
    """t*, shape (M,): milliseconds until L rows are expected, sum_n k rate (t - d)+ = L; inf without workers.

    rate: rows per millisecond, shape (M, N), from ``Delay.peak``. Sun et al., eq. (3), Theorem 1.
    """
    brings = k * rate
    served = brings.sum(1) > 0
    slope = np.divide(
        1.0, brings, out=np.full(brings.shape, np.inf), where=brings > 0
    )  # k of HiGHS may be -0.0
    cost = Linear(slope[served], problem.wait[served])
    result = np.full(len(brings), np.inf)
    result[served] = water_level(cost, problem.rows[served], most=np.inf).seconds
    return result


def coded_loads(problem: Problem, k: Array, t: Array, phi: Array) -> Array:
    """(t_m - d)+ / phi rows where k > 0, (M, N), not whole (Sun et al., eqs. (4), (5), (7), Lemma 1)."""
    spare = np.maximum(np.where(np.isfinite(t), t, 0.0)[:, None] - problem.wait, 0.0)
    return np.where(k > 0, spare / phi, 0.0)


def uncoded_loads(problem: Problem, k: Array, equal: bool) -> Array:
    """L divided among a master's workers: equally (Sun et al., benchmark 1), else by mean speed."""
    weight = (k > 0) / (1.0 if equal else problem.delay.mean())
    return problem.rows[:, None] * weight / weight.sum(1, keepdims=True)


def whole_rows(loads: Array, rows: Array, coded: bool) -> NDArray[np.int64]:
    """Loads in whole rows, shape (M, N): rounded up where coded, exactly L in sum where uncoded."""
    if coded:
        return np.ceil(loads - 1e-9 * np.maximum(loads, 1.0)).astype(np.int64)
    whole = np.floor(loads).astype(np.int64)
    for m, missing in enumerate(rows.astype(np.int64) - whole.sum(1)):
        largest = np.argsort(whole[m] - loads[m], kind="stable")[:missing]
        whole[m, largest] += 1
    return whole


def expected_completion(problem: Problem, loads: Array) -> Array:
    """E[time when all of a master's workers are done], shape (M,): an uncoded plan's t*, by integrating P[T > t]."""
    result = np.zeros(len(loads))
    for m in range(len(loads)):
        mine = np.flatnonzero(loads[m] > 0)
        delay, load, wait = problem.delay.take((m, mine)), loads[m, mine], problem.wait[m, mine]

        def late(t: Array, delay: Delay = delay, load: Array = load, wait: Array = wait) -> Array:
            """P[some worker later than t]."""
            return 1 - np.prod(delay.cdf(np.maximum(t[:, None] - wait, 0.0) / load), axis=1)

        middle = end = float((wait + load * delay.mean()).max())
        while late(np.array([end]))[0] > 1e-12:
            end *= 1.5
        edges = np.concatenate([np.linspace(0.0, middle, 1001), np.geomspace(middle, end, 1001)[1:]])
        nodes, weights = np.polynomial.legendre.leggauss(4)
        half = 0.5 * np.diff(edges)
        t = (edges[:-1, None] + half[:, None] * (nodes + 1)).ravel()
        result[m] = float(late(t) @ (half[:, None] * weights).ravel())
    return result
