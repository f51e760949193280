"""Workers' speeds over time, as a CSV file: played back in training, in simulation, and written from records.

    round,worker,seconds_per_sample,overhead_seconds
    0,0,0.001,0
    0,1,0.004,0.002

Rounds are consecutive, workers are numbered from 0, the rows may come in any order and other columns are
ignored. A worker that was absent from a round has no row for it, or an empty or NaN field.
"""

from __future__ import annotations

import csv
import io
import os
import warnings
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from paceline import costs
from paceline.costs import Array
from paceline.errors import PacelineError
from paceline.files import open_file, write_whole

__all__ = ["Trace", "read", "write"]

COLUMNS = ("round", "worker", "seconds_per_sample", "overhead_seconds")
CELLS = 10**8  # rounds times workers, at most: each takes 16 bytes, however few rows there are


class Trace(NamedTuple):
    """Speeds of n workers over T rounds; NaN where a worker was absent.

    seconds_per_sample: seconds, shape (T, n).
    overhead: seconds a round that do not grow with the load, shape (T, n).
    """

    seconds_per_sample: Array
    overhead: Array


def read(path: str | os.PathLike[str], gaps: Literal["error", "absent"] = "error") -> Trace:
    """Read a trace. With ``gaps="absent"`` a missing row or a NaN means that the worker was absent.

    Raises PacelineError, naming the line, for a missing or repeated column, a row with more or fewer fields than
    the header, a field that is no number, seconds outside of ``costs.SPAN``, a row given twice, a worker or
    a round left out.
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
        with _text(path) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "loadtxt")  # no rows: said below
            header = [name.strip() for name in next(csv.reader(file), [])]
            places = _places(path, header)
            body = file.read()
            if '"' in body or not _even(body, len(header)):
                return _rows_slowly(path, places, len(header))
            try:
                rows: Array = np.loadtxt(
                    io.StringIO(body), delimiter=",", usecols=places, ndmin=2, comments=None
                )
                return rows.reshape(-1, 4)
            except ValueError:
                return _rows_slowly(path, places, len(header))
    except OSError as error:
        raise PacelineError(f"cannot read the trace {path}: {error.strerror}; expected a CSV file") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise PacelineError(f"{path} is no text; expected a CSV file with {','.join(COLUMNS)}") from error


def _places(path: Path, header: list[str]) -> list[int]:
    """Where the four columns stand."""
    for name in COLUMNS:
        if header.count(name) > 1:
            raise PacelineError(f"{path}, line 1: {header.count(name)} columns {name}; expected one")
    missing = [name for name in COLUMNS if name not in header]
    if missing:
        raise PacelineError(f"{path}, line 1: no column {', '.join(missing)}; expected {','.join(COLUMNS)}")
    return [header.index(name) for name in COLUMNS]


def _even(body: str, width: int) -> bool:
    """Whether every line has as many fields as the header, by its commas; quotes are for the slow way."""
    return all(line.count(",") == width - 1 for line in body.split("\n") if line.strip())


def _rows_slowly(path: Path, places: list[int], width: int) -> Array:
    """As ``_rows``, line by line: finds the line at fault, and takes empty fields for NaN."""
    rows = []
    for line, fields in _lines(path):
        row = []
        for name, place in zip(COLUMNS, places, strict=True):
            text = fields[place].strip() if place < len(fields) else None
            if text is None:
                raise PacelineError(f"{path}, line {line}: no {name}; expected {width} fields")
            try:
                row.append(_number(text) if text or name in COLUMNS[:2] else np.nan)
            except ValueError as error:
                raise PacelineError(f"{path}, line {line}: {name} is {text!r}; expected a number") from error
        if len(fields) != width:
            raise PacelineError(
                f"{path}, line {line}: {len(fields)} fields; expected {width}, as in the header"
            )
        rows.append(row)
    return np.array(rows, np.float64).reshape(-1, 4)


def _number(text: str) -> float:
    """As ``float``, without what only Python's own source calls a number: 1_0."""
    if "_" in text or not text.isascii():
        raise ValueError(text)
    return float(text)


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """Line numbers and fields of every row below the header; blank lines hold no row."""
    with _text(path) as file:
        reader = csv.reader(file)
        try:
            next(reader)
            return [(reader.line_num, fields) for fields in reader if fields]
        except csv.Error as error:
            raise PacelineError(f"{path}, line {reader.line_num}: {error}") from error


def _text(path: Path) -> io.TextIOWrapper:
    return io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="")


def _check_rows(path: Path, rows: Array, gaps: str) -> None:
    number, worker, seconds, overhead = rows.T
    absent = np.isnan(seconds) if gaps == "absent" else np.zeros(len(rows), bool)
    for name, values in (("round", number), ("worker", worker)):
        ok = (values >= 0) & (values < 2**53) & (values == np.floor(values))
        _refuse(path, ~ok, f"{name} is {{}}; expected a whole number, 0 or more", values)
    _refuse(
        path,
        costs.outside(seconds) & ~absent,
        f"seconds_per_sample is {{}}; expected {costs.SPAN} seconds",
        seconds,
    )
    _refuse(
        path,
        costs.outside(overhead, 0.0) & ~absent,
        f"overhead_seconds is {{}}; expected {costs.SPAN_0} seconds",
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
    if shape[0] * shape[1] > CELLS:
        raise PacelineError(
            f"{path}: {shape[0]:,} rounds of {shape[1]:,} workers; expected at most {CELLS:,} of both together"
        )
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
