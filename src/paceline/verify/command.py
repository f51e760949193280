"""Run the program with each of the loads, and read what its ranks wrote down."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from paceline.attach.command import check_command, entering, started
from paceline.errors import PacelineError
from paceline.verify.compare import RunLog, settled, site
from paceline.verify.inside import FIRST, WRONG
from paceline.verify.loads import EQUAL, IDLE, ONE, UNEVEN
from paceline.verify.record import PLAN, read

KEPT = 400  # lines of the program's output that are kept to find its error in
LOOK_SECONDS = 0.05  # between two looks at the running program
# Where the program is entered: module, class, function.
PORTED = ("paceline.torch.balanced", "Balanced", "paceline.verify.inside:enter")
BEFORE = ("torch.optim.optimizer", "Optimizer", "paceline.verify.unported:enter")
UNPORTED = "unported"  # name of the run of the program before its port
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
_PYTHON = re.compile(r"^\S*python\S*: (.+)$")  # what the interpreter says before it runs anything
_USAGE = re.compile(r"^\S+: error: (.+)$")  # what argparse says
_MEMORY = re.compile(r"out of memory|can.t allocate memory|MemoryError|status -9")
_NOT_ITS_OWN = ("ChildFailedError", "torch.distributed.elastic")


def run_all(
    command: Sequence[str],
    steps: int,
    loads: list[list[int]] | None,
    batch_norm: bool,
    progress: Callable[[int, int, str], None],
) -> list[RunLog]:
    """The records of all runs, the first two with equal loads. loads: of the other runs; by default uneven ones, and
    those of an idle rank. progress: called with steps done, their number, and a note.

    Raises PacelineError if the program cannot be run, or makes no step with a Pace.
    """
    check_command(command)
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as place:
        every = plans(Path(place), steps, loads, batch_norm)

        def run(number: int) -> RunLog:
            plan = every[number]
            words = f"run {number + 1} of {len(every)}: {plan['name']}"
            ahead = number * steps
            try:
                return _run(command, plan, lambda done: progress(ahead + done, len(every) * steps, words))
            except PacelineError as error:
                if plan["name"] == ONE and _MEMORY.search(str(error)):
                    return RunLog(ONE, {})  # a round need not fit into one rank
                raise

        return in_turn(every, run)


def in_turn(every: list[dict[str, Any]], run: Callable[[int], RunLog]) -> list[RunLog]:
    """All runs, and once more those whose random draws had several dimensions that could hold the samples, if other
    runs have shown which one it is."""
    runs = [run(number) for number in range(len(every))]
    known = settled(runs)
    for number, each in enumerate(runs):
        if any(known.get(site(line)) for line in each.lines("square draw")):
            every[number]["known"] = known
            shutil.rmtree(Path(every[number]["place"]) / every[number]["name"])
            runs[number] = run(number)
    return runs


def plans(place: Path, steps: int, loads: list[list[int]] | None, batch_norm: bool) -> list[dict[str, Any]]:
    """What ``inside`` does in each run. place: where the records go."""
    others: list[Any] = [UNEVEN, IDLE, ONE] if loads is None else list(loads)
    named = {FIRST: EQUAL, "equal again": EQUAL}
    named |= {each if isinstance(each, str) else "-".join(map(str, each)): each for each in others}
    shared = {"place": str(place), "steps": steps, "batch_norm": batch_norm, "known": {}, "entry": PORTED}
    shared["asked"] = loads or []  # the first run refuses those that do not suit the ranks
    return [shared | {"name": name, "loads": each} for name, each in named.items()]


def recorded(plan: dict[str, Any]) -> RunLog:
    """What the ranks wrote down. Raises PacelineError if that is nothing to compare."""
    place = Path(plan["place"])
    if (place / WRONG).exists():
        raise PacelineError((place / WRONG).read_text(encoding="utf-8"))
    files = sorted((place / plan["name"]).glob("*.jsonl"))
    run = RunLog(plan["name"], {int(path.stem): read(path) for path in files})
    if not run.steps and plan["name"] == UNPORTED:
        raise PacelineError("--against: the program made no step of a torch.optim optimizer on this machine")
    if not run.ranks:
        raise PacelineError(
            "the program made no Pace on this machine; expected a ported script, see docs/porting.md"
        )
    if not run.steps and not any(run.lines("no room")):
        raise PacelineError(
            "the program made no step of a torch.optim optimizer with its Pace; let it train longer"
        )
    return run


def _run(command: Sequence[str], plan: dict[str, Any], progress: Callable[[int], None]) -> RunLog:
    """The record of one run. Raises PacelineError if the program fails, or leaves no record."""
    place, name = Path(plan["place"]), plan["name"]
    (folder := place / name).mkdir()
    (tmp := place / f"tmp-{name}").mkdir(exist_ok=True)
    added = {key: value.format(tmp=tmp) for key, value in QUIET.items()} | {PLAN: json.dumps(plan)}
    entry = entering(*plan["entry"])
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


def run_unported(command: Sequence[str], steps: int) -> RunLog:
    """The record of the program as it was before the port: the options of each optimizer step.

    Raises PacelineError if it cannot be run, or makes no step.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-verify-") as place:
        return _run(
            command, {"place": place, "name": UNPORTED, "steps": steps, "entry": BEFORE}, lambda _: None
        )


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
    matches = (pattern.match(line.strip()) for pattern in (_USAGE, _PYTHON) for line in lines)
    said = next((found[1] for found in matches if found), "")
    said = said or next((line.strip() for line in reversed(lines) if re.search(r"\w", line)), "")
    return f"the program ended with status {status}" + (f": {said[:200]}" if said else "")
