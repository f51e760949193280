"""Monte Carlo simulation of a plan's completion times, with delays drawn for every product."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from scipy.stats import binomtest

from paceline.coded.coded_plan import CodedPlan
from paceline.coded.delay import Array
from paceline.errors import PacelineError, number, whole

CHUNK = 2_000_000  # arrivals of a master that are drawn at once: 16 MB for each of a few arrays


class Interval(NamedTuple):
    """An estimate with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Completion(NamedTuple):
    """The simulated completion times.

    Attributes:
        times: Milliseconds, shape (runs, M); infinite if a master's workers never delivered enough rows.
    """

    times: Array

    @property
    def system(self) -> Array:
        """The slowest master's time of each run, shape (runs,)."""
        return self.times.max(1)

    def never(self, master: int | None = None) -> float:
        """How often one master, or any of them, never finishes.

        Args:
            master: A position from 0; None for any of them.

        Returns:
            A portion of the runs, 0 to 1.
        """
        return float(np.isinf(self._of(master)).mean())

    def mean(self, master: int | None = None) -> Interval:
        """The mean completion time.

        Args:
            master: A position from 0; None for the slowest of them.

        Returns:
            Milliseconds, with a normal interval of 95 %; infinite if any run never finishes.
        """
        times = self._of(master)
        value = float(times.mean())
        if not np.isfinite(value):
            return Interval(np.inf, np.inf, np.inf)
        half = 1.959964 * float(times.std(ddof=1) / np.sqrt(len(times))) if len(times) > 1 else np.inf
        return Interval(value, value - half, value + half)

    def quantile(self, q: float, master: int | None = None) -> Interval:
        """The time by which a portion q of the runs end.

        Args:
            q: A portion between 0 and 1.
            master: A position from 0; None for the slowest of them.

        Returns:
            Milliseconds, with a distribution-free interval of 95 % (order statistics).

        Raises:
            PacelineError: For a q outside of 0 to 1.
        """
        number("q", q, "a portion between 0 and 1", lambda q: 0 < q < 1)
        times = np.sort(self._of(master))
        count = len(times)
        half = 1.959964 * np.sqrt(count * q * (1 - q))
        ranks = np.array([np.ceil(count * q), np.floor(count * q - half), np.ceil(count * q + half) + 1])
        value, low, high = times[np.clip(ranks, 1, count).astype(int) - 1]
        return Interval(float(value), float(low), float(high))

    def probability(self, t: float, master: int | None = None) -> Interval:
        """P[done by t ms].

        Args:
            t: Milliseconds.
            master: A position from 0; None for the slowest of them.

        Returns:
            A portion of the runs, with the exact (Clopper-Pearson) interval of 95 %.
        """
        times = self._of(master)
        found = binomtest(int((times <= t).sum()), len(times))
        return Interval(found.statistic, *found.proportion_ci(method="exact"))

    def cdf(self, points: int = 200, master: int | None = None) -> tuple[Array, Array]:
        """The distribution function, for a chart.

        Args:
            points: Portions of the runs, evenly spread.
            master: A position from 0; None for the slowest of them.

        Returns:
            t in milliseconds and P[done by t], each of shape (points,) or shorter.
        """
        times = np.sort(self._of(master))
        at = np.unique(np.linspace(0, len(times) - 1, points).astype(int))
        return times[at], (at + 1) / len(times)

    def _of(self, master: int | None) -> Array:
        return self.system if master is None else self.times[:, master]


def simulate(plan: CodedPlan, runs: int, rng: np.random.Generator, messages: int = 1) -> Completion:
    """Draw ``runs`` products of every master. Each worker and run has one draw of its row time.

    A probabilistic plan draws one master for each worker and run, or none with the remaining probability.

    Args:
        plan: The plan to simulate.
        runs: Number of products, 1 or more.
        rng: The source of the draws.
        messages: Parts in which a worker delivers its rows, each counted when it arrives; 1 is the paper's model, in
            which a worker's rows count all together or not at all.

    Returns:
        The completion times.

    Raises:
        PacelineError: For a number below 1.
    """
    whole("runs", runs)
    whole("messages", messages)
    problem = plan.problem
    masters = problem.shape[0]
    loads = plan.rows_assigned
    times = np.empty((runs, masters))
    divided = np.flatnonzero(((plan.probability > 0) & (plan.probability < 1)).any(0))
    # Upper ends of the masters' spans, (M, divided): a worker serves master m if its draw is in m's span.
    edges = np.cumsum(plan.probability[:, divided], axis=0)
    chunk = max(CHUNK // (messages * int((loads > 0).sum(1).max())), 1)
    for start in range(0, runs, chunk):
        part = slice(start, min(start + chunk, runs))
        count = part.stop - part.start
        draw = rng.random((count, len(divided)))
        for m in range(masters):
            mine = np.flatnonzero(loads[m] > 0)
            finish = problem.delay.take((m, mine)).sample(rng, count)
            finish *= loads[m, mine]
            if len(divided):
                shared = np.isin(mine, divided)
                column = np.searchsorted(divided, mine[shared])
                before = edges[m - 1] if m else np.zeros(len(divided))
                chosen = (draw >= before) & (draw < edges[m])
                finish[:, shared] = np.where(chosen[:, column], finish[:, shared], np.inf)
            wait, need = problem.wait[m, mine], problem.rows[m]
            times[part, m] = _arrival(finish, loads[m, mine], wait, need, plan.coded, messages)
    return Completion(times)


def _arrival(finish: Array, loads: Array, latency: Array, need: float, coded: bool, messages: int) -> Array:
    """When ``need`` rows have arrived, shape (runs,). finish: computing times of whole loads, (runs, workers)."""
    if not coded:
        return (finish + latency).max(1)
    sizes = loads.astype(float)
    if messages > 1:
        # Part j of c ends after floor(j l / c) rows, and after the same portion of the worker's time.
        ends = np.floor(np.arange(1, messages + 1)[:, None] * loads / messages)
        sizes = np.diff(ends, axis=0, prepend=0.0)
        finish = (finish[:, None, :] * (ends / loads)).reshape(len(finish), -1)
        sizes = sizes.ravel()
        latency = np.tile(latency, messages)
    finish = finish + latency
    order = np.argsort(finish, axis=1)
    arrived = np.cumsum(sizes[order], axis=1)
    enough = arrived >= need * (1 - 1e-12)
    first = np.argmax(enough, axis=1)
    when = np.take_along_axis(finish, np.take_along_axis(order, first[:, None], 1), 1)[:, 0]
    return np.where(enough[:, -1], when, np.inf)


def work_queue(plan: CodedPlan, runs: int, rng: np.random.Generator) -> Completion:
    """The ideal without coding: rows go one by one to free workers, L / sum of 1 / Z over a master's workers.

    No plan is faster with these workers; but it needs every row at every worker, or time to send them.

    Args:
        plan: The plan whose assignment holds.
        runs: Number of products.
        rng: The source of the draws.

    Returns:
        The completion times.
    """
    problem = plan.problem
    times = np.empty((runs, problem.shape[0]))
    for m in range(problem.shape[0]):
        z = problem.delay.take((m, plan.workers_of(m))).sample(rng, runs)
        times[:, m] = problem.rows[m] / (1 / z).sum(1)
    return Completion(times)


def stretched(made: CodedPlan, redundancy: float | None = None, survive: int = 0) -> CodedPlan:
    """The same plan with more rows for its workers, in proportion, but at most L rows for each: to deliver in several
    messages, which uses the finished part of a straggler's rows, and for workers that may be lost.

    Args:
        made: A coded plan.
        redundancy: Coded rows over L; None leaves the loads.
        survive: Workers of each master, whichever they are, without which the others still hold L rows.

    Returns:
        The plan with these loads.

    Raises:
        PacelineError: For less than 1 and for more than the workers can hold.
    """
    if redundancy is not None:
        number("redundancy", redundancy, "at least 1, the rows themselves", lambda times: 1 <= times < np.inf)
    whole("survive", survive, 0)
    if not made.coded or (survive and not made.dedicated):
        raise PacelineError(
            "only a coded plan can be stretched, and only dedicated workers may be lost; plan again"
        )
    loads = made.loads.copy()
    for m, (k, need) in enumerate(zip(made.probability, made.problem.rows, strict=True)):

        def grown(
            enough: Callable[[Array], bool], most: float, wanted: str, m: int = m, need: float = need
        ) -> Array:
            start, factor = loads[m], 1.0
            if not enough(np.where(start > 0, need, 0.0)):
                raise PacelineError(
                    f"{wanted}: master {made.problem.masters[m]!r} has {most:.4g} workers of at most L rows each; "
                    "add workers"
                )
            while not enough(np.minimum(start * factor, need)):
                factor *= 2
            low = 0.0 if wanted.startswith("redundancy") else min(1.0, factor)
            for _ in range(100):
                middle = 0.5 * (low + factor)
                low, factor = (low, middle) if enough(np.minimum(start * middle, need)) else (middle, factor)
            return np.minimum(start * factor, need)

        if redundancy is not None:
            total = redundancy * need * (1 - 1e-12)

            def holds(each: Array, k: Array = k, total: float = total) -> bool:
                return float(k @ each) >= total

            loads[m] = grown(holds, float(k.sum()), f"redundancy={redundancy:g}")
        if survive:

            def outlives(each: Array, need: float = need) -> bool:
                return float(np.sort(each)[: len(each) - survive].sum()) >= need * (1 - 1e-12)

            loads[m] = grown(outlives, int((k > 0).sum()), f"survive={survive}")
    return replace(made, loads=loads, survive=max(survive, made.survive))
