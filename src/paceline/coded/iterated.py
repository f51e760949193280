"""Algorithm 1 of Sun et al. (2019): iterated greedy assignment of dedicated workers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paceline.coded.assign import dedicated
from paceline.coded.delay import Array
from paceline.errors import PacelineError

Owners = NDArray[np.intp]


def iterated(
    values: Array, rule: str = "tie-safe", rounds: int = 60, patience: int | None = None, seed: int = 0
) -> Array:
    """Local search by insertion and interchange, explored ``rounds`` times or until ``patience`` bring
    nothing.

    patience: None for 30, and fewer beyond 100 workers, where a round is long and already close to the
        optimum.

    rule: "printed" accepts an insertion where the smallest sum of all rises, as in the listing: with two
        masters tied at the smallest sum it never does, and masters may stay without workers. "tie-safe"
        compares the two masters concerned with the smaller one's sum before, which raises the sums
        lexicographically.
    The best assignment seen is returned; the listing's last may be worse, for exploration may lose.
    """
    if rule not in ("printed", "tie-safe"):
        raise PacelineError(f"rule={rule!r}: expected 'printed' or 'tie-safe'")
    rng = np.random.default_rng(seed)
    masters, workers = values.shape
    favourite = np.argmax(values, axis=0)
    owner = favourite.copy()
    if patience is None:
        patience = min(30, max(3, 3000 // workers))
    best, best_level, since = owner, -np.inf, 0
    for _ in range(rounds):
        _local_optimum(values, owner, printed=rule == "printed")
        level = _sums(values, owner).min()
        if level > best_level * (1 + 1e-9) or best_level < 0:
            best, best_level, since = owner.copy(), level, 0
        else:
            since += 1
        if masters == 1 or since >= patience:
            break
        removed = rng.choice(workers, max(1, workers // masters), replace=False)
        owner[removed] = favourite[removed]  # what reinsertion by the largest v comes to
    return dedicated(best, masters)


def _sums(values: Array, owner: Owners) -> Array:
    brought: Array = values[owner, np.arange(len(owner))]
    return np.bincount(owner, brought, minlength=len(values)).astype(float)


def _local_optimum(values: Array, owner: Owners, printed: bool) -> None:
    """Insertions until none is left, then interchanges, until neither finds anything; changes ``owner``."""
    sums = _sums(values, owner)
    while True:
        while _insert(values, owner, sums, printed):
            pass
        if not _interchange(values, owner, sums):
            return


def _insert(values: Array, owner: Owners, sums: Array, printed: bool) -> bool:
    """Lines 7-14: offer each worker to the poorest other master."""
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


def _interchange(values: Array, owner: Owners, sums: Array) -> bool:
    """Lines 16-22: swap two workers where the total rises and both masters stay above the smallest sum."""
    moved = False
    workers = len(owner)
    everyone = np.arange(workers)
    own = values[owner, everyone]  # what each worker brings now
    for first in range(workers):
        start = first + 1
        while start < workers:
            rest = slice(start, workers)
            m1, m2 = owner[first], owner[rest]
            to_first = values[m1, rest]  # v of m1 for the other worker
            to_second = values[m2, first]  # v of m2 for this worker
            better = (m1 != m2) & (own[first] + own[rest] < to_first + to_second)
            lowest = sums.min()
            better &= (sums[m1] - own[first] + to_first > lowest) & (
                sums[m2] - own[rest] + to_second > lowest
            )
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
