"""Other policies on the rounds of a recorded run: what would they have gained?

A run's record has the seconds of each worker for its load in every round. From these follow its pace in that round,
and the seconds of any other load. The recorded seconds of a round beyond its slowest worker (exchange, optimizer,
logging) are added unchanged to every policy's round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.causes import Causes, causes
from paceline.runs.run import waiting_share, waits
from paceline.runs.summary import WORTHWHILE, paces, piece_figures
from paceline.runs.words import listing, percent, plural, seconds, times
from paceline.simulate.rounds import Outcome, run
from paceline.simulate.scenario import PIECE_SECONDS, Scenario, WorkerClass
from paceline.simulate.timing import Replay

if TYPE_CHECKING:
    from rich.table import Table


class Predicted(NamedTuple):
    """One policy's rounds on the recorded paces; T rounds, n workers.

    seconds: total of all rounds. idle: portion of the workers' time spent waiting (``paceline.runs.run``).
    rounds: seconds of each round, (T,). loads: samples, (T, n).
    """

    seconds: float
    idle: float
    rounds: Array
    loads: Array


class WhatIfResult(NamedTuple):
    """The recorded rounds, and the same rounds under other policies.

    recorded: the run's policy, "" for a trace. seconds, idle: as recorded (for a trace, with equal shares).
    lost: seconds of waiting, over all workers.
    blame: seconds that the others together waited for each worker, (n,), in the rounds in which it was slowest.
    policies: the prediction for each policy.
    notes: irregularities of the record. causes: what the waiting is due to, if the record shows it.
    planned: whether the run's loop only divides batches between rounds, so that ``auto`` runs as ``level`` in it.
    option: how the program at hand chooses a policy, with {} for its name.
    """

    recorded: str
    seconds: float
    idle: float
    lost: float
    blame: Array
    policies: dict[str, Predicted]
    notes: list[str]
    causes: Causes | None = None
    planned: bool = False
    option: str = "--policy {}"

    @property
    def best(self) -> str:
        """The fastest policy that the run's program can run, or "" if none is worth a change."""
        able = [name for name in self.policies if not (self.planned and name.split(":")[0] == "auto")]
        if not able:
            return ""
        name = min(able, key=lambda each: self.policies[each].seconds)
        return name if self.policies[name].seconds < WORTHWHILE * self.seconds else ""


def of_run(
    record: Run, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> WhatIfResult:
    """The prediction of each policy for a recorded run.

    Raises PacelineError for a record that does not allow it: see ``usable``.
    """
    record = usable(record)
    scenario = of_record(record)
    outcome = run(scenario, names, progress)
    beyond = np.maximum(record.seconds - np.nanmax(record.compute, axis=1), 0.0)
    members = (~np.isnan(record.compute)).sum(1)
    predicted = _predicted(outcome, beyond, members)
    return WhatIfResult(
        record.policy,
        float(record.seconds.sum()),
        waiting_share(record.seconds, record.compute) or 0.0,
        float(np.nansum(record.wait)),
        _blame(record.seconds, record.compute),
        predicted,
        list(record.notes),
        causes(record),
        str(record.config.get("loop", "whole")) not in CLAIMING,
        _option(record),
    )


def _option(record: Run) -> str:
    """How the program that wrote a record chooses a policy, with {} for its name."""
    if record.config.get("engine") == "service":
        return 'policy="{}" in the settings of the job'
    return "--policy {}" if "model" in record.config else 'Pace(..., policy="{}")'


def of_trace(
    scenario: Scenario, names: Sequence[str], progress: Callable[[int, int], None] | None = None
) -> WhatIfResult:
    """The same for a trace's scenario, compared with equal shares; simulated as in training."""
    single = min(1, scenario.global_batch // scenario.size)
    scenario = dataclasses.replace(
        scenario,
        workers=tuple(dataclasses.replace(each, least=max(each.least, single)) for each in scenario.workers),
        known_overhead=False,
    )
    outcome = run(scenario, ["equal", *names], progress)
    seconds = outcome.policies["equal"].first_seconds
    predicted = _predicted(outcome, np.zeros(scenario.rounds), (~np.isnan(seconds)).sum(1))
    equal, asked = predicted["equal"], {name: predicted[name] for name in names}
    blame = _blame(equal.rounds, seconds)
    return WhatIfResult("", equal.seconds, equal.idle, float(blame.sum()), blame, asked, [])


def _predicted(outcome: Outcome, beyond: Array, members: Array) -> dict[str, Predicted]:
    """Each policy's rounds. beyond: seconds of each after its slowest worker; members: its workers; both (T,)."""
    scenario, found = outcome.scenario, {}
    batches = np.array([scenario.batch(t) for t in range(scenario.rounds)])[:, None]
    for name, played in outcome.policies.items():
        rounds = played.latency[:, 0] + beyond
        paid = float((members * rounds).sum())
        idle = float(played.wait[0]) / paid if paid > 0 else 0.0
        found[name] = Predicted(float(rounds.sum()), idle, rounds, played.first_shares * batches)
    return found


def _blame(seconds: Array, compute: Array) -> Array:
    """Seconds that the others together waited for each worker, (n,); a round's waiting counts for its slowest."""
    slowest = np.nanargmax(compute, axis=1)
    waited = np.nansum(waits(seconds, compute), axis=1)
    return np.bincount(slowest, waited, minlength=compute.shape[1]).astype(float)


PREFETCHED = 2  # batches that each process of a loader prefetches, torch's default
ROUNDED = 1e-6  # seconds to which programs may round those that they record
CLAIMING = ("round", "pieces")  # kinds of loop in which work can move while a round runs
# The settings of runs whose rounds all workers share.
BULK = {"sync": "bsp", "mode": "push-wait", "backup": "everyone"}


def usable(record: Run) -> Run:
    """The rounds on which other policies can be simulated; ``notes`` says what was left out or is irregular.

    Raises PacelineError for a record without rounds, with only one worker, or of a run whose rounds were not
    shared by all workers, since single updates of a parameter server are not such rounds.
    """
    if not len(record.round):
        raise PacelineError(f"{record.path} has no finished round yet; try again when the run has one")
    for name, needed in BULK.items():
        given = str(record.config.get(name) or needed)
        if given.partition(":")[0] != needed:
            raise PacelineError(
                f"{record.path} was run with {name} {given}; whatif replays rounds that all workers share: expected "
                f"a record with {name} {needed}"
            )
    notes = list(record.notes)
    there = ~np.isnan(record.compute) & ~np.isnan(record.loads)
    loads = np.where(there, record.loads, np.nan)
    if np.any(np.nan_to_num(loads) % 1):
        raise PacelineError(
            f"{record.path} holds fractions of samples; expected whole ones, as engines run them"
        )
    worked: NDArray[np.bool_] = np.any(loads > 0, axis=1)
    if not worked.any():
        raise PacelineError(
            f"{record.path} has no round in which a worker ran a sample; expected one or more such rounds"
        )
    if not worked.all():
        notes.append(f"Left out: {plural(int((~worked).sum()), 'round')} without samples.")
    loads, there = loads[worked], there[worked]
    ran = (np.nan_to_num(loads) > 0).any(0)
    idle = [int(i) for i in np.flatnonzero(there.any(0) & ~ran)]
    if idle:
        who = f"worker{'s' if len(idle) > 1 else ''} {listing(idle)}"
        notes.append(
            f"The speed of {who} is unknown, without a sample in the record; no policy gives it samples here."
        )
    compute = np.where(there & ran, record.compute[worked], np.nan)
    loads = np.where(there & ran, loads, np.nan)
    if compute.shape[1] < 2:
        raise PacelineError(f"{record.path} has only 1 worker; expected at least 2 to divide a batch between")
    seconds = record.seconds[worked]
    early = int((np.nanmax(compute, axis=1) > seconds + ROUNDED).sum())
    if early:
        notes.append(
            f"{plural(early, 'round')} ended before the slowest worker was done; here, policies wait for that worker."
        )
    columns = ((each.name, getattr(record, each.name)) for each in dataclasses.fields(record))
    kept: dict[str, Any] = {name: each[worked] for name, each in columns if isinstance(each, np.ndarray)}
    kept |= {"loads": loads, "compute": compute, "wait": waits(seconds, compute)}
    kept["overhead"] = np.where(np.isnan(compute), np.nan, kept["overhead"])
    extras = {name: list(compress(values, worked)) for name, values in record.extras.items()}
    return dataclasses.replace(record, **kept, extras=extras, notes=notes)


def of_record(record: Run) -> Scenario:
    """The scenario that plays a usable record's rounds."""
    pace, overhead = paces(record)
    batches = tuple(int(b) for b in np.rint(np.nansum(record.loads, axis=1)))
    full = max(batches)
    least, most = _limits(record, full)
    measured = piece_figures(record).get("piece_cost")
    classes = tuple(
        WorkerClass(Replay(pace[:, i : i + 1]), Replay(overhead[:, i : i + 1]), least=least[i], most=most[i])
        for i in range(record.workers)
    )
    try:
        return Scenario(
            classes,
            global_batch=full,
            rounds=len(batches),
            batches=batches,
            decision_delay=PREFETCHED * int(record.config.get("loader_workers") or 0),
            known_overhead=False,
            piece_seconds=measured or PIECE_SECONDS,
        )
    except PacelineError as error:
        raise PacelineError(f"{record.path}: {error}") from None


def _limits(record: Run, batch: int) -> tuple[list[int], list[int | None]]:
    """The run's limits; by default at least one sample each if the batch has enough."""
    workers = record.loads.shape[1]
    given = record.config.get("limits") or [(None, None)] * workers
    if isinstance(given, str):  # "memory": the run found the limits while it trained
        given = [(None, None)] * workers
    if len(given) != workers:
        owners = plural(len(given), "worker")
        record.notes.append(f"run.json has limits of {owners}, not of {workers}; they are ignored.")
        given = [(None, None)] * workers
    least = [min(1, batch // workers) if low is None else int(low) for low, _ in given]
    return least, [None if high is None else int(high) for _, high in given]


def table(answer: WhatIfResult, counted: str = "loads") -> Table:
    """A terminal table of all policies' figures, the fastest first. counted: what each rank's numbers count."""
    from paceline import tables

    shown = tables.begun("policy", figures=("time", "as fast", "waiting", f"{counted} in the last round"))
    shown.add_row(
        f"{before(answer)} (recorded)", seconds(answer.seconds), times(1.0), percent(answer.idle), ""
    )
    for name, would in sorted(answer.policies.items(), key=lambda item: item[1].seconds):
        sizes = np.nansum(would.loads, axis=1)
        full = np.flatnonzero(sizes == sizes.max())[-1]  # the last round with a full batch
        loads = [int(load) for load in np.nan_to_num(would.loads[full])]
        few = "/".join(map(str, loads)) if len(loads) <= 8 else f"{min(loads)} to {max(loads)}"
        shown.add_row(
            name, seconds(would.seconds), times(answer.seconds / would.seconds), percent(would.idle), few
        )
    return shown


def before(answer: WhatIfResult) -> str:
    """The policy of the recorded rounds; equal for a trace, which is compared with equal shares."""
    return answer.recorded or "equal"
