"""What a job has learned of its samples' costs: the cost model of the next round, and what it will remember.

The first round runs with costs as they were given. Where batches are padded, the next two are cut into more and more
micro-batches, so that what a launch costs shows; from then on the measured model decides.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np

from paceline.costs import Array
from paceline.errors import PacelineError
from paceline.samples import fit as fitting
from paceline.samples.cost import CostModel, SampleCosts

__all__ = ["CostLearner"]

REMEMBERED = 32  # rounds of a job's beginning, in which what is known of its costs may change much
RETOLD = 0.01  # relative change of a worker's cost

TRIALS = (
    None,
    1 / 8,
    1 / 64,
)  # of a worker's mean cost: what a launch is taken to cost in the first padded rounds
SURE = (
    8  # rounds before a launch is believed to cost less than was tried: nothing would come of dozens of them
)


class Seen(NamedTuple):
    """A round that was taken in; of each worker."""

    parts: Array  # (n, 3)
    seconds: Array  # (n,), NaN where absent
    known: Array  # overhead that was measured, (n,)


class CostLearner:
    """Learns the cost model of one job from its rounds; the same on every rank that takes in the same rounds.

    costs: of the data set. workers: n. batch: samples of a full round. padded: a micro-batch costs its size times
    its longest sample. quadratic: whether costs may grow with the square of the lengths, too.
    """

    def __init__(
        self, costs: SampleCosts, workers: int, batch: int, *, padded: bool = False, quadratic: bool = True
    ) -> None:
        self.costs, self.padded = costs, padded
        self._workers, self._batch, self._quadratic = workers, batch, quadratic
        self.restart()

    def restart(self) -> None:
        """Begin with nothing known."""
        self.fit, self.rounds = fitting.start(self._workers), 0
        self.seen: list[Seen] = []  # the first rounds of the job
        self.told = (0.0, 0.0)  # the model by which a policy saw them: part and launch

    def model(self) -> CostModel:
        """The model to deal the next round by."""
        measured = float(self.fit.launch)
        launch: float | None = measured
        if self.padded and self.rounds < SURE:
            part = TRIALS[min(self.rounds, len(TRIALS) - 1)]
            tried = None if part is None else part * self._batch / self._workers
            launch = tried if tried is None or self.rounds < len(TRIALS) else max(measured, tried)
        return self.costs.model(float(self.fit.part), launch, self.padded)

    def take(self, parts: Array, seconds: Array, known: Array | float = 0.0) -> bool:
        """Take in a round: ``Deal.parts``, (n, 3), and each worker's seconds, (n,), NaN where absent.

        known: the part of the seconds that was measured to be overhead. Returns whether the rounds before are told
        differently now, by more than a policy should bear: it should then see them again (``seen``).
        """
        scaled = parts / np.array([self.costs.mean, self.costs.mean_square, 1.0])
        before = self.fit
        self.fit = fitting.update(before, scaled, seconds - known, quadratic=self._quadratic)
        self.rounds += self.fit is not before
        if self.rounds > REMEMBERED:
            self.seen = []
            return False
        earlier = [each.parts for each in self.seen]
        self.seen = [*self.seen, Seen(parts, seconds, np.zeros(self._workers) + known)]
        now = (float(self.fit.part), float(self.fit.launch))
        with np.errstate(
            divide="ignore", invalid="ignore"
        ):  # nothing was run, which costs nothing by any model
            apart = [
                np.abs(np.log((each @ self._weights(*now)) / (each @ self._weights(*self.told))))
                for each in earlier
            ]
        if not np.any(np.array(apart) > RETOLD):
            return False
        self.told = now
        return True

    def cost(self, parts: Array) -> Array:
        """What each worker ran, as is known now, (n,), in mean samples."""
        costs: Array = parts @ self._weights(float(self.fit.part), float(self.fit.launch))
        return costs

    def _weights(self, part: float, launch: float) -> Array:
        return np.array([(1 - part) / self.costs.mean, part / self.costs.mean_square, launch])

    def state_dict(self, models: dict[int, CostModel]) -> dict[str, Any]:
        """As plain lists and numbers, with the models by the rounds from which they hold."""
        return {
            "rounds": self.rounds,
            "fit": [np.asarray(leaf).tolist() for leaf in self.fit],
            "told": list(self.told),
            "seen": [[part.tolist() for part in each] for each in self.seen],
            "models": {step: list(astuple(model)) for step, model in models.items()},
        }

    def stored(self, state: Any) -> CostLearner:
        """Another that goes on from a stored state. Raises PacelineError for what is no such state."""
        made = CostLearner(
            self.costs, self._workers, self._batch, padded=self.padded, quadratic=self._quadratic
        )
        n = self._workers
        try:
            made.fit = fitting.Fit(*(np.array(leaf, dtype=float) for leaf in state["fit"]))
            made.rounds, made.told = int(state["rounds"]), (float(state["told"][0]), float(state["told"][1]))
            made.seen = [Seen(*(np.array(part, dtype=float) for part in each)) for each in state["seen"]]
            right = all([part.shape for part in each] == [(n, 3), (n,), (n,)] for each in made.seen) and [
                leaf.shape for leaf in made.fit
            ] == [leaf.shape for leaf in fitting.start(n)]
        except (KeyError, IndexError, TypeError, ValueError):
            right = False
        if not right:
            raise PacelineError(f"the stored cost model is none of {n} workers; begin without it")
        return made

    @staticmethod
    def models(state: Any, step: int) -> dict[int, CostModel]:
        """The stored models, one of which holds for round ``step``. Raises PacelineError as ``learned``."""
        try:
            found = {int(first): CostModel(*model) for first, model in state["models"].items()}
            right = all(np.isfinite(model.linear + model.quadratic) for model in found.values())
        except (AttributeError, KeyError, TypeError, ValueError):
            found, right = {}, False
        if not right or not any(first <= step for first in found):
            raise PacelineError(f"the stored cost models hold none for round {step}; begin without them")
        return found
