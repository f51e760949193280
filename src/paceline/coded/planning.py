"""How a coded plan is made: the assignments by name. ``plan(problem, "iterated")`` is the way in."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np

from paceline.coded.assign import simple, uniform
from paceline.coded.coded_plan import CodedPlan, finish
from paceline.coded.compare import advice
from paceline.coded.delay import Array, ShiftedExponential
from paceline.coded.exact import exact, probabilistic
from paceline.coded.iterated import iterated
from paceline.coded.loads import completion
from paceline.coded.problem import Problem
from paceline.errors import PacelineError, among

ASSIGNMENTS: dict[str, Callable[[Array], Array]] = {
    "uniform": uniform,
    "simple": simple,
    "iterated": iterated,
    "exact": exact,
    "probabilistic": probabilistic,
}
NAMES = (*ASSIGNMENTS, "sca")


def plan(
    problem: Problem, assign: str = "iterated", coded: bool = True, code: str | None = None
) -> CodedPlan:
    """Assign the workers and divide the rows so that the slowest master's t* is least.

    assign: one of ``NAMES``. coded: False divides L without redundancy, so that a master waits for all its
    workers; equally for "uniform", as the paper's benchmark does, else by mean speed.

    code: how the plan is to be carried out ("mds", "chunked", "lt", "uncoded"); warns where another code
    would be faster by simulation (``advice``). None says nothing.

    Raises PacelineError for an unknown name, an uncoded probabilistic plan, and where a master cannot be
    covered.
    """
    if assign not in NAMES:
        raise PacelineError(f"assign={assign!r}: expected one of {among(assign, NAMES)}")
    if not coded and assign in ("probabilistic", "sca"):
        raise PacelineError(
            f"an uncoded plan needs every worker it counts on, so workers cannot be shared by {assign!r}; "
            "choose uniform, simple, iterated or exact"
        )
    if assign == "sca":
        made = _by_sca(problem)
    else:
        phi, rate = problem.delay.peak()
        made = finish(problem, assign, assignment(problem, assign, rate), coded, phi, rate)
    if code is not None:
        for sentence in advice(made, code):
            warnings.warn(sentence, stacklevel=2)
    return made


def assignment(problem: Problem, assign: str, rate: Array) -> Array:
    """k for a problem. With latencies the value of a pair depends on the time, v = rate (1 - d / t)+ / L, so
    the assignment for one t gives a shorter t, until it gives no shorter one (Dinkelbach's method: exact for
    the exact assignments)."""
    choose = ASSIGNMENTS[assign]
    values = rate / problem.rows[:, None]
    k = choose(values)
    if problem.latency is None or assign == "uniform":
        return k
    t = completion(problem, k, rate).max()
    for _ in range(50):
        if not np.isfinite(t):
            break
        trial = choose(np.maximum(values * np.maximum(1 - problem.latency / t, 0.0), values.max() * 1e-15))
        shorter = completion(problem, trial, rate).max()
        if not shorter < t * (1 - 1e-12):
            break
        k, t = trial, shorter
    return k


def _by_sca(problem: Problem) -> CodedPlan:
    from paceline.coded.sca import sca

    if not isinstance(problem.delay, ShiftedExponential) or problem.latency is not None:
        raise PacelineError(
            "the successive convex approximation is the paper's, for shifted exponential delays without "
            "communication; choose 'probabilistic' here"
        )
    found = sca(problem.delay, problem.rows)
    k = np.where(found.k > 1e-3, found.k, 0.0)
    phi, rate = problem.delay.peak()
    return finish(problem, "sca", k / np.maximum(k.sum(0), 1.0), True, phi, rate)
