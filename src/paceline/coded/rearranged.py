"""A coded plan after masters or workers have joined or left, in which few workers move."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.coded.coded_plan import CodedPlan, assignment, brought, capped, completion, finish
from paceline.coded.problem import Problem
from paceline.errors import PacelineError, number

SECONDS = 20.0  # time limit of the search for the assignment that moves the fewest workers


class Rearranged(NamedTuple):
    """A plan after a change.

    Attributes:
        plan: The new plan.
        moved: Workers that serve another master although their old one is still there.
    """

    plan: CodedPlan
    moved: tuple[str, ...]


def rearrange(old: CodedPlan, problem: Problem, within: float = 0.05) -> Rearranged:
    """Plan ``problem`` again, moving as few workers as possible while t* stays within a portion of the best.

    The programme maximizes the workers kept under the condition that each master's workers are expected to bring L
    rows by t = (1 + within) t*. The new loads are those of Theorem 1, as from ``plan``, also if ``old`` was made by
    ``stretched``: stretch the new plan as well.

    Args:
        old: A dedicated plan; its masters and workers are recognized in ``problem`` by name.
        problem: The masters and workers as they are now.
        within: How much longer than the exact assignment's t* the plan may take, as a portion of it. The
            mixed-integer programme has ``SECONDS``; then the result is the best assignment found, at worst the exact
            one itself.

    Returns:
        The new plan, and the workers that it moves.

    Raises:
        PacelineError: For a probabilistic old plan and a negative portion.
    """
    number("within", within, "a portion of 0 or more", lambda within: within >= 0)
    if not old.coded or not old.dedicated:
        raise PacelineError("only coded plans of dedicated workers can be rearranged; plan again instead")
    phi, rate = problem.delay.peak()
    best = assignment(problem, "exact", phi, rate)
    t = capped(problem, best, completion(problem, best, rate), phi)[1].max() * (1 + within)
    brings = brought(problem, phi, np.full(len(rate), t))
    if (best.sum(1) <= 1).any():  # one worker with at most L rows is never expected to bring L
        brings = rate * np.maximum(t - problem.wait, 0.0)
    serving = _serving(old, problem)
    k = _fewest_moves(serving, brings / problem.rows[:, None])
    candidates = [each for each in (k, best) if each is not None]
    k = min(candidates, key=lambda each: len(_moved(serving, each)))
    made = finish(problem, "exact", k, True, phi, rate)
    return Rearranged(made, tuple(problem.workers[n] for n in _moved(serving, k)))


def _serving(old: CodedPlan, problem: Problem) -> np.ndarray:
    """The position of the master that each worker of ``problem`` serves now, -1 if there is none (any more)."""
    position = {name: m for m, name in enumerate(problem.masters)}
    pairs = zip(*np.nonzero(old.probability), strict=True)
    serving = {old.problem.workers[n]: position.get(old.problem.masters[m], -1) for m, n in pairs}
    return np.array([serving.get(name, -1) for name in problem.workers])


def _moved(serving: np.ndarray, k: np.ndarray) -> list[int]:
    now = np.where(k.max(0) > 0, k.argmax(0), serving)  # an unassigned worker has not moved
    return [n for n in range(len(serving)) if serving[n] >= 0 and now[n] != serving[n]]


def _fewest_moves(serving: np.ndarray, brings: np.ndarray) -> np.ndarray | None:
    """k that keeps most workers, or None if none was found in time. brings: portions of L rows by t, (M, N)."""
    from scipy import sparse
    from scipy.optimize import LinearConstraint, milp

    masters, workers = brings.shape
    covers = sparse.block_diag(list(brings[:, None]), "csr")
    once = sparse.hstack([sparse.eye(workers)] * masters, "csr")
    keeps = (serving == np.arange(masters)[:, None]).astype(float)
    # Of assignments that keep as many workers, the one with the most rows; all rows weigh less than one worker.
    goal = -keeps - 0.5 * brings / max(brings.max() * workers, 1e-300)
    result = milp(
        goal.ravel(),
        constraints=[LinearConstraint(covers, lb=1 - 1e-9), LinearConstraint(once, ub=1)],
        integrality=np.ones(goal.size),
        bounds=(0, 1),
        options={"time_limit": SECONDS, "mip_rel_gap": 0.2 / workers},
    )
    return None if result.x is None else np.round(result.x).reshape(masters, workers)
