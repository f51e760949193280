"""Traces of workers' speeds over time, as CSV files: replayed in training and in simulation, written from records.

    round,worker,seconds_per_sample,overhead_seconds
    0,0,0.001,0
    0,1,0.004,0.002

Rounds are consecutive, workers are numbered from 0, rows may be in any order, and other columns are
ignored. A worker that was absent from a round has no row for it, or an empty or NaN field.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np

from paceline import costs
from paceline.costs import Array
from paceline.errors import PacelineError, saying
from paceline.files import open_file, write_whole

__all__ = ["Trace", "read", "write"]

COLUMNS = ("round", "worker", "seconds_per_sample", "overhead_seconds")
Fail = Callable[[int, str], NoReturn]
CELLS = 10**8  # most rounds times workers: each takes 16 bytes, even if there are few rows


class Trace(NamedTuple):
    """Speeds of n workers over T rounds; NaN if a worker was absent.

    Attributes:
        seconds_per_sample: Seconds, shape (T, n).
        overhead: Seconds per round that do not grow with the load, shape (T, n).
    """

    seconds_per_sample: Array
    overhead: Array


def read(path: str | os.PathLike[str], gaps: Literal["error", "absent"] = "error") -> Trace:
    """Read a trace.

    Args:
        path: A CSV file.
        gaps: "absent" takes a missing row or a NaN for a worker that was absent; "error" refuses them.

    Returns:
        The trace of T rounds and n workers.

    Raises:
        PacelineError: Naming the line, for a missing or repeated column, a row with more or fewer fields than the
            header, a field that is not a number, seconds outside of ``costs.SPAN``, a repeated row, a missing worker
            or a missing round.
    """
    path = Path(path)
    lines, rows = _rows(path)
    if not len(rows):
        raise PacelineError(f"{path}: no rows below the header; expected {','.join(COLUMNS)}")

    def fail(row: int, sentence: str) -> NoReturn:
        raise PacelineError(f"{path}, line {lines[row]}: {sentence}")

    _check_rows(rows, gaps, fail)
    return _fill(path, rows, gaps, fail)


def write(path: str | os.PathLike[str], trace: Trace) -> Path:
    """Write a trace, which ``read`` returns exactly; an absent worker's fields are nan.

    Args:
        path: The CSV file to write.
        trace: Seconds per sample and overheads of each round.

    Returns:
        The path.
    """
    rounds, workers = np.indices(trace.seconds_per_sample.shape)
    columns = (rounds.ravel(), workers.ravel(), trace.seconds_per_sample.ravel(), trace.overhead.ravel())
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = (f"{t},{i},{seconds!r},{overhead!r}\n" for t, i, seconds, overhead in rows)
    return write_whole(path, ",".join(COLUMNS) + "\n" + "".join(lines))


def _rows(path: Path) -> tuple[list[int], Array]:
    """The number of each line below the header that is not blank, and its four columns, shape (rows, 4)."""
    lines, rows = [], []
    try:
        with (
            saying(f"cannot read the trace {path}", "expected a CSV file"),
            io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file,
        ):
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            places = _places(path, header)
            for fields in filter(None, reader):
                lines.append(reader.line_num)
                try:
                    rows.append([_number(fields[place]) for place in places])
                except (ValueError, IndexError):
                    rows.append([])
                if len(fields) != len(header) or not rows[-1]:
                    raise PacelineError(f"{path}, line {lines[-1]}: {_wrong(fields, places, len(header))}")
    except UnicodeDecodeError as error:
        raise PacelineError(f"{path} is not text; expected a CSV file with {','.join(COLUMNS)}") from error
    except csv.Error as error:
        raise PacelineError(f"{path}, line {reader.line_num}: {error}") from error
    return lines, np.array(rows, np.float64).reshape(-1, 4)


def _wrong(fields: list[str], places: list[int], width: int) -> str:
    """Why a line is not a row of four numbers with the header's number of fields."""
    for name, place in zip(COLUMNS, places, strict=True):
        if place >= len(fields):
            return f"no {name}; expected {width} fields"
        try:
            _number(fields[place])
        except ValueError:
            return f"{name} is {fields[place].strip()!r}; expected a number"
    return f"{len(fields)} fields; expected {width}, as in the header"


def _places(path: Path, header: list[str]) -> list[int]:
    """The indices of the four columns."""
    for name in COLUMNS:
        if header.count(name) > 1:
            raise PacelineError(f"{path}, line 1: {header.count(name)} columns {name}; expected one")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise PacelineError(f"{path}, line 1: no column {', '.join(missing)}; expected {','.join(COLUMNS)}")
    return [header.index(name) for name in COLUMNS]


def _number(text: str) -> float:
    """A field as a number, NaN if it is empty. Raises ValueError also for forms of Python's source, such as 1_0."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text) if text.strip() else np.nan


def _check_rows(rows: Array, gaps: str, fail: Fail) -> None:
    number, worker, seconds, overhead = rows.T
    absent = np.isnan(seconds) if gaps == "absent" else np.zeros(len(rows), bool)
    odd = ~((rows >= 0) & (rows < 2**53) & (rows == np.floor(rows)))
    checks = (
        ("round", odd[:, 0], number, "a whole number, 0 or more"),
        ("worker", odd[:, 1], worker, "a whole number, 0 or more"),
        ("seconds_per_sample", costs.outside(seconds) & ~absent, seconds, f"{costs.SPAN} seconds"),
        ("overhead_seconds", costs.outside(overhead, 0.0) & ~absent, overhead, f"{costs.SPAN_0} seconds"),
    )
    for name, wrong, values, expected in checks:
        if wrong.any():
            row = int(np.argmax(wrong))
            fail(row, f"{name} is {values[row]:g}; expected {expected}")


def _fill(path: Path, rows: Array, gaps: str, fail: Fail) -> Trace:
    number, worker = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    first, shape = number.min(), (int(np.ptp(number)) + 1, int(worker.max()) + 1)
    for name, values, low, size in (("round", number, first, shape[0]), ("worker", worker, 0, shape[1])):
        seen = np.unique(values)
        if len(seen) < size:
            step = np.diff(np.concatenate(([low - 1], seen)))
            before = seen[np.argmax(step > 1)]
            row = int(np.argmax(values == before))
            fail(row, f"{name} {before} with no {name} {before - 1}; expected none left out")
    if shape[0] * shape[1] > CELLS:
        raise PacelineError(
            f"{path}: {shape[0]:,} rounds of {shape[1]:,} workers; expected at most {CELLS:,} rounds times workers"
        )
    order = np.lexsort((worker, number))
    cell = (number - first)[order] * shape[1] + worker[order]
    again = np.diff(cell) == 0
    if again.any():
        row = int(order[1:][again].min())
        fail(row, f"round {number[row]} of worker {worker[row]} is given a second time; expected each once")
    if gaps == "error" and len(cell) < shape[0] * shape[1]:
        hole = int(np.argmax(np.append(cell, -1) != np.arange(len(cell) + 1)))
        t, i = divmod(hole, shape[1])
        row = int(order[max(hole - 1, 0)])
        fail(
            row,
            f"after this row worker {i} has none in round {t + first}; expected every worker in every round",
        )
    filled = np.full((2, shape[0] * shape[1]), np.nan)
    filled[:, cell] = rows[order, 2:].T
    filled[1, np.isnan(filled[0])] = np.nan
    return Trace(filled[0].reshape(shape), filled[1].reshape(shape))
