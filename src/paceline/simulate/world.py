"""The cluster of a scenario, round after round: what every load would cost, and who is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline import costs
from paceline.costs import Cost, Linear, Only, Saturating
from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.simulate.scenario import Scenario
from paceline.simulate.timing import assemble


class Moment(NamedTuple):
    """One round of the cluster; arrays of shape (R, n).

    costs: seconds of any load; impossible for who is not there.
    overhead: the part that does not grow with the load. slope: seconds per sample; both finite.
    knee: samples below which a load takes no less time.
    present: who is there when the round begins.
    stopped: who of them stops without notice before its end.
    everybody: all are there and none stops.
    """

    costs: Cost
    slope: Array
    overhead: Array
    knee: Array
    present: NDArray[np.bool_]
    stopped: NDArray[np.bool_]
    everybody: bool


def classes_of(scenario: Scenario) -> NDArray[np.int64]:
    """Each worker's class, an index into the scenario's workers: shape (n,), or (R, n) where they are drawn."""
    return scenario.classes(np.random.default_rng(scenario.seed).spawn(1)[0])


def moments(scenario: Scenario) -> Iterator[Moment]:
    """Every round of every realization, all realizations of a round at once.

    Raises PacelineError where the timing models draw what no clock tells (``costs.SPAN``).
    """
    _, pacing, noising, waiting = np.random.default_rng(scenario.seed).spawn(4)
    shape = (scenario.realizations, scenario.size)
    of, classes = classes_of(scenario), scenario.workers
    slopes = assemble([each.seconds_per_sample for each in classes], of).stream(shape, pacing)
    overheads = assemble([each.overhead for each in classes], of).stream(shape, waiting)
    noise = np.array([each.noise for each in classes])[of]
    knee = np.broadcast_to(np.array([each.knee for each in classes])[of], shape)
    most = np.broadcast_to(
        np.array([scenario.global_batch if each.most is None else each.most for each in classes], float)[of],
        shape,
    )
    saturating = bool(knee.any())
    linked = any(each.link for each in classes)
    for index in range(scenario.rounds):
        with np.errstate(over="ignore", invalid="ignore"):  # said below
            slope, overhead = next(slopes), next(overheads)
            if noise.any():
                slope = slope * np.exp(noise * noising.standard_normal(shape))
            if linked:
                transfer = [each.link.seconds(index) if each.link else 0.0 for each in classes]
                overhead = overhead + np.array(transfer)[of]
        check(slope, index, "seconds_per_sample", costs.LEAST)
        check(overhead, index, "overhead", 0.0)
        here, stops = scenario.members(index)
        present = np.broadcast_to(here, shape) & ~np.isnan(slope) & ~np.isnan(overhead)
        stopped = present & stops
        everybody = bool(present.all()) and not stopped.any()
        if not everybody:
            slope, overhead = np.where(present, slope, 1.0), np.where(present, overhead, 0.0)
        cost: Cost = Saturating(slope, overhead, knee, most) if saturating else Linear(slope, overhead)
        if not everybody:
            cost = Only(cost, present & ~stopped)
        yield Moment(cost, slope, overhead, knee, present, stopped, everybody)


def check(seconds: Array, index: int, name: str, least: float) -> None:
    """Raise PacelineError for drawn seconds that no clock tells; NaN, an absent worker, may be."""
    wrong = (seconds < least) | (seconds > costs.MOST)
    if wrong.any():
        worker = int(np.argwhere(wrong)[0][-1])
        span = costs.SPAN if least else costs.SPAN_0
        raise PacelineError(
            f"{name} of worker {worker} in round {index + 1} is drawn as {seconds[wrong].ravel()[0]:.3g} seconds; "
            f"expected {span}: give its timing model a smaller spread"
        )
