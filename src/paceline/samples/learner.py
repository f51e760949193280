"""The cost model that a job learns from its rounds.

The first round runs with costs as they were given. If batches are padded, the next two are cut into more and more
micro-batches, so that the cost of a launch can be measured; from then on the learned model is used.

    seconds = a_i + p_i * cost,   cost = (1 - w) linear + w quadratic + launch * launches

with one w and one launch for the job, and an overhead a_i and a pace p_i for each worker; all are non-negative, w
is at most 1. ``linear`` and ``quadratic`` are the sums of lengths and of their squares (padded, if they are),
each divided by the data set's mean, so that the mean sample costs 1 whatever w is.

The rounds are kept as one small matrix of weighted sums for each worker, in which older rounds fade; for given w and
launch the best a_i and p_i follow from it in closed form, and Gauss-Newton steps on the remaining errors find w and
launch (variable projection: Golub and Pereyra, 1973; Kaufman's step). All errors are relative to the seconds, so that
slow workers weigh no more than quick ones. A round that does not fit at all has little weight; two in a row on one
worker are a change of its speed, and its sums begin again.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np

from paceline.costs import Array
from paceline.errors import PacelineError, short, switches, whole
from paceline.forecast.portable_math import log
from paceline.samples.cost import CostModel, SampleCosts, cost_of

__all__ = ["CostLearner"]

REMEMBERED = 32  # the first rounds of a job, in which the estimated costs may change much
CHANGED = 0.01  # relative change of a worker's cost after which a policy should see the rounds again

# The assumed cost of a launch in the first padded rounds, as a part of a worker's mean cost.
TRIALS = None, 1 / 8, 1 / 64
# Rounds before a launch may cost less than was tried: dozens of micro-batches would gain nothing.
SURE = 8
MEMORY = 0.98  # factor on the sums, each round
SCATTER = 0.03  # relative scatter of the seconds before it is known
LEAST_SCATTER = 0.003
OUTLIER = 4.0  # standard deviations beyond which a round has little weight,
LEAST_OUTLIER = 0.15  # and the relative error below which it has its full weight
STRIKES = 2  # consecutive rounds that do not fit: the worker's speed has changed
PART_SD = 1.0  # prior standard deviation of the quadratic part around 0
LAUNCH_SD = 10.0  # prior standard deviation of a launch, in mean samples
STEPS = 4  # Gauss-Newton steps in each round, at most
ENOUGH = 1e-5  # a step that changes both by less is the last: the next round goes on from there
LINEAR, QUADRATIC, LAUNCHES, OVERHEAD, SECONDS = range(5)


class CostFit(NamedTuple):
    """The estimates; n workers.

    sums: products of (linear, quadratic, launches, 1, seconds), each divided by the seconds, (n, 5, 5).
    part: w. launch: of a micro-batch, in mean samples. overhead, pace: a_i, p_i, (n,), NaN before a worker's first
    round. scatter: relative variance of the seconds. strikes: rounds in a row that did not fit, (n,).
    """

    sums: Array
    part: float
    launch: float
    overhead: Array
    pace: Array
    scatter: float
    strikes: Array


def start_fit(workers: int) -> CostFit:
    """The estimates before any round: costs are as given, and a launch costs nothing."""
    sums, unknown = np.zeros((workers, 5, 5)), np.full(workers, np.nan)
    return CostFit(sums, 0.0, 0.0, unknown, unknown, SCATTER**2, np.zeros(workers))


def update_fit(fit: CostFit, parts: Array, seconds: Array, *, memory: float = MEMORY) -> CostFit:
    """The estimates after one more round.

    parts: linear and quadratic parts in mean samples, and launches, (n, 3). seconds: (n,), NaN if absent; a
    worker without samples changes nothing. memory: factor on the sums before; 1 forgets nothing.
    """
    here = np.isfinite(seconds) & (seconds > 0) & (parts[:, LINEAR] > 0)
    if not here.any():
        return fit
    rows = np.zeros((len(seconds), 5))
    rows[here, :3] = parts[here] / seconds[here, None]
    rows[here, OVERHEAD], rows[here, SECONDS] = 1.0 / seconds[here], 1.0

    known = here & ~np.isnan(fit.pace)
    costs = _with_costs(parts, fit.part, fit.launch)
    expected = np.where(known, fit.overhead + fit.pace * costs, np.where(here, seconds, 1.0))
    off = np.where(known, log(np.where(here, seconds, 1.0) / np.maximum(expected, 1e-300)), 0.0)
    limit = max(OUTLIER * float(np.sqrt(fit.scatter)), LEAST_OUTLIER)
    far = np.abs(off) > limit
    strikes = np.where(here, np.where(far, fit.strikes + 1, 0.0), fit.strikes)
    changed = strikes >= STRIKES
    weight = np.where(far & ~changed, (limit / np.maximum(np.abs(off), limit)) ** 2, 1.0)
    sums = np.where(here, memory, 1.0)[:, None, None] * fit.sums
    sums = np.where(changed[:, None, None], 0.0, sums)
    sums += (weight * here)[:, None, None] * rows[:, :, None] * rows[:, None, :]
    strikes = np.where(changed, 0.0, strikes)

    fits = known & ~far
    scatter = fit.scatter
    if fits.any():
        mean = float((off[fits] ** 2).mean())
        scatter = max(scatter + (1 - min(memory, MEMORY)) * 2 * (mean - scatter), LEAST_SCATTER**2)

    part, launch = fit.part, fit.launch
    for _ in range(STEPS):
        before = part, launch
        part, launch = _step(sums, part, launch, scatter)
        if abs(part - before[0]) + abs(launch - before[1]) < ENOUGH:
            break
    seen = sums[:, SECONDS, SECONDS] > 0
    overhead, pace = (np.where(seen, each, np.nan) for each in lines(sums, part, launch))
    return CostFit(sums, part, launch, overhead, pace, scatter, strikes)


def lines(sums: Array, part: float, launch: float) -> tuple[Array, Array]:
    """The best overhead and pace of each worker, (n,), neither negative, for this w and launch."""
    grown = _with_costs(sums, part, launch)
    cc, co, cy = _with_costs(grown, part, launch), grown[..., OVERHEAD], grown[..., SECONDS]
    return _lines(cc, co, cy, sums[:, OVERHEAD, OVERHEAD], sums[:, OVERHEAD, SECONDS])


def _lines(cc: Array, co: Array, cy: Array, oo: Array, oy: Array) -> tuple[Array, Array]:
    """``lines`` from the sums of products, (n,): c is the cost, o the overhead, y the seconds."""
    determinant = cc * oo - co**2
    # One round, or rounds that are all alike, cannot separate overhead from pace: then all is pace.
    both = determinant > 1e-9 * cc * oo
    safe = np.where(both, determinant, 1.0)
    overhead = np.where(both, (cc * oy - co * cy) / safe, 0.0)
    pace = np.where(both, (oo * cy - co * oy) / safe, 0.0)
    alone = cy / np.where(cc > 0, cc, 1.0)
    pace = np.where((overhead <= 0) | ~both, alone, pace)
    overhead = np.where((overhead <= 0) | ~both, 0.0, overhead)
    negative = pace <= 0
    overhead = np.where(negative, oy / np.where(oo > 0, oo, 1.0), overhead)
    return overhead, np.where(negative, 0.0, pace)


def _with_costs(sums: Array, part: float, launch: float) -> Array:
    """The sums of products with the cost, (..., ) from (..., 5) or more. Not a product of matrices, which would have
    other bits on other machines."""
    return sums[..., LINEAR] * (1 - part) + sums[..., QUADRATIC] * part + sums[..., LAUNCHES] * launch


def _step(sums: Array, part: float, launch: float, scatter: float) -> tuple[float, float]:
    """One Gauss-Newton step for w and launch."""
    grown = _with_costs(sums, part, launch)  # (n, 5)
    cc, co, oo = _with_costs(grown, part, launch), grown[:, OVERHEAD], sums[:, OVERHEAD, OVERHEAD]
    overhead, pace = _lines(cc, co, grown[:, SECONDS], oo, sums[:, OVERHEAD, SECONDS])
    # How products grow with w, and with the launch: those with the others (n, 5), and with the cost, (n,).
    by_part, by_launch = sums[:, QUADRATIC] - sums[:, LINEAR], sums[:, LAUNCHES]
    own = grown[:, QUADRATIC] - grown[:, LINEAR], grown[:, LAUNCHES]
    full = (
        by_part[:, QUADRATIC] - by_part[:, LINEAR],
        by_part[:, LAUNCHES],
        by_launch[:, LAUNCHES],
    )
    # The effects that a change of the worker's own overhead and pace could also have are projected out.
    free = overhead > 0
    tiny = 1e-12 * (np.where(free, oo, 0.0) + cc) + 1e-300
    first = np.where(free, oo, 0.0) + tiny
    lever = np.where(free, co, 0.0) / first
    second = np.maximum(cc + tiny - lever * np.where(free, co, 0.0), tiny)
    above = [np.where(free, each[:, OVERHEAD], 0.0) for each in (by_part, by_launch)]
    below = [mine - lever * over for mine, over in zip(own, above, strict=True)]
    square = pace**2

    def curved(left: Array, a: int, b: int) -> float:
        projected = above[a] * above[b] / first + below[a] * below[b] / second
        return float((square * (left - projected)).sum())

    slope = [
        float((pace * (each[:, SECONDS] - overhead * each[:, OVERHEAD] - pace * mine)).sum())
        for each, mine in zip((by_part, by_launch), own, strict=True)
    ]
    prior = scatter / PART_SD**2, scatter / LAUNCH_SD**2
    curvature = curved(full[0], 0, 0) + prior[0], curved(full[1], 0, 1), curved(full[2], 1, 1) + prior[1]
    return _within(part, launch, slope[0] - prior[0] * part, slope[1] - prior[1] * launch, curvature)


def _within(
    part: float, launch: float, to_part: float, to_launch: float, curvature: tuple[float, float, float]
) -> tuple[float, float]:
    """The point with 0 <= w <= 1 and 0 <= launch at which the slope is 0, or as near as these limits let it be.

    to_part, to_launch: the slope now. curvature: of w, of both, and of the launch."""
    pp, pl, ll = curvature
    lever = pl / pp
    further = (to_launch - lever * to_part) / (ll - lever * pl)
    wanted, more = part + to_part / pp - lever * further, launch + further
    held, kept = min(max(wanted, 0.0), 1.0), max(more, 0.0)
    if held != wanted:  # the launch moves on alone, with w at its limit
        alone = launch + (to_launch - pl * (held - part)) / ll if more == kept else 0.0
        return held, max(alone, 0.0)
    if kept != more:
        alone = part + (to_part - pl * (kept - launch)) / pp
        return min(max(alone, 0.0), 1.0), kept
    return wanted, more


class Seen(NamedTuple):
    """The figures of each worker in a round that was taken in."""

    parts: Array  # (n, 3)
    seconds: Array  # (n,), NaN if absent
    known: Array  # measured overhead in seconds, (n,)


class CostLearner:
    """Learns the cost model of one job from its rounds; the same on every rank that takes in the same rounds.

    Args:
        costs: Of the data set.
        workers: n.
        batch: Samples of a full round.
        padded: As of ``CostModel``.
    """

    def __init__(self, costs: SampleCosts, workers: int, batch: int, *, padded: bool = False) -> None:
        if not isinstance(costs, SampleCosts):
            raise PacelineError(f"costs={short(costs)}: expected a paceline.samples.SampleCosts")
        whole("workers", workers)
        whole("batch", batch)
        switches(padded=padded)
        self.costs, self.padded = costs, padded
        self._workers, self._batch = workers, batch
        self.restart()

    def restart(self) -> None:
        """Begin again with nothing known."""
        self.fit, self.rounds = start_fit(self._workers), 0
        self.seen: list[Seen] = []  # the first rounds of the job
        self._shown = (0.0, 0.0)  # part and launch of the model with which a policy saw them

    @property
    def settled(self) -> bool:
        """Whether the mean of several rounds teaches as much as each of them."""
        return self.rounds > REMEMBERED

    def model(self) -> CostModel:
        """The model by which to deal the next round.

        Returns:
            The fitted model; in the first rounds of padded samples, one that tries a cost of a launch.
        """
        launch: float | None = self.fit.launch
        if self.padded and self.rounds < SURE:
            part = TRIALS[min(self.rounds, len(TRIALS) - 1)]
            tried = None if part is None else part * self._batch / self._workers
            launch = tried if tried is None or self.rounds < len(TRIALS) else max(self.fit.launch, tried)
        return self.costs.model(self.fit.part, launch, self.padded)

    def take(self, parts: Array, seconds: Array, known: Array | float = 0.0) -> bool:
        """Take in a round.

        Args:
            parts: Sums over each worker's parts, shape (n, 3), see ``Deal.parts``.
            seconds: Of each worker, shape (n,); NaN if absent.
            known: The part of the seconds that was measured to be overhead.

        Returns:
            Whether the costs of earlier rounds have changed so much that a policy should see these rounds again
            (``seen``).
        """
        scaled = parts / np.array([self.costs.mean, self.costs.mean_square, 1.0])
        before = self.fit
        self.fit = update_fit(before, scaled, seconds - known)
        self.rounds += self.fit is not before
        if self.settled:
            self.seen = []
            return False
        earlier = [each.parts for each in self.seen]
        self.seen = [*self.seen, Seen(parts, seconds, np.zeros(self._workers) + known)]
        now = self.fit.part, self.fit.launch
        models = self.costs.model(*now), self.costs.model(*self._shown)
        # A worker that ran nothing costs nothing in both models: NaN.
        with np.errstate(divide="ignore", invalid="ignore"):
            apart = [np.abs(log(np.divide(*(cost_of(by, each) for by in models)))) for each in earlier]
        if not np.any(np.array(apart) > CHANGED):
            return False
        self._shown = now
        return True

    def cost(self, parts: Array) -> Array:
        """The cost of each worker's parts by the present model.

        Args:
            parts: Sums over each worker's parts, shape (n, 3), see ``Deal.parts``.

        Returns:
            Costs in mean samples, shape (n,).
        """
        return cost_of(self.costs.model(self.fit.part, self.fit.launch), parts)

    def state_dict(self, models: dict[int, CostModel]) -> dict[str, Any]:
        """The state, for a checkpoint.

        Args:
            models: The models by the first round that each holds for.

        Returns:
            Plain lists and numbers, which ``stored`` reads.
        """
        return {
            "rounds": self.rounds,
            "fit": [np.asarray(leaf).tolist() for leaf in self.fit],
            "told": list(self._shown),
            "seen": [[part.tolist() for part in each] for each in self.seen],
            "models": {step: list(astuple(model)) for step, model in models.items()},
        }

    def stored(self, state: Any, step: int) -> tuple[CostLearner, dict[int, CostModel]]:
        """Continue from a stored state.

        Args:
            state: The result of ``state_dict``.
            step: The round to continue from.

        Returns:
            A learner, and its models by the first round of each; one of them holds for round ``step``.

        Raises:
            PacelineError: If the state is not from ``state_dict``.
        """
        made, n = CostLearner(self.costs, self._workers, self._batch, padded=self.padded), self._workers
        try:
            fit = [np.array(leaf, dtype=float) for leaf in state["fit"][: len(CostFit._fields)]]
            made.fit = CostFit(*(leaf if leaf.ndim else float(leaf) for leaf in fit))  # type: ignore[arg-type]
            made.rounds = int(state["rounds"])
            made._shown = (float(state["told"][0]), float(state["told"][1]))
            made.seen = [Seen(*(np.array(part, dtype=float) for part in each)) for each in state["seen"]]
            models = {int(first): CostModel(*model) for first, model in state["models"].items()}
            right = (
                all([part.shape for part in each] == [(n, 3), (n,), (n,)] for each in made.seen)
                and [leaf.shape for leaf in fit] == [np.shape(leaf) for leaf in start_fit(n)]
                and all(np.isfinite(model.linear + model.quadratic) for model in models.values())
            )
        except (AttributeError, KeyError, IndexError, TypeError, ValueError):
            right = False
        if not right:
            raise PacelineError(f"the stored cost model is not one of {n} workers; begin without it")
        if not any(first <= step for first in models):
            raise PacelineError(f"the stored cost models hold none for round {step}; begin without them")
        return made, models
