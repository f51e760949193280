"""Workers' speeds over time, as a CSV file: played back in training, in simulation, and written from records.

    round,worker,seconds_per_sample,overhead_seconds
    0,0,0.001,0
    0,1,0.004,0.002

Rounds are consecutive, workers are numbered from 0, the rows may come in any order and other columns are
ignored. A worker that was absent from a round has no row for it, or an empty or NaN field.
"""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.files import write_whole

Array = NDArray[np.float64]
COLUMNS = ("round", "worker", "seconds_per_sample", "overhead_seconds")


class Trace(NamedTuple):
    """Speeds of n workers over T rounds; NaN where a worker was absent.

    seconds_per_sample: seconds, shape (T, n).
    overhead: seconds a round that do not grow with the load, shape (T, n).
    """

    seconds_per_sample: Array
    overhead: Array


def read(path: str | os.PathLike[str], gaps: Literal["error", "absent"] = "error") -> Trace:
    """Read a trace. With ``gaps="absent"`` a missing row or a NaN means that the worker was absent.

    Raises PacelineError, naming the line, for a missing column, a field that is no number, seconds that are
    not positive, an overhead below zero, a row given twice, a worker or a round left out.
    """
    path = Path(path)
    rows = _rows(path)
    if not len(rows):
        raise PacelineError(f"{path}: no rows below the header; expected {','.join(COLUMNS)}")
    _check_rows(path, rows, gaps)
    return _fill(path, rows, gaps)


def write(path: str | os.PathLike[str], trace: Trace) -> Path:
    """Write a trace that ``read`` gives back exactly; an absent worker's fields are nan."""
    rounds, workers = np.indices(trace.seconds_per_sample.shape)
    columns = (rounds.ravel(), workers.ravel(), trace.seconds_per_sample.ravel(), trace.overhead.ravel())
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = (f"{t},{i},{seconds!r},{overhead!r}\n" for t, i, seconds, overhead in rows)
    return write_whole(path, ",".join(COLUMNS) + "\n" + "".join(lines))


def _rows(path: Path) -> Array:
    """The four columns as written, shape (rows, 4)."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt")  # no rows: said below
            header = [name.strip() for name in next(csv.reader(file), [])]
            missing = [name for name in COLUMNS if name not in header]
            if missing:
                raise PacelineError(
                    f"{path}, line 1: no column {', '.join(missing)}; expected {','.join(COLUMNS)}"
                )
            places = [header.index(name) for name in COLUMNS]
            try:
                return np.loadtxt(
                    file, delimiter=",", usecols=places, ndmin=2, comments=None, quotechar='"'
                ).reshape(-1, 4)
            except ValueError:
                return _rows_slowly(path, places)
    except OSError as error:
        raise PacelineError(f"cannot read the trace {path}: {error.strerror}; expected a CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise PacelineError(f"{path} is no text; expected a CSV file with {','.join(COLUMNS)}") from error


def _rows_slowly(path: Path, places: list[int]) -> Array:
    """As ``_rows``, line by line: finds the line at fault, and takes empty fields for NaN."""
    rows = []
    for line, fields in _lines(path):
        row = []
        for name, place in zip(COLUMNS, places, strict=True):
            text = fields[place].strip() if place < len(fields) else None
            if text is None:
                raise PacelineError(f"{path}, line {line}: no {name}; expected {len(COLUMNS)} fields")
            try:
                row.append(float(text) if text or name in COLUMNS[:2] else np.nan)
            except ValueError as error:
                raise PacelineError(f"{path}, line {line}: {name} is {text!r}; expected a number") from error
        rows.append(row)
    return np.array(rows, np.float64).reshape(-1, 4)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Line numbers and fields of every row below the header; blank lines hold no row."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        next(reader)
        return [(reader.line_num, fields) for fields in reader if fields]


def _check_rows(path: Path, rows: Array, gaps: str) -> None:
    number, worker, seconds, overhead = rows.T
    absent = np.isnan(seconds) if gaps == "absent" else np.zeros(len(rows), bool)
    for name, values in (("round", number), ("worker", worker)):
        ok = (values >= 0) & (values < 2**53) & (values == np.floor(values))
        _refuse(path, ~ok, f"{name} is {{}}; expected a whole number, 0 or more", values)
    _refuse(
        path,
        ~(absent | (seconds > 0) & (seconds < np.inf)),
        "seconds_per_sample is {}; expected more than 0",
        seconds,
    )
    _refuse(
        path,
        ~(absent | (overhead >= 0) & (overhead < np.inf)),
        "overhead_seconds is {}; expected 0 or more",
        overhead,
    )


def _refuse(path: Path, wrong: NDArray[np.bool_], sentence: str, values: Array) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        _fail(path, row, sentence.format(f"{values[row]:g}"))


def _fail(path: Path, row: int, sentence: str) -> NoReturn:
    raise PacelineError(f"{path}, line {_lines(path)[row][0]}: {sentence}")


def _fill(path: Path, rows: Array, gaps: str) -> Trace:
    number, worker = rows[:, 0].astype(np.int64), rows[:, 1].astype(np.int64)
    first, shape = number.min(), (int(np.ptp(number)) + 1, int(worker.max()) + 1)
    for name, values, low, size in (("round", number, first, shape[0]), ("worker", worker, 0, shape[1])):
        seen = np.unique(values)
        if len(seen) < size:
            step = np.diff(np.concatenate(([low - 1], seen)))
            before = seen[np.argmax(step > 1)]
            row = int(np.argmax(values == before))
            _fail(path, row, f"{name} {before} with no {name} {before - 1}; expected none left out")
    order = np.lexsort((worker, number))
    cell = (number - first)[order] * shape[1] + worker[order]
    again = np.diff(cell) == 0
    if again.any():
        row = int(order[1:][again].min())
        _fail(
            path,
            row,
            f"round {number[row]} of worker {worker[row]} is given a second time; expected each once",
        )
    if gaps == "error" and len(cell) < shape[0] * shape[1]:
        hole = int(np.argmax(np.append(cell, -1) != np.arange(len(cell) + 1)))
        t, i = divmod(hole, shape[1])
        row = int(order[max(hole - 1, 0)])
        _fail(
            path,
            row,
            f"after this row worker {i} has none in round {t + first}; expected every worker in every round",
        )
    filled = np.full((2, shape[0] * shape[1]), np.nan)
    filled[:, cell] = rows[order, 2:].T
    filled[1, np.isnan(filled[0])] = np.nan
    return Trace(filled[0].reshape(shape), filled[1].reshape(shape))
