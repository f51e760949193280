"""The data of the decision loop: the cluster, a finished round, and the plan of the next round.

All arrays are float64 of shape (..., n): the last axis is the worker, the leading axes are realizations, so
that a hundred simulated runs are one array. Loads are samples (fractions allowed); shares are portions of the
round's batch and sum to 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.costs import LONGEST, QUICKEST, Array, Cost, Linear
from paceline.errors import PacelineError, short, whole

__all__ = [
    "Array",
    "Cluster",
    "Gradients",
    "Indices",
    "Machines",
    "PiecePlan",
    "PieceTimes",
    "Plan",
    "Round",
    "RoundResult",
    "measurable",
]

Indices = NDArray[np.int64]
"""Positions of samples in a data set, shape (samples,)."""
Vector = NDArray[np.float32] | NDArray[np.float64]
"""All parameters of a model, or a gradient of them, shape (parameters,)."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The size of each worker's machine, for the initial division of WLBS.

    Args:
        cpus: Processors of each machine, shape (n,), positive.
        cores: Its cores, or its processors times their speed, shape (n,), positive.
        memory: Its memory in any unit, the same for all, shape (n,), positive.
    """

    cpus: Array
    cores: Array
    memory: Array


@dataclass(frozen=True, eq=False)
class Cluster:
    """The workers that take part and their limits, fixed for the life of a policy.

    Args:
        workers: Number of workers, n.
        global_batch: B, samples in a full round.
        least: Samples that each worker must take in a full round, a number or shape (n,); default 0. Fractions are
            rounded up.
        most: Samples that each worker may take in a full round, a number or shape (n,); default B. Fractions are
            rounded down.
        machines: Sizes of the machines, for a policy that needs them.
        realizations: Leading shape of every array, () for one run.

    Raises:
        PacelineError: If the limits cannot hold the batch; the message says by how much.
    """

    workers: int
    global_batch: int
    least: Array = None  # type: ignore[assignment]  # an array once made
    most: Array = None  # type: ignore[assignment]
    machines: Machines | None = None
    realizations: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        n, batch = self.workers, self.global_batch
        whole("workers", n)
        whole("global_batch", batch, most=2**53)
        least = np.ceil(self._each("least", 0.0 if self.least is None else self.least))
        most = np.minimum(np.floor(self._each("most", batch if self.most is None else self.most)), batch)
        wrong = ~((least >= 0) & (least <= most))  # NaN is wrong, too
        if wrong.any():
            worker = int(np.argmax(wrong))
            raise PacelineError(
                f"limits of worker {worker}: least {least[worker]:g}, most {most[worker]:g} samples; "
                f"expected 0 <= least <= most, and least at most the global batch of {batch}"
            )
        if least.sum() > batch:
            raise PacelineError(
                f"the workers' least loads sum to {least.sum():g}, {least.sum() - batch:g} more than the "
                f"global batch of {batch}; lower the least loads or raise the batch"
            )
        if most.sum() < batch:
            raise PacelineError(
                f"the workers' most loads sum to {most.sum():g}, {batch - most.sum():g} short of the global "
                f"batch of {batch}; raise the limits or lower the batch"
            )
        object.__setattr__(self, "least", least)
        object.__setattr__(self, "most", most)

    def _each(self, name: str, given: object) -> Array:
        """A limit of each worker, (n,). Raises PacelineError for limits of another shape."""
        try:
            return np.broadcast_to(np.asarray(given, float), (self.workers,))
        except (TypeError, ValueError) as error:
            raise PacelineError(
                f"{name}={short(given)}: expected one number, or one for each of the {self.workers} workers"
            ) from error

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of every array of this cluster: (*realizations, n)."""
        return (*self.realizations, self.workers)

    @cached_property
    def least_shares(self) -> Array:
        """The least loads as shares of B, shape (n,)."""
        return self.least / self.global_batch

    @cached_property
    def most_shares(self) -> Array:
        """The most loads as shares of B, shape (n,)."""
        return self.most / self.global_batch

    @cached_property
    def limited(self) -> bool:
        """Whether any worker has its own limit."""
        return bool(self.least_shares.any() or (self.most_shares < 1).any())


@dataclass(frozen=True, slots=True)
class Round:
    """What happened in one round.

    Args:
        shares: Portion of the round's batch that each worker really ran, shape (..., n).
        seconds: Time each took, without its wait for others, shape (..., n); NaN if a worker reported nothing.
        batch: Samples in this round; the last round of an epoch may be short. If samples cost differently, all loads
            are costs in mean samples of the data set instead, and this is the round's cost, a fraction.
        overhead: The part of seconds that does not grow with the load, shape (..., n); zeros if unknown.
        present: Which workers took part, bool, shape (..., n); by default those whose seconds are not NaN.
        costs: This round's seconds as a function of load, if the engine knows more than a line through (shares *
            batch, seconds) with the given overhead.
        upcoming: The next round's costs. Only a clairvoyant policy reads it (``needs_upcoming``).
        cpu: Portion of its machine's processors that each worker can have in the NEXT round, 0 to 1, shape (..., n);
            for forecasts that use it, if the engine measures it.
        memory: The same of its memory.
        pieces: How its pieces went, if the round ran in pieces.
        gradients: What is known of the gradients, if the engine does not wait for all of them.

    Raises:
        PacelineError: If seconds or overhead are not arrays of numbers.
    """

    shares: Array
    seconds: Array
    batch: float
    overhead: Array = None  # type: ignore[assignment]  # an array once made
    present: NDArray[np.bool_] = None  # type: ignore[assignment]
    costs: Cost | None = None
    upcoming: Cost | None = None
    cpu: Array | None = None
    memory: Array | None = None
    pieces: PieceTimes | None = None
    gradients: Gradients | None = None

    def __post_init__(self) -> None:
        try:  # no check before it: a balancer makes one each round
            object.__setattr__(self, "seconds", measurable(self.seconds))
            known = np.zeros_like(self.seconds) if self.overhead is None else measurable(self.overhead)
        except (TypeError, ValueError):
            given = f"seconds={short(self.seconds)}, overhead={short(self.overhead)}"
            raise PacelineError(f"{given}: expected arrays of numbers of shape (..., n)") from None
        object.__setattr__(self, "overhead", known)
        if self.present is None:
            object.__setattr__(self, "present", ~np.isnan(self.seconds))

    @property
    def loads(self) -> Array:
        """Samples each worker ran, shape (..., n)."""
        return self.shares * self.batch

    @property
    def fresh(self) -> NDArray[np.bool_]:
        """Whose seconds are of this round, (..., n): not NaN, and not reported once before (``Gradients.late``)."""
        reported = np.isfinite(self.seconds)
        return reported if self.gradients is None else reported & ~self.gradients.late


def measurable(seconds: Array) -> Array:
    """Cut seconds to a range whose squares and reciprocals are finite.

    Args:
        seconds: Seconds of any shape.

    Returns:
        The same shape; 0 and NaN stay as they are.
    """
    within = np.minimum(np.maximum(seconds, QUICKEST), LONGEST)
    return np.where(seconds > 0, within, seconds)


class Gradients(NamedTuple):
    """What an engine that does not wait for all gradients knows of a round's gradients.

    Attributes:
        noise_scale: Samples whose mean gradient's variance is the gradient's squared norm; NaN if unknown.
        late: Workers of which nothing came since the last round: their seconds and load are those of an earlier
            one, (..., n).
    """

    noise_scale: float
    late: NDArray[np.bool_]


class PieceTimes(NamedTuple):
    """How a round in pieces went; each of shape (..., n), NaN if a worker reported nothing.

    Attributes:
        cost: Seconds that a piece costs beyond its samples.
        expected: Seconds that a worker's claims would have taken at the pace of its first piece.
        strayed: The difference between the real seconds of these claims and ``expected``.
        pace: Seconds per sample after its first piece, NaN if it ran nothing then; None if no worker reports it.
    """

    cost: Array
    expected: Array
    strayed: Array
    pace: Array | None = None


class PiecePlan(NamedTuple):
    """How a round runs in pieces: a portion of each share first, the rest claimed while the round runs.

    Attributes:
        at_once: Portion of every share that runs at once, shape (...,); 1 leaves nothing to claim.
        claim_before_known: What a worker claims, as a part of what it still has to do if all are to end together; 1
            for its part of all that is left (guided self-scheduling), 0 for pieces of the least size. Shape (...,).
        claim_after_known: The same once every worker has reported its speed in this round, shape (...,).
        least: Samples of the smallest piece, and of the one that each worker keeps for its end, shape (..., n).
        speeds: Samples per second to expect, shape (..., n); zeros while nothing is known.
    """

    at_once: Array
    claim_before_known: Array
    claim_after_known: Array
    least: Array
    speeds: Array


@dataclass(frozen=True, slots=True)
class Plan:
    """The plan of the next round.

    Attributes:
        shares: Portion of the next batch for each worker, shape (..., n), non-negative, sum 1, within the limits.
        quorum: How many gradients to wait for, in engines that measure the noise scale; None waits for all.
        costs: What the policy expects each load to cost; if given, shares are rounded to whole samples by it.
        piece_plan: How to run the round in pieces, for engines that can; None runs the shares as they are.
    """

    shares: Array
    quorum: int | None = None
    costs: Cost | None = None
    piece_plan: PiecePlan | None = None

    def by_shares(self) -> Linear:
        """Costs for which these shares are the division that ends soonest.

        Returns:
            Lines without overhead, seconds_i(b) = b / share_i.
        """
        with np.errstate(divide="ignore"):
            return Linear(1.0 / self.shares, np.zeros_like(self.shares))

    def among(self, present: NDArray[np.bool_]) -> Plan:
        """The plan of one run without its absent workers.

        Args:
            present: Which workers take part, booleans of shape (n,).

        Returns:
            A plan in which the shares of the others stay in proportion.
        """
        kept = np.where(present, self.shares, 0.0)
        if not kept.any():
            return Plan(present / present.sum())  # the plan has nothing for any of them: equal parts
        costs = self.costs
        if isinstance(costs, Linear):
            slope = np.where(present, costs.seconds_per_sample, np.inf)
            # If all workers present were absent when the plan was made, it has no costs for them: use the shares.
            costs = Linear(slope, costs.overhead) if np.isfinite(slope).any() else None
        return Plan(kept / kept.sum(), costs=costs)


class PieceRecord(NamedTuple):
    """How a round ran in pieces, under the names of a run's record; lists have one entry for each worker.

    at_once: portion of the plan that ran before the first claim. piece_cost: seconds of a piece beyond its
    samples, mean over the workers. pieces, piece_seconds: samples and seconds of each worker's pieces.
    """

    at_once: float
    piece_cost: float
    pieces: list[list[int]]
    piece_seconds: list[list[float]]


@dataclass(kw_only=True, eq=False)
class RoundResult:
    """One finished round, as passed to callbacks; the same on every rank.

    Arrays have the shape (n,), with NaN for a worker that was absent or reported nothing.

    Attributes:
        step: The round's number over the whole run, from 0.
        epoch: The epoch's number, from 0.
        batch: Samples of all workers.
        loads: Samples of each worker.
        compute: Seconds of each worker, without its wait for others.
        overhead: The part of ``compute`` that does not grow with the load, as fitted.
        seconds: Wall seconds from the sum of gradients before it to its own, without what the loop did between the
            rounds; at least the slowest worker's.
        loss: Mean over the round's samples, or what was counted; NaN if none was reported.
        shares: The plan made from this round.
        within: Its pieces, if work may move within the round.
        learning_rate: Of the optimizer's first group; NaN if ``pace.step`` did not step it.
        costs: Cost of each worker's part in mean samples, if the loader was given costs.
        parts: Lengths, squared lengths and micro-batches that make up the costs, shape (n, 3).
        ran_out: Passes of each worker that did not fit into its memory since the last report.
        links: Seconds of a message over each worker's link, in the round before which it was measured.
        dropped_loads: Samples of each worker that were planned and not run, if late samples are dropped.
        ended: When its gradients were summed, in seconds of this rank's ``time.perf_counter`` or of the engine's
            clock.
    """

    step: int
    epoch: int = 0
    batch: int
    loads: NDArray[Any]
    compute: Array
    overhead: Array
    seconds: float
    loss: float = math.nan
    shares: Array
    within: PieceRecord | None = None
    learning_rate: float = math.nan
    costs: Array | None = None
    parts: Array | None = None
    ran_out: Array | None = None
    links: Array | None = None
    dropped_loads: Array | None = None
    ended: float = math.nan
