"""Start a training command, watch it for some steps, and end it. Within the command, ``attach`` watches the first
DistributedDataParallel module.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from paceline import runs
from paceline.attach.command import check_command, entering, started
from paceline.errors import PacelineError, WorkerError
from paceline.files import check_directory
from paceline.runs.run import ROUNDS, SUMMARY

DIRECTORY, STEPS = "PACELINE_DOCTOR_DIR", "PACELINE_DOCTOR_STEPS"  # variables in the command's environment
SEEN, WRONG = "seen", "wrong"  # files beside the record: optimizer steps so far, why nothing can be watched
LEAST = 10  # steps that are needed for a first report
LAUNCHER = "torch.distributed.run"  # torchrun's module
MOST_UNSEEN = 200  # optimizer steps after which a training without any recorded step is ended


def observe(
    command: Sequence[str],
    steps: int,
    keep_going: bool,
    progress: Callable[[int, int], None],
    keep: Path | None = None,
) -> runs.Run:
    """Run ``command`` until ``steps`` optimizer steps are on record, and return the record.

    keep_going: let the command run to its end. keep: a new directory for the record.
    The command's output goes to standard error. Ctrl-C ends the watch; what is on record until then is returned.
    Raises PacelineError if the command cannot be started or has nothing to watch, WorkerError if it failed by itself.
    """
    check_command(command)
    check_ranks(command)
    if keep is not None and keep.exists() and (not keep.is_dir() or any(keep.iterdir())):
        raise PacelineError(f"{keep} exists; choose another place for the record")
    if keep is not None and not keep.exists():
        check_directory(keep)
    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as place:
        try:
            status = _play(command, steps, keep_going, progress, Path(place))
            if status and (seen := _rounds(Path(place))):
                print(
                    f"the command ended with status {status}: the report is of {seen} steps", file=sys.stderr
                )
        except KeyboardInterrupt:
            if not (seen := _rounds(Path(place))):
                raise
            print(f"interrupted: the report is of {seen} steps", file=sys.stderr)
            status = None
        found = Path(place) / "run"
        if keep is not None and found.is_dir():
            keep.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(found, keep, dirs_exist_ok=True)
        return _read(Path(place), status)


def _play(
    command: Sequence[str], steps: int, keep_going: bool, progress: Callable[[int, int], None], place: Path
) -> int | None:
    """Run the command and return its exit status; None if it was ended by this function."""
    entry = entering("torch.nn.parallel.distributed", "DistributedDataParallel", f"{__name__}:attach")
    with started(command, entry | {DIRECTORY: str(place), STEPS: str(steps)}, _show) as process:
        while process.poll() is None:
            progress(min(_rounds(place), steps), steps)
            unseen = not _rounds(place) and _made(place) >= MOST_UNSEEN
            if (place / WRONG).exists():
                return None
            if (unseen or (place / "run" / SUMMARY).exists()) and not keep_going:
                return None
            time.sleep(0.1)
        return process.returncode


def check_ranks(command: Sequence[str]) -> None:
    """Raises PacelineError if the command is a torchrun that starts a single rank."""
    if not any(Path(part).name == "torchrun" or part == LAUNCHER for part in command):
        return
    counts = {"nproc": "1", "nnodes": "1"}
    for part, following in pairwise([*command, ""]):
        name, _, value = part.lstrip("-").replace("_", "-").partition("=")
        if part.startswith("--") and (name := name.removesuffix("-per-node")) in counts:
            counts[name] = value or following
    if set(counts.values()) <= {"1", "1:1"}:
        raise PacelineError(
            "torchrun starts 1 rank here: expected at least 2, as a single rank never waits; add --nproc-per-node 2"
        )


def _show(line: str) -> None:
    sys.stderr.write(line)
    sys.stderr.flush()


def _rounds(place: Path) -> int:
    with contextlib.suppress(OSError):
        return (place / "run" / ROUNDS).read_bytes().count(b"\n")
    return 0


def _made(place: Path) -> int:
    """Optimizer steps that rank 0 has made, with any model."""
    with contextlib.suppress(OSError, ValueError):
        return int((place / SEEN).read_text() or 0)
    return 0


def _tell(place: Path, made: int) -> None:
    """Write what ``_made`` reads, over the number before it: the command may be ended at any moment."""
    with (place / SEEN).open("r+b") as file:
        file.write(b"%9d" % made)


def _read(place: Path, status: int | None) -> runs.Run:
    """The record. Raises PacelineError or WorkerError with the reason if there is none."""
    if (place / WRONG).exists():
        raise PacelineError((place / WRONG).read_text(encoding="utf-8"))
    run = runs.read(place / "run") if (place / "run").is_dir() else None
    if run is not None and len(run.round):
        return run
    if status:
        raise WorkerError(f"the command ended with status {status}; its output above says why")
    if run is not None:
        raise PacelineError(_unseen(_made(place)))
    if (place / SEEN).exists():
        raise PacelineError("rank 0 runs on another machine; its doctor has the record")
    raise PacelineError(
        "the command made no DistributedDataParallel module; call paceline.doctor.watch(ddp) in the script itself "
        "if it makes one that cannot be seen from outside"
    )


def _unseen(made: int) -> str:
    """The reason why no step is on record. made: optimizer steps in rank 0's process."""
    if made == 0:
        return (
            "rank 0 of the command made no step of a torch.optim optimizer; let it train for longer, or, if its "
            "optimizer is another one, record its steps with paceline.torch.Recorder, see docs/simulate.md"
        )
    if made < LEAST:
        return f"the command ended after {made} of at least {LEAST} optimizer steps; let it train for longer"
    return (
        f"rank 0 made {made} optimizer steps, and fewer than {LEAST} of them came after a backward pass through the "
        "watched module, which is the first DistributedDataParallel that the script makes; call that one as ddp(x) "
        "in training mode, or, if the script trains another one, call paceline.doctor.watch(ddp) after making it"
    )


def attach(make: Callable[..., None], model: Any, *arguments: Any, **named: Any) -> None:
    """Make this module by ``make``, and watch it, within the command; if that fails, leave the reason in a file."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    from paceline.doctor.probe import Probe

    make(model, *arguments, **named)
    place, made, probe = Path(os.environ[DIRECTORY]), 0, None

    def count(*_: object) -> None:
        nonlocal made
        made += 1
        if probe is not None and probe.rank == 0 and (made <= LEAST or made % (MOST_UNSEEN // 4) == 0):
            with contextlib.suppress(OSError):  # the doctor has ended and removed the directory
                _tell(place, made)

    register_optimizer_step_post_hook(count)
    try:
        (place / SEEN).touch()
        probe = Probe(model, int(os.environ[STEPS]), place / "run")
    except (PacelineError, OSError) as error:
        (place / WRONG).write_text(str(error), encoding="utf-8")
