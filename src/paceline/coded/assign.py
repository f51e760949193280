"""Which worker serves which master: problem P5 of Sun et al. (2019), max over k of min over m of sum_n k v.

Every function takes values v of shape (M, N), the expected portion of master m's rows that worker n computes
in a unit of time (eq. 8), and returns k of shape (M, N): 0 or 1 for dedicated workers, probabilities
for ``probabilistic``. A column sums to at most 1. Ties go to the lowest index.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array
from paceline.errors import PacelineError, choice

Index = NDArray[np.intp]

FEW_PAIRS = 2000  # up to this many pairs, the linear programme is solved over all of them at once
PROMISING = 0.97  # larger programmes begin with pairs of at least this part of a worker's best priced value


def dedicated(owner: Index, masters: int) -> Array:
    """k from the master of each worker, shape (N,) of whole numbers."""
    k = np.zeros((masters, len(owner)))
    k[owner, np.arange(len(owner))] = 1.0
    return k


def uniform(values: Array) -> Array:
    """Equal groups of successive workers, the first with one more if N / M is not whole (Sun et al., benchmark 2)."""
    masters, workers = values.shape
    counts = [len(part) for part in np.array_split(np.arange(workers), masters)]
    return dedicated(np.repeat(np.arange(masters), counts), masters)


def simple(values: Array) -> Array:
    """Best pairs first, then the poorest master picks its best worker (Sun et al., Algorithm 2)."""
    masters, workers = values.shape
    owner = np.full(workers, -1)
    left = values.astype(float).copy()
    sums = np.zeros(masters)
    waiting = left.copy()
    for _ in range(masters):
        m, n = (int(i) for i in np.unravel_index(np.argmax(waiting), waiting.shape))
        owner[n], sums[m] = m, values[m, n]
        waiting[m], waiting[:, n], left[:, n] = -np.inf, -np.inf, -np.inf
    for _ in range(workers - masters):
        m = int(np.argmin(sums))
        n = int(np.argmax(left[m]))
        owner[n] = m
        sums[m] += values[m, n]
        left[:, n] = -np.inf
    return dedicated(owner, masters)


def iterated(values: Array, rule: str = "tie-safe", rounds: int = 60) -> Array:
    """Local search, explored ``rounds`` times or until 30 rounds improve nothing (Sun et al., Alg. 1, lines 1 to 6,
    Alg. 1, lines 23 to 29).

    With more than 100 workers it is fewer than 30, since a round takes long and is already close to the optimum.

    rule: "printed" begins with each worker at its best master and accepts an insertion if the smallest sum of all
        rises, as in the listing: with two masters tied at the smallest sum it never does, and masters may stay
        without workers. "tie-safe" begins with ``simple`` if that is better, compares the two masters concerned
        with the smaller one's sum before, which raises the sums lexicographically, and ends with the poorest
        master's best moves and swaps.
    The best assignment found is returned; the listing returns the last, which exploration may have made worse.
    """
    choice("rule", rule, "printed", "tie-safe")
    rng = np.random.default_rng(0)
    masters, workers = values.shape
    favourite = np.argmax(values, axis=0)
    owner = favourite.copy()
    if rule == "tie-safe":
        begun = np.argmax(simple(values), axis=0)
        owner = max(owner, begun, key=lambda each: float(_sums(values, each).min())).copy()
    patience = min(30, max(3, 3000 // workers))
    best, best_level, since = owner, -np.inf, 0
    for _ in range(rounds):
        sums, improved = _sums(values, owner), True
        while improved:  # insertions until none is left, then interchanges, until neither finds anything
            while _insert(values, owner, sums, printed=rule == "printed"):
                pass
            improved = _interchange(values, owner, sums)
        level = _sums(values, owner).min()
        if level > best_level * (1 + 1e-9) or best_level < 0:
            best, best_level, since = owner.copy(), level, 0
        else:
            since += 1
        if masters == 1 or since >= patience:
            break
        removed = rng.choice(workers, max(1, workers // masters), replace=False)
        owner[removed] = favourite[removed]  # the result of a reinsertion by the largest v
    if rule == "tie-safe":
        _climb(values, best)
    return dedicated(best, masters)


def _sums(values: Array, owner: Index) -> Array:
    return np.bincount(owner, values[owner, np.arange(len(owner))], minlength=len(values)).astype(float)


def _insert(values: Array, owner: Index, sums: Array, printed: bool) -> bool:
    """Offer each worker to the poorest other master (Sun et al., Alg. 1, lines 7 to 15)."""
    moved = False
    for n in range(len(owner)):
        giver = owner[n]
        keep, sums[giver] = sums[giver], np.inf
        taker = int(np.argmin(sums))
        sums[giver] = keep
        if taker == giver:  # one master only
            return False
        gives, takes = keep - values[giver, n], sums[taker] + values[taker, n]
        if printed:
            before = sums.min()
            after = sums.copy()
            after[giver], after[taker] = gives, takes
            accept = after.min() > before
        else:
            accept = min(gives, takes) > sums[taker]
        if accept:
            owner[n], sums[giver], sums[taker] = taker, gives, takes
            moved = True
    return moved


def _interchange(values: Array, owner: Index, sums: Array) -> bool:
    """Swap two if the total rises and both stay above the least sum (Sun et al., Alg. 1, lines 16 to 22)."""
    moved = False
    workers = len(owner)
    everyone = np.arange(workers)
    own = values[owner, everyone]  # the value of each worker for its present master
    for first in range(workers):
        start = first + 1
        while start < workers:
            rest = slice(start, workers)
            m1, m2 = owner[first], owner[rest]
            to_first = values[m1, rest]  # v of m1 for the other worker
            to_second = values[m2, first]  # v of m2 for this worker
            better = (m1 != m2) & (own[first] + own[rest] < to_first + to_second)
            lowest = sums.min()
            better &= sums[m1] - own[first] + to_first > lowest
            better &= sums[m2] - own[rest] + to_second > lowest
            at = int(np.argmax(better))
            if not better[at]:
                break
            second = start + at
            a, b = int(m1), int(owner[second])
            sums[a] += values[a, second] - own[first]
            sums[b] += values[b, first] - own[second]
            owner[first], owner[second] = b, a
            own[first], own[second] = values[b, first], values[a, second]
            moved = True
            start = second + 1
    return moved


def probabilistic(values: Array) -> Array:
    """The exact optimum of P3 with probabilities: the linear relaxation of P5 (at most M - 1 workers are divided)."""
    return _relaxation(values)[0]


def exact(values: Array, gap: float = 1e-4, seconds: float = 60.0) -> Array:
    """An assignment within ``gap`` of P5's optimum (Sun et al., eq. (9), Proposition 1, benchmark 3), by HiGHS; if
    ``seconds`` do not suffice, the best one found.

    A greedy assignment comes first: the relaxation then shows either that it is good enough, or, by the reduced
    costs, which pairs no better assignment can use.
    """

    def level(k: Array) -> float:
        return float((k * values).sum(1).min())

    relaxed, reduced = _relaxation(values)
    best = max(iterated(values), _rounded(values, relaxed), key=level)
    bound, unit = level(relaxed), _unit(values)
    if unit:  # sums are whole multiples of it, so no level lies between two
        bound = unit * np.floor(bound / unit + 1e-6)
    if level(best) < bound * (1 - gap):
        usable = reduced <= bound - level(best)
        found = _integer(values, usable, gap, seconds, level(best), unit)
        if found is not None and level(found) > level(best):
            best = found
    return best


def _unit(values: Array) -> float:
    """A number of which all values are whole multiples, as with speeds 1, 2, 3; 0 if there is none."""
    for parts in range(1, 13):
        unit = float(values.min()) / parts
        multiples = values / unit
        if multiples.max() < 1e4 and np.abs(multiples - np.round(multiples)).max() < 1e-9:
            return unit
    return 0.0


def _scale(values: Array) -> float:
    """The level that brings the solver's V near 1: the poorest master's part of all workers."""
    masters, workers = values.shape
    return float(values.max(1).min()) * workers / masters


def _constraints(values: Array, usable: NDArray[np.bool_], unit: Array) -> tuple[Any, Array]:
    """(matrix, right side): V - sum_n k v <= 0 for each m, sum_m k <= 1 for each n; columns: usable pairs, V.

    unit: what a 1 of a pair's variable means as a portion k, shape (M,); V is in units of ``_scale``.
    """
    from scipy import sparse

    masters, workers = values.shape
    sums = sparse.block_diag(list(-values[:, None] * unit[:, None, None] / _scale(values)))
    once = sparse.hstack([sparse.eye(workers) * each for each in unit])
    pairs = sparse.vstack([sums, once], "csc")[:, np.flatnonzero(usable)]
    at_most = np.repeat([0.0, 1.0], [masters, workers])
    return sparse.hstack([pairs, sparse.csc_matrix(1 - at_most[:, None])], "csr"), at_most


def _relaxation(values: Array) -> tuple[Array, Array]:
    """(k, the decrease of the level for each unit of a pair that k does not use), both of shape (M, N).

    Large problems are solved over the pairs that are promising at prices of the masters' rows; pairs with negative
    reduced costs in the solution are added until there are none, so the optimum is that of all pairs.
    """
    from scipy.optimize import linprog

    masters = len(values)
    # With L of very different sizes a master may need portions far below the solver's tolerance.
    unit = np.minimum(_scale(values) / values.max(1), 1.0)
    usable = np.ones(values.shape, bool) if values.size <= FEW_PAIRS else _promising(values)
    while True:
        matrix, most = _constraints(values, usable, unit)
        goal = np.zeros(matrix.shape[1])
        goal[-1] = -1.0
        result = linprog(goal, matrix, most, bounds=(0, None), method="highs")
        if not result.success:
            raise PacelineError(
                f"the linear programme was not solved ({result.message}); check the delay parameters"
            )
        prices = -result.ineqlin.marginals
        reduced = prices[masters:] - prices[:masters, None] * values / _scale(values)
        if usable.all() or not (missed := (reduced * unit[:, None] < -1e-9) & ~usable).any():
            break
        usable |= missed
    k = np.zeros(values.shape)
    k[usable] = np.maximum(result.x[:-1], 0.0)
    k[k < 1e-12] = 0.0
    k = np.minimum(k * unit[:, None], 1.0)
    k[k > 1 - 1e-12] = 1.0
    return k / np.maximum(k.sum(0), 1.0), reduced * _scale(values)


def _promising(values: Array) -> NDArray[np.bool_]:
    """Pairs within a few per cent of the worker's best, at prices at which the masters' sums are about equal."""
    log_price = -np.log(values.mean(1))  # masters of very different L begin alike
    for turn in range(150):
        priced = np.exp(log_price)[:, None] * values
        owner = np.argmax(priced, axis=0)
        sums = _sums(values, owner)
        log_price -= (sums / sums.mean() - 1) * 0.5 / (1 + turn / 10)
    priced = np.exp(log_price)[:, None] * values
    return priced >= PROMISING * priced.max(0)


def _integer(
    values: Array, usable: NDArray[np.bool_], gap: float, seconds: float, floor: float, unit: float
) -> Array | None:
    """Whole k with a level of at least ``floor`` from usable pairs alone; None if none was found in ``seconds``."""
    from scipy.optimize import LinearConstraint, milp

    matrix, most = _constraints(values, np.ones(values.shape, bool), np.ones(len(values)))
    if unit:
        matrix[:, [-1]] *= unit / _scale(values)  # V is a whole number of units
    goal = np.zeros(values.size + 1)
    goal[-1] = -1.0
    lower = np.zeros(values.size + 1)
    lower[-1] = floor / (unit or _scale(values)) * (1 - 1e-9)
    result = milp(
        goal,
        constraints=LinearConstraint(matrix, ub=most),
        integrality=np.append(np.ones(values.size), 1 if unit else 0),
        bounds=(lower, np.append(usable.ravel().astype(float), np.inf)),
        options={"mip_rel_gap": gap, "time_limit": seconds},
    )
    return None if result.x is None else np.round(result.x[:-1]).reshape(values.shape)


def _rounded(values: Array, relaxed: Array) -> Array:
    """A dedicated assignment near the relaxation: its largest k for each worker, then local search with restarts."""
    rng = np.random.default_rng(0)
    masters, workers = values.shape
    start = np.argmax(relaxed, axis=0)
    trial, best, best_level = start.copy(), start, -np.inf
    for turn in range(60 if masters > 1 and workers <= 500 else 1):
        level = _climb(values, trial)
        if level > best_level:
            best, best_level = trial.copy(), level
        trial = best.copy()
        shaken = rng.choice(workers, max(1, workers // 10), replace=False)
        trial[shaken] = start[shaken] if turn % 2 else rng.integers(masters, size=len(shaken))
    return dedicated(best, masters)


def _climb(values: Array, owner: Index) -> float:
    """Apply the poorest master's best move or swap while one raises its sum; changes ``owner``, returns the level."""
    everyone = np.arange(len(owner))
    while True:
        own = values[owner, everyone]
        sums = _sums(values, owner)
        poorest = int(np.argmin(sums))
        level = float(sums[poorest])
        mine, others = np.flatnonzero(owner == poorest), np.flatnonzero(owner != poorest)
        if not len(others):
            return level
        gain = values[poorest, others]
        left = sums[owner[others]] - own[others]
        moved = np.minimum(level + gain, left)  # the lower of the two sums after the other worker moves
        swapped = np.minimum(  # the same after two workers change places, shape (mine, others)
            level - own[mine][:, None] + gain, left + values[owner[others]][:, mine].T
        )
        after = np.vstack([moved, swapped])
        give, take = np.unravel_index(np.argmax(after), after.shape)
        if after[give, take] <= level * (1 + 1e-12):
            return level
        if give:
            owner[mine[give - 1]] = owner[others[take]]
        owner[others[take]] = poorest
