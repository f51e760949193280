"""``paceline whatif``: how long a recorded run would have taken under other policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from typer import Argument, Option

from paceline.cli.options import Json
from paceline.cli.output import ProgressDisplay, check_json, console_for, write_json
from paceline.commands import line
from paceline.errors import PacelineError
from paceline.runs import causes, read
from paceline.runs.run import runs_in
from paceline.runs.summary import WORTHWHILE
from paceline.runs.words import listing, percent, plural, seconds, times
from paceline.simulate import worth
from paceline.simulate.toml import of_trace
from paceline.simulate.whatif import WhatIfResult, before, table
from paceline.simulate.whatif import of_run as answer_of_run
from paceline.simulate.whatif import of_trace as answer_of_trace
from paceline.tables import print_whole, say

DEFAULT = ("equal", "dolbie", "level", "auto")


def command(
    record: Path = Argument(..., help="A run directory, or a trace of speeds.", metavar="RUN|TRACE.csv"),
    policy: list[str] | None = Option(None, help="Repeat for several: NAME or NAME:key=value,..."),
    global_batch: int | None = Option(
        None, help="Samples in each round of a trace (256); a run knows its own."
    ),
    json_: Json = None,
) -> None:
    """Show what each policy would have cost in a recorded run, who waited for whom, and which policy to take.

    For example: paceline whatif runs/digits-mlp-equal --policy level
    """
    names = list(dict.fromkeys(policy or DEFAULT))
    check_json(json_)
    console = console_for(json_)
    with ProgressDisplay("replaying") as progress:
        if record.suffix.lower() == ".csv":
            scenario = of_trace(record, global_batch=256 if global_batch is None else global_batch)
            answer, who = answer_of_trace(scenario, names, progress), worth.of_scenario(scenario)
        else:
            if global_batch is not None:
                raise PacelineError("--global-batch is for traces; a run knows its own batches")
            if inside := runs_in(record):
                each = ", ".join(line("whatif", path) for path in inside)
                wanted = "the run itself" if len(inside) == 1 else "one of them"
                raise PacelineError(f"{record} holds {plural(len(inside), 'run')}; expected {wanted}: {each}")
            recorded = read(record)
            answer = answer_of_run(recorded, names, progress)
            who = worth.of_run(recorded)
    why = [causes.sentence(answer.causes)] if answer.causes is not None else []
    for sentence in (verdict(answer), *within(answer), losses(answer), *why, *who, *answer.notes):
        say(console, sentence)
    print_whole(console, table(answer))
    write_json(json_, answer._asdict() | {"take": answer.best or None, "verdict": verdict(answer)})


def verdict(answer: WhatIfResult) -> str:
    """The answer in one sentence."""
    was = f"the {seconds(answer.seconds)} under {before(answer)}"
    best = answer.best
    if not best:
        return f"None of {listing(list(answer.policies))} would have been faster than {was}, so keep what you have."
    would = answer.policies[best]
    faster = times(answer.seconds / would.seconds)
    return (
        f"Take {best}: it would have needed {seconds(would.seconds)} instead of {was}, {faster} as fast. "
        f"Write: {answer.option.format(best)}"
    )


def within(answer: WhatIfResult) -> list[str]:
    """A sentence on ``auto`` where a script's loop does not let it move work within a round, if that would pay."""
    auto = [would.seconds for name, would in answer.policies.items() if name.split(":")[0] == "auto"]
    # Only scripts can change their loop: the service and ``paceline train`` move no work in theirs.
    if not auto or not answer.planned or not answer.option.startswith("Pace("):
        return []
    able = answer.policies[answer.best].seconds if answer.best else answer.seconds
    if auto[0] >= WORTHWHILE * able:
        return []
    return [
        f'auto would have needed {seconds(auto[0])} if the script handed over its passes: Pace(..., loop="round") '
        "and pace.round(batch, ...); in its present loop, auto runs as level."
    ]


def losses(answer: WhatIfResult) -> str:
    """A sentence on the share of time that the workers waited, and for whom."""
    total = answer.blame.sum()
    if total <= 0:
        return "No worker waited for another."
    order = np.argsort(-answer.blame, kind="stable")
    count = int(np.searchsorted(np.cumsum(answer.blame[order]), 0.8 * total)) + 1
    if count > max(1, len(order) // 2):
        whom = "for all workers about equally"
    else:
        names = listing(sorted(int(worker) for worker in order[:count]))
        part = percent(answer.blame[order[:count]].sum() / max(answer.lost, total))
        whom = f"{part} of it for {'worker' if count == 1 else 'workers'} {names}"
    return f"The workers spent {percent(answer.idle)} of their time, {seconds(answer.lost)}, waiting, {whom}."
