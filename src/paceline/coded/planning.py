"""How a coded plan is made: ``plan(problem, "iterated")``; and made again when masters or workers come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paceline.coded.assign import exact, iterated, probabilistic, simple, uniform
from paceline.coded.coded_plan import CodedPlan, completion, finish
from paceline.coded.delay import Array
from paceline.coded.problem import Problem
from paceline.errors import PacelineError, among

SECONDS = 20.0  # to look for the assignment that moves the fewest workers
ASSIGNMENTS: dict[str, Callable[[Array], Array]] = {
    "uniform": uniform,
    "simple": simple,
    "iterated": iterated,
    "exact": exact,
    "probabilistic": probabilistic,
}


def plan(problem: Problem, assign: str = "iterated", coded: bool = True) -> CodedPlan:
    """Assign the workers and divide the rows so that the slowest master's t* is least (Sun et al., eq. (6)).

    assign: one of ``ASSIGNMENTS``. coded: False divides L without redundancy, so that a master waits for all its
    workers; equally for "uniform", as the paper's benchmark does, else by mean speed.

    Raises PacelineError for an unknown name, an uncoded probabilistic plan, and if a master cannot be covered.
    """
    if assign not in ASSIGNMENTS:
        raise PacelineError(f"assign={assign!r}: expected one of {among(assign, ASSIGNMENTS)}")
    if not coded and assign == "probabilistic":
        raise PacelineError(
            f"an uncoded plan needs every worker it counts on, so workers cannot be shared by {assign!r}; "
            "choose uniform, simple, iterated or exact"
        )
    phi, rate = problem.delay.peak()
    return finish(problem, assign, assignment(problem, assign, rate), coded, phi, rate)


def assignment(problem: Problem, assign: str, rate: Array) -> Array:
    """k for a problem (Sun et al., eq. (8)). With latencies the value of a pair depends on the time,
    v = rate (1 - d / t)+ / L: the assignment for one t gives a shorter t, until it gives none (Dinkelbach's
    method: exact for the exact assignments)."""
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


class Rearranged(NamedTuple):
    """A plan after a change. moved: workers whose master is still there but who now serve another."""

    plan: CodedPlan
    moved: tuple[str, ...]


def rearrange(old: CodedPlan, problem: Problem, within: float = 0.05) -> Rearranged:
    """Plan ``problem`` again, moving the fewest workers that keep t* within a portion of the best.

    old: a dedicated plan; its masters and workers are recognized in ``problem`` by name. within: how much
    longer than the exact assignment's t* the plan may take. The mixed-integer programme has ``SECONDS``; when they
    are up, it is the best assignment found, at worst the exact one itself.

    The programme maximizes the workers kept under sum_n k rate (t - d)+ >= L for every master, t = (1 +
    within) t*. Raises PacelineError for a probabilistic old plan and a negative portion.
    """
    if not within >= 0:
        raise PacelineError(f"within={within:g}: expected a portion of 0 or more")
    if not old.coded or not old.dedicated:
        raise PacelineError("only coded plans of dedicated workers can be rearranged; plan again instead")
    phi, rate = problem.delay.peak()
    best = assignment(problem, "exact", rate)
    t = completion(problem, best, rate).max() * (1 + within)
    serving = _serving(old, problem)
    k = _fewest_moves(problem, serving, rate, t)
    candidates = [each for each in (k, best) if each is not None]
    k = min(candidates, key=lambda each: len(_moved(serving, each)))
    made = finish(problem, "exact", k, True, phi, rate)
    return Rearranged(made, tuple(problem.workers[n] for n in _moved(serving, k)))


def _serving(old: CodedPlan, problem: Problem) -> np.ndarray:
    """For each worker of ``problem`` the position of the master it serves now, -1 where there is none (any more)."""
    position = {name: m for m, name in enumerate(problem.masters)}
    master = {
        old.problem.workers[n]: position.get(old.problem.masters[int(np.argmax(old.probability[:, n]))], -1)
        for n in range(old.problem.shape[1])
        if old.probability[:, n].max() > 0
    }
    return np.array([master.get(name, -1) for name in problem.workers])


def _moved(serving: np.ndarray, k: np.ndarray) -> list[int]:
    now = np.where(k.max(0) > 0, k.argmax(0), serving)  # who is set free has not moved
    return [n for n in range(len(serving)) if serving[n] >= 0 and now[n] != serving[n]]


def _fewest_moves(problem: Problem, serving: np.ndarray, rate: np.ndarray, t: float) -> np.ndarray | None:
    from scipy.optimize import LinearConstraint, milp
    from scipy.sparse import csr_array

    masters, workers = problem.shape
    brings = (rate * np.maximum(t - problem.wait, 0.0) / problem.rows[:, None]).ravel()
    columns = np.arange(masters * workers, dtype=np.int32)  # HiGHS in scipy before 1.15 takes no others
    m, n = np.divmod(columns, np.int32(workers))
    covers = csr_array((brings, (m, columns)), shape=(masters, masters * workers))
    once = csr_array((np.ones(len(columns)), (n, columns)), shape=(workers, masters * workers))
    keeps = (serving[n] == m).astype(float)
    # among assignments that keep as many, the one that brings most: worth less than one worker in all
    goal = -keeps - 0.5 * brings / max(brings.max() * workers, 1e-300)
    result = milp(
        goal,
        constraints=[LinearConstraint(covers, lb=1 - 1e-9), LinearConstraint(once, ub=1)],
        integrality=np.ones(len(columns)),
        bounds=(0, 1),
        options={"time_limit": SECONDS, "mip_rel_gap": 0.2 / workers},
    )
    return None if result.x is None else np.round(result.x).reshape(masters, workers)
