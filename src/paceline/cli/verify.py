"""``paceline verify``: does a ported program train the same model however its batches are divided?"""

from __future__ import annotations

import shlex

import typer
from typer import Argument, Option

from paceline.attach.command import check_command
from paceline.cli.options import Json
from paceline.cli.output import ProgressDisplay, check_json, console_for, write_json
from paceline.errors import PacelineError, number, whole
from paceline.verify import STEPS
from paceline.verify.command import run_all, run_unported
from paceline.verify.loads import parsed
from paceline.verify.verdict import judged, show, to_json


def command(
    training: list[str] = Argument(
        ..., help="The training's command, after --.", metavar="-- COMMAND...", show_default=False
    ),
    steps: int = Option(STEPS, help="Optimizer steps of each run."),
    loads: str | None = Option(
        None, help="Loads to compare with equal ones, such as 8/16/48,0/36/36.", show_default=False
    ),
    tolerance: float | None = Option(
        None,
        help="Largest relative difference of a gradient; by default what rounding explains.",
        show_default=False,
    ),
    batch_norm: bool = Option(False, "--batch-norm", help="Leave batch norm in training mode."),
    against: str | None = Option(
        None,
        help="Command of the script before the port, in one argument: its learning rates are compared.",
        show_default=False,
    ),
    json_: Json = None,
) -> None:
    """Run a ported script a few times with other loads, and compare the gradients of each step.

    For example: paceline verify -- torchrun --standalone --nproc-per-node 3 train.py

    The exit status is 0 if they agree, 1 if not, 2 if the script could not be run.
    """
    whole("--steps", steps)
    if tolerance is not None:
        number("--tolerance", tolerance, "a number above 0", lambda value: value > 0)
    asked = None if loads is None else parsed(loads)
    check_json(json_)
    before = None if against is None else _split(against)
    with ProgressDisplay("verifying", unit="step") as progress:
        unported = None if before is None else run_unported(before, steps)
        runs = run_all(training, steps, asked, batch_norm, progress)
    verdict = judged(runs, tolerance, unported)
    show(verdict, console_for(json_))
    write_json(json_, to_json(verdict))
    if not verdict.exact:
        raise typer.Exit(2 if verdict.exact is None else 1)


def _split(text: str) -> list[str]:
    """The command in an option. Raises PacelineError if it is none."""
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise PacelineError(f"--against {text}: {error}") from None
    if not command:
        raise PacelineError('--against "": expected the command that starts the script before the port')
    check_command(command)
    return command
