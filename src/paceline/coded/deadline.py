"""The deadline form: loads, and then an assignment, that probably bring L rows by a given time.

This is problem P1 of Sun et al. (2019) with t given. P[X(t) >= L] has no closed form; here it is computed exactly, by
convolution over the workers, and increased by hill climbing from Theorem 1's loads.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paceline.coded.coded_plan import CodedPlan
from paceline.coded.delay import Array
from paceline.coded.problem import Problem
from paceline.errors import PacelineError, number

UNITS = 1000  # resolution of the search; the probabilities returned are exact
SCALES = np.exp(np.linspace(np.log(0.4), np.log(2.5), 61))
STEPS = (0.8, 0.95, 0.99, 1.01, 1.05, 1.25)
STARTS = (3, 2, 2)  # loads of each kind from which the search starts
MOVES = 10  # the most workers that are moved
PAIRS = 16  # up to this many workers, changes of two loads are tried
IMPOSSIBLE = 1e-12  # probabilities below are rounding errors of a sum that is 1
PORTIONS = (0.03, 0.003)  # portions of L that are moved from one load to another


def success(loads: Array, chance: Array, need: float, units: int | None = None) -> float:
    """P[rows that arrive >= need] if worker n brings loads[n] rows with probability chance[n], otherwise none.

    units: parts of ``need`` to which loads are rounded down, which makes the result a lower bound; None:
    exact, for whole loads.
    """
    if units is None:
        target, parts = int(np.ceil(need)), np.floor(loads)
    else:
        target, parts = units, np.floor(loads * (units / need) + 1e-9)
    below = np.zeros(target)  # P[exactly so many rows], for fewer than the target
    below[0] = 1.0
    for size, p in zip(np.minimum(parts, target).astype(int).tolist(), chance.tolist(), strict=True):
        if size and p:
            moved = p * below[: target - size]
            below *= 1 - p
            below[size:] += moved
    return float(max(1 - below.sum(), 0.0))


def never_done(made: CodedPlan) -> Array:
    """Probability that a master's workers, each drawn with its probability, hold fewer than L rows, shape (M,).

    0 for a dedicated plan; exact for a probabilistic one, with which a product may never finish.
    """
    whole, rows = made.rows_assigned, made.problem.rows
    chances = []
    for m, k in enumerate(made.probability):
        divided = bool(np.any((k > 0) & (k < 1)))
        chances.append(1 - success(whole[m], k, rows[m]) if divided else 0.0)
    return np.array([chance if chance > 1e-12 else 0.0 for chance in chances])


def by_deadline(made: CodedPlan, t: float) -> tuple[CodedPlan, Array]:
    """Plan for a deadline: probable loads by a local search, then moves of workers.

    Sun et al., eq. (2).

    Args:
        made: A dedicated, coded plan to start with. Up to ten workers are moved, each from one master to another, if
            that raises the probability that all masters are done.
        t: The deadline, in milliseconds.

    Returns:
        The plan, and each master's probability to be done by ``t``, shape (M,).

    Raises:
        PacelineError: For a deadline that is not positive or cannot be met, and plans that are uncoded or
            probabilistic.
    """
    number("deadline", t, "a positive number of milliseconds", lambda t: 0 < t < np.inf)
    if not made.coded or not made.dedicated:
        raise PacelineError(
            "a deadline needs a coded plan of dedicated workers; choose uniform, simple, iterated or exact"
        )
    problem = made.problem
    masters = range(problem.shape[0])
    mine = [list(made.workers_of(m)) for m in masters]
    loads = np.zeros(problem.shape)
    chances = np.zeros(len(mine))
    for m in masters:
        loads[m], chances[m] = _best_loads(problem, m, mine[m], t)
    for _ in range(MOVES):
        change = _best_move(problem, mine, chances, t)
        if change is None:
            break
        worker, giver, taker = change
        mine[giver].remove(worker)
        mine[taker].append(worker)
        for m in (giver, taker):
            loads[m], chances[m] = _best_loads(problem, m, sorted(mine[m]), t)
    k = (loads > 0).astype(float)
    assign, t_star = f"{made.assign}, by deadline", np.full(len(mine), t)
    planned = replace(made, assign=assign, probability=k, loads=loads, t_star=t_star)
    everyone = np.arange(problem.shape[1])
    exact = [_done(problem, m, everyone, whole, t, None) for m, whole in enumerate(planned.rows_assigned)]
    for m in masters:
        if exact[m] < IMPOSSIBLE:
            raise PacelineError(
                f"no loads were found that can be done by {t:g} ms for master {problem.masters[m]!r}: its expected "
                f"time is {made.t_star[m]:.6g} ms; give a later deadline or add workers"
            )
    return planned, np.array(exact)


def _done(
    problem: Problem, m: int, workers: NDArray[np.intp], loads: Array, t: float, units: int | None = UNITS
) -> float:
    """P[a master's rows arrive by t] from these loads of its workers; units as for ``success``."""
    left = np.maximum(t - problem.wait[m, workers], 0.0)
    z = np.where(loads > 0, left / np.maximum(loads, 1e-12), 0.0)
    chance = np.where(loads > 0, problem.delay.take((m, workers)).cdf(z), 0.0)
    return success(loads, chance, problem.rows[m], units)


def _scaled(problem: Problem, m: int, workers: list[int], t: float) -> list[tuple[float, Array]]:
    """(probability, loads), the most probable first: the best multiples of Theorem 1's loads for this t, those with
    just enough rows, and equal loads."""
    n = np.array(workers)
    phi = problem.delay.take((m, n)).peak()[0]
    left = np.maximum(t - problem.wait[m, n], 0.0)
    # Also those with just enough rows if all arrive, or all except those of the largest or the smallest load.
    share = np.sort(left / phi)
    sums = share.sum(), share[:-1].sum(), share[1:].sum()
    just = [(1 + 1e-9) * problem.rows[m] / each for each in sums if each > 0]
    # Of the equal loads any j suffice: each is one part of j. (In UNITS, the thirds would be 999 parts.)
    equal = [(j, np.where(left > 0, problem.rows[m] / j * (1 + 1e-9), 0.0)) for j in range(1, len(n) + 1)]
    scaled = [[(UNITS, scale * left / phi) for scale in scales] for scales in (SCALES, just)]
    found = []
    for kind, most in zip([*scaled, equal], STARTS, strict=True):
        each = [(_done(problem, m, n, loads, t, units), loads) for units, loads in kind]
        found += sorted(each, key=lambda one: -one[0])[:most]
    return sorted(found, key=lambda each: -each[0])


def _best_loads(problem: Problem, m: int, workers: list[int], t: float) -> tuple[Array, float]:
    """(loads of shape (N,), probability): by hill climbing from the best multiples of Theorem 1's loads."""
    n = np.array(workers)
    starts = _scaled(problem, m, workers, t)
    climbed = [_climbed(problem, m, n, t, *start) for start in starts]
    best, loads = max(climbed, key=lambda each: each[0])
    whole = np.zeros(problem.shape[1])
    exact = loads * (1 - 2e-9)  # without what makes a start just enough, which would cost a whole row more
    whole[n] = np.minimum(np.ceil(exact), problem.rows[m])  # more than L rows are of no use
    return whole, best


def _climbed(
    problem: Problem, m: int, n: NDArray[np.intp], t: float, best: float, loads: Array
) -> tuple[float, Array]:
    """(probability, loads) after changes of one load, or moves from one to another, until none is an improvement."""
    count = len(n)
    identity = np.eye(count)
    moves: list[tuple[Array, Array]] = [(1 + (step - 1) * row, 0 * row) for row in identity for step in STEPS]
    if count <= PAIRS:  # moves between two loads keep sums that are just enough
        both = [one - other for one in identity for other in identity if one is not other]
        moves += [(np.ones(count), part * problem.rows[m] * each) for each in both for part in PORTIONS]
    improved = best < 1 - 1e-9
    while improved:
        improved = False
        for factor, added in moves:
            trial = np.maximum(loads * factor + added, 0.0)
            value = _done(problem, m, n, trial, t)
            if value > best * (1 + 1e-5) + 1e-12:
                loads, best, improved = trial, value, True
    return best, loads


def _best_move(
    problem: Problem, mine: list[list[int]], chances: Array, t: float
) -> tuple[int, int, int] | None:
    """(worker, from, to the least likely master) with the largest gain in the product, or None."""
    taker = int(np.argmin(chances))
    best, found = float(np.prod(chances)) * (1 + 1e-6), None
    for giver in range(len(mine)):
        if giver == taker or len(mine[giver]) < 2:
            continue
        for worker in mine[giver]:
            gives = _scaled(problem, giver, [n for n in mine[giver] if n != worker], t)[0][0]
            takes = _scaled(problem, taker, [*mine[taker], worker], t)[0][0]
            others = np.prod(np.delete(chances, [giver, taker]))
            if gives * takes * others > best:
                best, found = float(gives * takes * others), (worker, giver, taker)
    return found
