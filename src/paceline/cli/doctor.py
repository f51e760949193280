"""``paceline doctor``: why a training run is slow, found without changing it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline import policies
from paceline.cli.options import Json
from paceline.cli.output import Counter, check_json, console_for, write_json
from paceline.doctor import STEPS
from paceline.doctor.command import observe
from paceline.doctor.findings import POLICIES, diagnose, show, to_json
from paceline.errors import PacelineError
from paceline.rounds import Cluster


def command(
    training: Annotated[
        list[str],
        typer.Argument(
            help="What starts the training, after --.", metavar="-- COMMAND...", show_default=False
        ),
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps to watch.")] = STEPS,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="Policies to compare; repeat for several: NAME or NAME:key=value,..."),
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Let the training run to its end instead of ending it.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A new directory to keep the record in, for whatif and report.")
    ] = None,
    json_: Json = None,
) -> None:
    """Watch a plain DistributedDataParallel run: which rank is slow, at what, what it costs, what would help.

    For example: paceline doctor -- torchrun --standalone --nproc-per-node 4 train.py
    """
    if steps < 10:
        raise PacelineError(f"--steps {steps}: expected at least 10 steps to judge by")
    chosen = list(dict.fromkeys(policy or POLICIES))
    for name in chosen:
        policies.create(name, Cluster(2, 2))
    check_json(json_)
    console = console_for(json_)
    with Counter("watching") as progress:
        run = observe(training, steps, keep_going, progress, out)
    found = diagnose(run, chosen)
    show(found, console)
    write_json(json_, to_json(found))
