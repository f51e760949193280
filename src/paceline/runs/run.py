"""Reads the record of a run into arrays, also if the run was killed or is still going.

A worker waits from the end of its own work until the last worker of the round has finished its work. The rest of the
round (the exchange of gradients, the optimizer's step, logging) is not waiting: it takes the same time for all
workers, and no division of the batch shortens it. Records, reports, forecasts and the doctor all use this definition
(``waits``).

Each line of the record ends with a checksum:

    {"round":7,...,"loss":0.52,"sum":"1f0c9a3e"}

``sum`` is the CRC-32 of the text before it in the line, started with the sum of the line above: a changed byte, or
a line that was left out, doubled or moved, shows at the first line that does not match.
"""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline import costs, files
from paceline.costs import Array
from paceline.errors import PacelineError, saying

SCALARS = ("round", "epoch", "time", "seconds", "batch", "loss")
PER_WORKER = ("loads", "compute", "overhead", "wait")
SECONDS = ("time", "seconds", "compute", "overhead", "wait")
COUNTS = ("round", "epoch", "batch")
MANY = 2**53  # whole numbers up to this one are exact as floats
CHECKSUM = re.compile(rb',"sum":"([0-9a-f]{8})"\}\s*')


def with_checksum(text: str, before: str = "") -> tuple[bytes, str]:
    """A line with its checksum, and that sum. text: a JSON object; before: the sum of the line above."""
    body = text[:-1].encode()
    found = _sum(body, before)
    return body + f',"sum":"{found}"}}\n'.encode(), found


def read_all(texts: list[bytes], before: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], str]:
    """The lines up to the first faulty one, and what is wrong with that one ("" if none is faulty).

    before: the line above the first.
    """
    lines: list[dict[str, Any]] = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return lines, "is not valid JSON"
        found = CHECKSUM.search(text)
        if found is None or found.end() != len(text):
            return lines, "has no checksum at its end"
        if _sum(text[: found.start()], "" if before is None else before["sum"]) != found[1].decode():
            return lines, "does not match its checksum: it or a line above it was changed, left out or moved"
        if wrong := fault(line):
            return lines, wrong
        if before is not None and line["round"] <= before["round"]:
            return lines, f"is round {line['round']:.0f}, after round {before['round']:.0f}"
        lines.append(before := line)
    return lines, ""


def fault(line: Any) -> str:
    """What is wrong with a single line; empty if nothing is."""
    if not isinstance(line, dict):
        return "is not a JSON object"
    for name in SCALARS:
        value = line.get(name, "missing")
        if name == "loss" and value is None:
            continue
        if not is_number(value):
            return f"has no number for {name}"
        if name in SECONDS and costs.outside(value, 0.0):
            return f"has {value:g} for {name}; expected {costs.SPAN_0} seconds"
        if name in COUNTS and not (0 <= value < MANY and value == int(value)):
            return f"has {value:g} for {name}; expected a whole number, 0 or more"
    for name in PER_WORKER:
        value = line.get(name, "missing")
        if not isinstance(value, list) or len(value) != len(line["loads"]):
            return f"has no list of one number per worker for {name}"
        for item in value:
            if item is None:
                continue
            if not is_number(item):
                return f"has a value that is not a number in {name}"
            if item < 0 or (name in SECONDS and item > costs.MOST) or item > MANY:
                return f"has {item:g} in {name}; expected 0 or more, and seconds up to 1e9"
    for name, sound in EXTRAS.items():
        if line.get(name) is not None and not sound(line[name]):
            return f"has an invalid value for {name}"
    sizes, times = line.get("pieces"), line.get("piece_seconds")
    if sizes and times and [len(row) for row in sizes] != [len(row) for row in times]:
        return "has pieces without their seconds"
    return ""


Sound = Callable[[Any], bool]  # whether a value is valid


def is_number(value: Any) -> bool:
    """Whether a JSON value is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _list(each: Sound) -> Sound:
    return lambda value: isinstance(value, list) and all(map(each, value))


_numbers = _list(lambda value: value is None or is_number(value))
EXTRAS: dict[str, Sound] = {  # plans, and the fields of parameter servers and of rounds in pieces
    **dict.fromkeys(("quorum", "present", "rate", "at_once", "piece_cost", "dropped_samples"), is_number),
    **dict.fromkeys(("pieces", "piece_seconds"), _list(_numbers)),
    **dict.fromkeys(("shares", "staleness", "ran_out", "links", "dropped_loads"), _numbers),
    "parts": _list(lambda row: row is None or (_numbers(row) and len(row) == 3)),
    "dropped": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
    "events": lambda value: isinstance(value, list),
    "names": _list(lambda value: value is None or isinstance(value, str)),
}


def _sum(body: bytes, before: str) -> str:
    return f"{zlib.crc32(body, int(before, 16) if before else 0):08x}"


CONFIG, ROUNDS, SUMMARY = "run.json", "rounds.jsonl", "summary.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The record of one run of T rounds and n workers, the largest number of workers that the run ever had.

    Attributes:
        path: Its directory.
        config: The content of run.json.
        round: The rounds' numbers, from 0, shape (T,).
        epoch: Epoch of each round, from 0, shape (T,).
        time: Seconds since the run started at the end of each round, shape (T,).
        seconds: Wall seconds of each round, shape (T,).
        batch: Samples of each round, shape (T,).
        loss: Mean loss of each round, shape (T,); NaN if none was recorded.
        loads: Samples of each worker, shape (T, n); NaN if it was absent.
        compute: Seconds that each worker computed, shape (T, n); NaN if it was absent.
        overhead: The part of ``compute`` that does not grow with the load, shape (T, n).
        wait: Seconds that each worker waited, shape (T, n), see ``waits``.
        extras: The other fields by name, a list of T values each, None if a round had none.
        summary: The content of summary.json; empty before the end of the run.
        notes: Sentences on irregularities of the record.
        names: The newest name of each worker that has one, by its number.
    """

    path: Path
    config: dict[str, Any]
    round: NDArray[np.int64]
    epoch: NDArray[np.int64]
    time: Array
    seconds: Array
    batch: Array
    loss: Array
    loads: Array
    compute: Array
    overhead: Array
    wait: Array
    extras: dict[str, list[Any]]
    summary: dict[str, Any]
    notes: list[str]
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def workers(self) -> int:
        """Number of workers n."""
        return self.loads.shape[1]

    @property
    def policy(self) -> str:
        """The policy's name, as the configuration gives it."""
        return str(self.config.get("policy", "unknown"))

    def named(self, worker: int) -> str:
        """A worker in a sentence.

        Args:
            worker: Its number, from 0.

        Returns:
            The number, with the name after it if it has one, as "2 (gpu-1)".
        """
        return named(worker, self.names)


def named(worker: int, names: Mapping[int, str]) -> str:
    """The number of a worker, with its name after it if it has one."""
    return f"{worker} ({names[worker]})" if worker in names else str(worker)


def read(run_dir: str | os.PathLike[str]) -> Run:
    """Read a run directory, also of a run that is still going or was killed.

    A last line that was cut off is left out, and ``notes`` says so.

    Args:
        run_dir: The directory of a run.

    Returns:
        The record.

    Raises:
        PacelineError: If there is no run, or if the record is damaged elsewhere; ``fault`` and ``read_all`` define
            what counts as damage.
    """
    run_dir = Path(run_dir)
    config = read_facts(run_dir / CONFIG)
    if config is None:
        raise PacelineError(
            f"{run_dir} is not a run directory (it has no {CONFIG}); expected the output directory of a run"
        )
    summary = read_facts(run_dir / SUMMARY) or {}
    notes: list[str] = []
    run = of_lines(run_dir, config, _lines(run_dir / ROUNDS, notes))
    steps = summary.get("steps")
    if steps is not None and steps != len(run.round):
        raise PacelineError(
            f"{run_dir / ROUNDS} holds {len(run.round):,} rounds, but {SUMMARY} reports {steps:,}: lines at its end "
            f"are lost; restore the file, or delete {SUMMARY} to continue with the rounds that are left"
        )
    gaps = np.flatnonzero(np.diff(run.round, prepend=-1) != 1)
    if len(gaps):
        notes.append(f"Rounds are missing from the record, first before round {run.round[gaps[0]]:,}.")
    return replace(run, summary=summary, notes=notes)


def of_lines(run_dir: Path, config: dict[str, Any], lines: list[dict[str, Any]]) -> Run:
    """The rounds of a run from valid lines of its record."""
    columns: dict[str, Any] = {name: np.array([line[name] for line in lines], float) for name in SCALARS}
    columns |= {name: columns[name].astype(np.int64) for name in ("round", "epoch")}
    width = max((len(line["loads"]) for line in lines), default=config.get("workers") or 0)
    columns |= {name: _matrix([line[name] for line in lines], width) for name in PER_WORKER}
    columns["wait"] = waits(columns["seconds"], columns["compute"])
    others = dict.fromkeys(name for line in lines for name in line if name not in columns and name != "sum")
    extras = {name: [line.get(name) for line in lines] for name in others}
    names: dict[int, str] = {}
    for row in extras.get("names", ()):
        names |= {i: name for i, name in enumerate(row or ()) if name is not None}
    return Run(path=run_dir, config=config, **columns, extras=extras, summary={}, notes=[], names=names)


def read_facts(path: Path) -> dict[str, Any] | None:
    """The content of run.json or summary.json; None if there is no such file.

    Raises PacelineError if the file is damaged, or a known field has another type than engines write.
    """
    try:
        content = json.loads(files.read(path, files.SMALL))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise PacelineError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise PacelineError(f"{path} is damaged: it is not valid JSON; restore it or run again") from error
    if not isinstance(content, dict):
        raise PacelineError(f"{path} is damaged: it is not a JSON object; restore it or run again")
    for name, (sound, expected) in FACTS[path.name].items():
        if content.get(name) is not None and not sound(content[name]):
            given = str(content[name])[:60]
            raise PacelineError(f"{path} is damaged: {name} is {given}; expected {expected}; restore it")
    return content


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    with saying(f"cannot read {path}"):
        raw = files.read(path).split(b"\n") if path.exists() else [b""]
    if raw.pop():  # the text after the last newline is an incomplete write
        notes.append(f"The last line of {path.name} was cut off, as when a run is killed; it is left out.")
    lines, wrong = read_all(raw)
    if wrong:
        raise PacelineError(f"{path}, line {len(lines) + 1} is damaged: it {wrong}; cut the file before it")
    return lines


def _matrix(rows: list[list[float | None] | None], width: int) -> Array:
    """Rows of one number per worker, shape (T, width); NaN for null, and for workers that a round did not have."""
    matrix = np.full((len(rows), width), np.nan)
    for index, row in enumerate(rows):
        if row is not None:
            matrix[index, : len(row)] = row  # None becomes NaN
    return matrix


def waits(seconds: Any, compute: Any) -> Array:
    """Seconds that each worker waited for the last one, shape (..., n); NaN if it was absent.

    seconds: of each round, shape (...). compute: seconds of each worker's own work, shape (..., n), NaN if it
    was absent. If a round did not wait for its last worker, the others' waiting ends with the round.
    """
    compute = np.asarray(compute, np.float64)
    if compute.shape[-1] == 0:
        return compute
    latest = np.where(np.isnan(compute), -np.inf, compute).max(axis=-1)
    ended = np.minimum(latest, np.asarray(seconds, np.float64))
    return np.where(np.isnan(compute), np.nan, np.maximum(ended[..., None] - compute, 0.0))


def waiting_share(seconds: Any, compute: Any) -> float | None:
    """Portion of the workers' time spent waiting, summed over rounds and workers; None if that time is 0.

    The time of a worker is that of all rounds in which it was present. Shapes as in ``waits``.
    """
    there = ~np.isnan(np.asarray(compute, np.float64))
    paid = float((np.asarray(seconds, np.float64)[..., None] * there).sum())
    return float(np.nansum(waits(seconds, compute))) / paid if paid > 0 else None


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MANY


_limit = _list(lambda value: value is None or _count(value))
_limits = _list(lambda pair: _limit(pair) and len(pair) == 2)
Fact = tuple[Sound, str]  # the check, and the expected value in words
FIGURES = (
    *("seconds", "samples_per_second", "bound_samples_per_second", "share_of_bound", "idle_share"),
    *("train_loss", "test_accuracy"),
)
COUNT: Fact = (_count, "a whole number")
FACTS: dict[str, dict[str, Fact]] = {  # by file: the checks of its known fields
    CONFIG: dict.fromkeys(("workers", "global_batch", "loader_workers"), COUNT)
    | {
        "policy": (lambda value: isinstance(value, str), "a string"),
        "limits": (
            lambda value: value == "memory" or _limits(value),
            'a pair of whole numbers per worker, or "memory"',
        ),
        "resumed": (
            _list(lambda part: isinstance(part, dict) and _count(part.get("round", 0))),
            "a list of the parts, each with its round",
        ),
    },
    SUMMARY: dict.fromkeys(FIGURES, (is_number, "a number"))
    | dict.fromkeys(("steps", "samples"), COUNT)
    | {"final_batches": (_list(_count), "a list of whole numbers")},
}


def runs_in(folder: Path) -> list[Path]:
    """The runs directly below a folder, in the order of their starts; empty if the folder is itself a run."""
    if (folder / CONFIG).is_file():
        return []
    found = []
    for config in folder.glob(f"*/{CONFIG}"):
        with suppress(OSError):  # it was deleted meanwhile
            found.append((config.stat().st_mtime, config.parent))
    return [run for _, run in sorted(found)]
