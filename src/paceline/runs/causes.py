"""Why workers waited: because samples differ in cost, because workers differ in speed, or for neither reason.

A round's record may hold the sums over each worker's samples (``parts``: lengths, squared lengths, micro-batches).
The seconds are then regressed on these, with an overhead and a speed for each worker and one cost model for all
(``paceline.samples.learner``). Three causes can be removed from the fitted rounds: the different costs of a round's
samples, the different speeds of workers, and the residual of the fit, the scatter. How much a cause adds to the
waiting depends on the causes that are present already, so the mean over all orders counts (Shapley value).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any, NamedTuple

import numpy as np

from paceline.costs import Array
from paceline.runs.run import Run, waits
from paceline.runs.words import listing, percent
from paceline.samples import learner

ENOUGH = 8  # the fewest rounds with all workers present
VARIED = 0.02  # least relative deviation of the cost of a sample, over rounds and workers
NAMED = 0.05  # least portion of the waiting for a cause to be named


class Causes(NamedTuple):
    """The portions of the workers' waiting by cause, which sum to 1.

    data: due to the different costs of samples. speeds: due to slow workers, of which ``slowest`` are those most
    waited for. scatter: the rest. alpha: a sample of length L costs in proportion to L + alpha L^2; infinite if to
    L^2 alone.
    """

    data: float
    speeds: float
    scatter: float
    slowest: list[int]
    alpha: float


def causes(run: Run) -> Causes | None:
    """What the waiting of a run is due to; None if its record does not show it.

    It does not if no ``parts`` were recorded, rounds are few, all samples cost the same, or no worker waited.
    """
    parts = _parts(run.extras.get("parts"), run.workers)
    if parts is None:
        return None
    there = np.isfinite(parts).all((1, 2)) & (parts[:, :, 0] > 0).all(1)
    whole = there & (np.nan_to_num(run.compute) > 0).all(1)
    parts, seconds, loads = parts[whole], run.compute[whole], run.loads[whole]
    waited = float(waits(run.seconds[whole], seconds).sum())
    if len(parts) < ENOUGH or waited <= 0:
        return None
    scale = np.append(parts[:, :, :2].sum((0, 1)) / loads.sum(), 1.0)  # a mean sample costs 1
    scaled = parts / scale
    apart = scaled[:, :, 0] / loads
    if apart.std() < VARIED * apart.mean():
        return None
    belief = learner.start_fit(run.workers)
    for each, took in zip(scaled, seconds, strict=True):
        belief = learner.update_fit(belief, each, took, memory=1.0)
    costs = scaled @ np.array([1 - belief.part, belief.part, belief.launch])
    # The same numbers of samples and micro-batches, but all samples of a round cost the same.
    lengths = scaled @ np.array([1 - belief.part, belief.part, 0.0])
    alike = loads * (lengths.sum(1) / loads.sum(1))[:, None] + belief.launch * scaled[:, :, 2]
    lines = (belief.overhead, belief.pace), (belief.overhead.mean(), belief.pace.mean())
    noise = seconds / (belief.overhead + belief.pace * costs)

    def waiting(data: int, speeds: int, scatter: int) -> float:
        overhead, pace = lines[0] if speeds else lines[1]
        played = (overhead + pace * (costs if data else alike)) * (noise if scatter else 1.0)
        return float((played.max(1, keepdims=True) - played).sum())

    portions = np.maximum(_shapley(waiting), 0.0)
    if portions.sum() <= 0:
        return None
    data, speeds, scatter = (portions / portions.sum()).tolist()
    even = belief.overhead + belief.pace * alike
    whom = np.bincount(even.argmax(1), waits(even.max(1), even).sum(1), minlength=run.workers)
    slowest = np.flatnonzero(whom > 0.25 * whom.sum()).tolist() if whom.sum() > 0 else []
    part = float(belief.part)
    alpha = part / (1 - part) * float(scale[0] / scale[1]) if part < 1 else np.inf
    return Causes(data, speeds, scatter, slowest, alpha)


def _shapley(waiting: Callable[[int, int, int], float]) -> Array:
    """What each of three causes adds to the waiting, as the mean over all orders of adding them."""
    added = np.zeros(3)
    for order in permutations(range(3)):
        there = [0, 0, 0]
        before = waiting(*there)
        for cause in order:
            there[cause] = 1
            after = waiting(*there)
            added[cause] += (after - before) / 6
            before = after
    return added


def sentence(found: Causes, called: str = "worker") -> str:
    """A sentence on what the waiting is due to, the largest cause first; called: the word for a worker."""
    few = found.slowest and len(found.slowest) <= 2
    named = f"{called if len(found.slowest) == 1 else called + 's'} {listing(found.slowest)}" if few else ""
    whose = f"the speed of {named}" if few else f"the {called}s' speeds and loads"
    portions = [(found.data, "your samples' lengths"), (found.speeds, whose)]
    named_causes = [each for each in sorted(portions, key=lambda each: -each[0]) if each[0] >= NAMED]
    if not named_causes:
        return f"The waiting is not due to your samples' lengths or to any {called}'s speed: it is random variation."
    first, *others = named_causes
    clauses = [f"{percent(first[0])} of the waiting is due to {first[1]}"]
    clauses += [f"{percent(part)} to {cause}" for part, cause in others]
    if found.scatter >= NAMED:
        clauses.append("the rest is random variation")
    return f"{listing(clauses)}."


def _parts(recorded: list[Any] | None, workers: int) -> Array | None:
    """Shape (T, n, 3), NaN if a round or a worker has none; None if nothing was recorded."""
    if recorded is None:
        return None
    parts = np.full((len(recorded), workers, 3), np.nan)
    for row, each in zip(parts, recorded, strict=True):
        for worker, sums in enumerate(each or []):
            if sums is not None:
                row[worker] = [np.nan if number is None else number for number in sums]
    return parts
