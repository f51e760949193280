"""What a job has learned of its samples' costs: the cost model of the next round, and what it will remember.

The first round runs with costs as they were given. Where batches are padded, the next two are cut into more and more
micro-batches, so that what a launch costs shows; from then on the measured model decides.
"""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np

from paceline.costs import Array
from paceline.errors import PacelineError
from paceline.samples import fit as fitting
from paceline.samples.cost import CostModel, SampleCosts

__all__ = ["CostLearner"]

TRIALS = (
    None,
    1 / 8,
    1 / 64,
)  # of a worker's mean cost: what a launch is taken to cost in the first padded rounds


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

    def model(self) -> CostModel:
        """The model to deal the next round by."""
        launch: float | None = float(self.fit.launch)
        if self.padded and self.rounds < len(TRIALS):
            part = TRIALS[self.rounds]
            launch = None if part is None else part * self._batch / self._workers
        return self.costs.model(float(self.fit.part), launch, self.padded)

    def take(self, parts: Array, seconds: Array) -> None:
        """Take in a round: ``Deal.parts``, (n, 3), and each worker's seconds, (n,), NaN where absent."""
        scaled = parts / np.array([self.costs.mean, self.costs.mean_square, 1.0])
        before = self.fit
        self.fit = fitting.update(before, scaled, seconds, quadratic=self._quadratic)
        self.rounds += self.fit is not before

    def state_dict(self, models: dict[int, CostModel]) -> dict[str, Any]:
        """As plain lists and numbers, with the models by the rounds from which they hold."""
        return {
            "rounds": self.rounds,
            "fit": [np.asarray(leaf).tolist() for leaf in self.fit],
            "models": {step: list(astuple(model)) for step, model in models.items()},
        }

    @staticmethod
    def learned(state: Any, workers: int) -> tuple[fitting.Fit, int]:
        """What was learned, and in how many rounds. Raises PacelineError for what is none of theirs."""
        try:
            leaves = [np.array(leaf, dtype=float) for leaf in state["fit"]]
            rounds = int(state["rounds"])
        except (KeyError, TypeError, ValueError):
            leaves, rounds = [], 0
        shapes = [leaf.shape for leaf in fitting.start(workers)]
        if [leaf.shape for leaf in leaves] != shapes:
            raise PacelineError(f"the stored cost model is none of {workers} workers; begin without it")
        return fitting.Fit(*leaves), rounds

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
