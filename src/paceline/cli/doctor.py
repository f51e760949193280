"""``paceline doctor``: find out why a training run is slow, without changing it."""

from __future__ import annotations

import tempfile
from pathlib import Path

from typer import Argument, Option

from paceline import policies
from paceline.cli.options import Json
from paceline.cli.output import ProgressDisplay, check_json, console_for, write_json
from paceline.doctor import STEPS
from paceline.doctor.command import observe
from paceline.doctor.findings import POLICIES, diagnose, show, to_json
from paceline.errors import whole
from paceline.files import check_place, write_whole
from paceline.rounds import Cluster


def command(
    training: list[str] = Argument(
        ..., help="The training's command, after --.", metavar="-- COMMAND...", show_default=False
    ),
    steps: int = Option(STEPS, help="Optimizer steps to watch."),
    policy: list[str] | None = Option(
        None, help="Policies to compare; repeat for several: NAME or NAME:key=value,..."
    ),
    keep_going: bool = Option(
        False, "--keep-going", help="Let the training run to its end instead of ending it."
    ),
    out: Path | None = Option(None, help="A new directory to keep the record in, for whatif and report."),
    patch: Path | None = Option(
        None, help="Write the change to this file instead of a temporary one.", metavar="FILE"
    ),
    json_: Json = None,
) -> None:
    """Watch a plain DistributedDataParallel run: which rank is slow, in which phase, its cost, and what would help.

    For example: paceline doctor -- torchrun --standalone --nproc-per-node 4 train.py
    """
    whole("--steps", steps, 10)
    chosen = list(dict.fromkeys(policy or POLICIES))
    for name in chosen:
        policies.create(name, Cluster(2, 2))
    check_json(json_)
    if patch is not None:
        check_place(patch)
    console = console_for(json_)
    with ProgressDisplay("watching", unit="step") as progress:
        run = observe(training, steps, keep_going, progress, out)
    found = diagnose(run, chosen)
    kept = None
    if found.is_diff:
        kept = patch or Path(tempfile.mkdtemp(prefix="paceline-doctor-"), "change.diff")
        write_whole(kept, "\n".join([*found.lines, ""]))
    show(found, console, training, kept)
    write_json(json_, to_json(found))
