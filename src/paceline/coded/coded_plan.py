"""A coded plan: who serves whom, with how many rows, by when; and how one follows from an assignment."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array
from paceline.coded.loads import coded_loads, completion, expected_completion, uncoded_loads, whole_rows
from paceline.coded.problem import Problem
from paceline.errors import PacelineError


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
    def redundancy(self) -> Array:
        """Planned rows over L, weighted by how likely they are to be served, shape (M,); 1 for an uncoded
        plan.
        """
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
    """The plan for a given k: loads and times; PacelineError where a master's rows are not covered."""
    if not coded:
        loads = uncoded_loads(problem, k, equal=assign == "uniform")
        return CodedPlan(problem, assign, coded, k, loads, expected_completion(problem, loads))
    t = completion(problem, k, rate)
    if not np.isfinite(t).all():
        name = problem.masters[int(np.argmax(~np.isfinite(t)))]
        raise PacelineError(
            f"the plan cannot cover the rows of master {name!r}: {assign!r} leaves it without workers; "
            f"choose "
            "another assignment or add workers"
        )
    loads = coded_loads(problem, k, t, phi)
    k = np.where(loads > 0, k, 0.0)  # a worker whose latency exceeds t* brings nothing
    return CodedPlan(problem, assign, coded, k, loads, t)
