"""What would I have gained? Other policies on the rounds of a recorded run.

A run's record says how long each worker took for its load in every round; its own pace in that round follows,
and with it what any other load would have cost. What the rounds took beyond their slowest worker (exchange,
optimizer, logging) is added to every policy's rounds as it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.causes import Causes, causes
from paceline.runs.run import waiting_share, waits
from paceline.simulate.recorded import of_record, usable
from paceline.simulate.rounds import Played, run
from paceline.simulate.scenario import Scenario

WORTHWHILE = 0.98  # of the recorded seconds: less gained is not worth another policy


class Predicted(NamedTuple):
    """One policy's rounds on the recorded paces; T rounds, n workers.

    seconds: of all rounds together. idle: portion of the workers' time spent waiting (``paceline.runs.run``).
    rounds: seconds of each, (T,). loads: samples, (T, n).
    """

    seconds: float
    idle: float
    rounds: Array
    loads: Array


class Answer(NamedTuple):
    """What was, and what would have been.

    recorded: the run's policy, "" for a trace. seconds, idle: as recorded (for a trace, equal shares').
    lost: seconds of that idleness, all workers together.
    blame: seconds that the others together waited for each worker, (n,), in the rounds that it was slowest in.
    policies: what each would have cost.
    notes: what was odd about the record. causes: what the waiting is due to, where the record tells.
    """

    recorded: str
    seconds: float
    idle: float
    lost: float
    blame: Array
    policies: dict[str, Predicted]
    notes: list[str]
    causes: Causes | None = None

    @property
    def best(self) -> str:
        """The quickest policy, or "" where none is worth changing for."""
        name = min(self.policies, key=lambda each: self.policies[each].seconds)
        return name if self.policies[name].seconds < WORTHWHILE * self.seconds else ""


def of_run(record: Run, names: Sequence[str], progress: Callable[[int, int], None] | None = None) -> Answer:
    """What each policy would have cost in a recorded run.

    Raises PacelineError for a record that tells nothing of it: see ``recorded.usable``.
    """
    record = usable(record)
    scenario = of_record(record)
    outcome = run(scenario, names, progress)
    beyond = np.maximum(record.seconds - np.nanmax(record.compute, axis=1), 0.0)
    members = (~np.isnan(record.compute)).sum(1)
    predicted = {
        name: _predicted(played, beyond, members, scenario.batches)
        for name, played in outcome.policies.items()
    }
    return Answer(
        record.policy,
        float(record.seconds.sum()),
        waiting_share(record.seconds, record.compute) or 0.0,
        float(np.nansum(record.wait)),
        _blame(record.seconds, record.compute),
        predicted,
        list(record.notes),
        causes(record),
    )


def of_trace(
    scenario: Scenario, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> Answer:
    """The same for a trace's scenario, compared with equal shares; played as training would play it."""
    single = min(1, scenario.global_batch // scenario.size)
    scenario = dataclasses.replace(
        scenario,
        workers=tuple(dataclasses.replace(each, least=max(each.least, single)) for each in scenario.workers),
        known_overhead=False,
    )
    outcome = run(scenario, ["equal", *names], progress)
    none, members = np.zeros(scenario.rounds), np.full(scenario.rounds, scenario.size)
    batches = tuple(scenario.batch(t) for t in range(scenario.rounds))
    predicted = {
        name: _predicted(played, none, members, batches) for name, played in outcome.policies.items()
    }
    equal = predicted["equal"]
    seconds = outcome.policies["equal"].first_seconds
    asked = {name: predicted[name] for name in names}
    blame = _blame(seconds.max(axis=1), seconds)
    return Answer("", equal.seconds, equal.idle, float(blame.sum()), blame, asked, [])


def _predicted(played: Played, beyond: Array, members: Array, batches: Sequence[int]) -> Predicted:
    rounds = played.latency[:, 0] + beyond
    paid = float((members * rounds).sum())
    loads = played.first_shares * np.array(batches)[:, None]
    idle = float(played.wait[0]) / paid if paid > 0 else 0.0
    return Predicted(float(rounds.sum()), idle, rounds, loads)


def _blame(seconds: Array, compute: Array) -> Array:
    """Seconds that the others together waited for each worker, (n,); the slowest of a round is to blame."""
    slowest = np.nanargmax(compute, axis=1)
    waited = np.nansum(waits(seconds, compute), axis=1)
    return np.bincount(slowest, waited, minlength=compute.shape[1]).astype(float)
