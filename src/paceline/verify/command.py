"""Run the program with each of the loads, and read what its ranks wrote down."""

from __future__ import annotations

import json
import re
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.attach.command import check_command, entering, started
from paceline.errors import PacelineError
from paceline.verify.compare import Run
from paceline.verify.inside import FIRST, PLAN, WRONG
from paceline.verify.loads import EQUAL, IDLE, UNEVEN
from paceline.verify.record import read

KEPT = 400  # lines of the program's output that are kept to find its error in
LOOK_SECONDS = 0.05  # between two looks at the running program
SILENT_SECONDS = 900.0  # without a step, after which a run is ended
# Variables that keep what the program writes out of the user's folders and accounts. Compiled kernels are left out:
# random numbers are made by sample only where torch runs operation by operation.
QUIET = {
    "TORCHDYNAMO_DISABLE": "1",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "TRACKIO_DIR": "{tmp}",
    "MLFLOW_TRACKING_URI": "file:{tmp}",
    "TMPDIR": "{tmp}",
}
_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?((?:[\w.]+\.)?\w*(?:Error|Exception|Interrupt)\b(?:: .*)?)$")
_PLACE = re.compile(r'^(?:\[rank\d+\]:)?\s*File "(.+)", line (\d+)')
_NOT_ITS_OWN = ("ChildFailedError", "torch.distributed.elastic")


def run_all(
    command: Sequence[str],
    steps: int,
    loads: list[list[int]] | None,
    batch_norm: bool,
    progress: Callable[[int, int, str], None],
) -> list[Run]:
    """The records of all runs, the first two with equal loads. loads: of the other runs; by default uneven ones, and
    those of an idle rank. progress: called with steps done, their number, and a note.

    Raises PacelineError if the program cannot be run, or makes no step with a Pace.
    """
    check_command(command)
    runs = []
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as place:
        every = plans(Path(place), steps, loads, batch_norm)
        for number, plan in enumerate(every):

            def note(done: int, number: int = number, name: str = plan["name"]) -> None:
                progress(
                    number * steps + done, len(every) * steps, f"run {number + 1} of {len(every)}: {name}"
                )

            runs.append(_run(command, plan, note))
    return runs


def plans(place: Path, steps: int, loads: list[list[int]] | None, batch_norm: bool) -> list[dict[str, Any]]:
    """What ``inside`` does in each run. place: where the records go."""
    others: list[Any] = [UNEVEN, IDLE] if loads is None else list(loads)
    named = {FIRST: EQUAL, "equal again": EQUAL}
    named |= {each if isinstance(each, str) else "-".join(map(str, each)): each for each in others}
    shared = {"place": str(place), "steps": steps, "batch_norm": batch_norm}
    return [shared | {"name": name, "loads": each} for name, each in named.items()]


def recorded(plan: dict[str, Any]) -> Run:
    """What the ranks wrote down. Raises PacelineError if that is nothing to compare."""
    place = Path(plan["place"])
    if (place / WRONG).exists():
        raise PacelineError((place / WRONG).read_text(encoding="utf-8"))
    files = sorted((place / plan["name"]).glob("*.jsonl"))
    run = Run(plan["name"], {int(path.stem): read(path) for path in files})
    if not run.ranks:
        raise PacelineError(
            "the program made no Pace on this machine; expected a ported script, see docs/porting.md"
        )
    if not run.steps and not any(run.lines("no room")):
        raise PacelineError(
            "the program made no step of a torch.optim optimizer with its Pace; let it train longer"
        )
    return run


def _run(command: Sequence[str], plan: dict[str, Any], progress: Callable[[int], None]) -> Run:
    """The record of one run. Raises PacelineError if the program fails, or leaves no record."""
    place, name = Path(plan["place"]), plan["name"]
    (folder := place / name).mkdir()
    (tmp := place / f"tmp-{name}").mkdir()
    added = {key: value.format(tmp=tmp) for key, value in QUIET.items()} | {PLAN: json.dumps(plan)}
    entry = entering("paceline.torch.pace", "Pace", "paceline.verify.inside:enter")
    lines: deque[str] = deque(maxlen=KEPT)
    last, since = -1, time.monotonic()
    with started(command, entry | added, lines.append) as process:
        while process.poll() is None:
            done = _done(folder)
            if done != last:
                last, since = done, time.monotonic()
                progress(done)
            if time.monotonic() - since > SILENT_SECONDS:
                raise PacelineError(
                    f"{name} loads: the program made no step within {SILENT_SECONDS:.0f} s, after {last}"
                )
            time.sleep(LOOK_SECONDS)
        status = process.returncode
    if status and not (place / WRONG).exists():
        raise PacelineError(f"{name} loads: {failure(lines, status)}")
    return recorded(plan)


def _done(folder: Path) -> int:
    """Steps of rank 0 so far."""
    path = folder / "0.jsonl"
    return path.read_bytes().count(b'{"kind": "step"') if path.exists() else 0


def failure(lines: Sequence[str], status: int) -> str:
    """The program's own error among the last lines of its output, with the file and line where it was raised."""
    where = ""
    for line in lines:
        if found := _PLACE.match(line):
            where = f" ({found[1]}, line {found[2]})"
        elif (error := _ERROR.match(line.rstrip())) and not any(part in line for part in _NOT_ITS_OWN):
            return f"the program failed: {error[1][:300]}{where}"
    said = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"the program ended with status {status}" + (f": {said[:200]}" if said else "")
