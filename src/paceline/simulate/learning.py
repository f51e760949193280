"""``paceline simulate --learn``: a scenario's cluster with a parameter server that trains a real model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from paceline.commands import installation
from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.engine import Update
from paceline.paramserver.samples import Draws
from paceline.rounds import Array
from paceline.simulate.local import SimulatedLocalSteps
from paceline.simulate.scenario import FREEZE, JOIN, LEAVE, Event, Scenario
from paceline.simulate.server import MemberEvent, RoundTrips, SimulatedServer
from paceline.simulate.timing import assemble


def server_config(scenario: Scenario, **options: Any) -> ServerConfig:
    """The configuration of the server of the scenario's workers; options as in ``ServerConfig``.

    Raises PacelineError for options that are unknown or exclude each other."""
    kinds = [scenario.workers[kind] for kind in np.atleast_2d(scenario.classes())[0]]
    return ServerConfig(
        scenario.size,
        scenario.global_batch,
        # A parameter server gives each worker at least one sample.
        limits=tuple((each.least or None, each.most) for each in kinds),
        machines=scenario.cluster().machines,
        **options,
    )


@dataclass
class Learnt:
    """One run: its updates, and the final loss and accuracy on the test set."""

    updates: list[Update]
    test_loss: float
    test_accuracy: float
    settings: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        columns = {"now": "ended", "loss": "loss", "quorum": "quorum", "rate": "rate", "samples": "batch"}
        return self.settings | {
            "seconds": self.updates[-1].ended,
            "updates": len(self.updates),
            "gradients_used": sum(len(u.moved) for u in self.updates),
            "gradients_dropped": dict(sum((u.dropped for u in self.updates), Counter())),
            "samples_dropped": sum(u.dropped_samples for u in self.updates),
            "test_loss": self.test_loss,
            "test_accuracy": self.test_accuracy,
            "mean_staleness": float(np.mean([s for u in self.updates for s in u.staleness])),
            "curves": {name: [getattr(u, of) for u in self.updates] for name, of in columns.items()},
        }


def learn(
    scenario: Scenario,
    by: ServerConfig,
    data: str = "digits",
    model: str = "mlp",
    loss: float | None = None,
    every: str | None = None,
    outer: str = "mean",
) -> Learnt:
    """Train on the scenario's first realization for at most ``scenario.rounds`` updates.

    by: ``server_config`` of this scenario. data, model: as for ``paceline train``. loss: stop when the mean of the
    last 5 updates' losses is below it.

    A worker's j-th task takes as long as its round j in the scenario: overhead and link plus pace times load.
    An event of round r takes place when r - 1 updates are made. A task in progress is then dropped if the worker
    leaves, and waited for until ``give_up_seconds`` after its start if the worker dies or freezes.

    every, outer: instead of a server, local steps of each worker between merges (``SimulatedLocalSteps``); an update
    is a merge, a task is a step, and a link carries its megabytes once per merge.
    """
    try:
        from paceline.learners.images import Images
    except ModuleNotFoundError as error:
        raise PacelineError(f"{error.name} is not installed; {installation('torch')}") from error
    samples = datasets.load(data)
    learner = Images(samples, model, scenario.seed)
    of = np.atleast_2d(scenario.classes())[0]  # each worker's class in the first realization

    def links(number: int) -> Array:
        return np.array([each.link.seconds(number) if each.link else 0.0 for each in scenario.workers])[of]

    trips = RoundTrips(
        scenario.size,
        assemble([each.overhead for each in scenario.workers], of),
        assemble([each.seconds_per_sample for each in scenario.workers], of),
        scenario.seed,
        noise=np.array([each.noise for each in scenario.workers])[of],
        knee=np.array([each.knee for each in scenario.workers])[of],
        transfer=links if every is None else None,
    )
    pool = Draws(len(samples.x_train), scenario.seed)
    losses: list[float] = []

    def stop(update: Update) -> bool:
        losses.append(update.loss)
        return loss is not None and float(np.mean(losses[-5:])) < loss

    settings: dict[str, Any] = {}
    if every is None:
        server = SimulatedServer(
            learner,
            by,
            trips,
            pool,
            absent=np.flatnonzero(~scenario.members(0)[0]).tolist(),
            give_up=0.0,
            grace=scenario.give_up_seconds,
            by_update=_members(scenario.events),
        )
        updates, values = server.run(scenario.rounds, None, stop), server.parameters
    else:
        wait = scenario.give_up_seconds
        local = SimulatedLocalSteps(learner, by, trips, pool, every, outer, links, scenario.members, wait)
        updates, values = local.run(scenario.rounds, stop), local.parameters
        settings = {
            "every": every,
            "outer": outer,
            "link_seconds": local.linked,
            "steps": local.steps.tolist(),
        }
    test_loss, accuracy = learner.test(values.values)
    settings |= {name: getattr(by, name) for name in ("sync", "backup", "policy", "mode")}
    settings |= {"data": data, "model": model, "scenario": scenario.name, "seed": scenario.seed}
    return Learnt(updates, test_loss, accuracy, settings)


def _members(events: Sequence[Event]) -> list[MemberEvent]:
    """A scenario's events, as events by the number of updates made before each."""
    found = []
    for event in events:
        made = event.round - 1
        if made or event.kind != JOIN:  # otherwise it is absent from the start
            kind = event.kind if event.kind in (LEAVE, JOIN) else "freeze"
            found.append(MemberEvent(made, event.worker, kind))
        if event.kind == FREEZE:
            found.append(MemberEvent(made + event.rounds, event.worker, "thaw"))
    return found
