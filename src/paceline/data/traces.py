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
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from paceline import costs
from paceline.costs import Array
from paceline.errors import PacelineError
from paceline.files import open_file, write_whole

__all__ = ["Trace", "read", "write"]

COLUMNS = ("round", "worker", "seconds_per_sample", "overhead_seconds")
CELLS = 10**8  # rounds times workers, at most: each takes 16 bytes, however few rows there are


class Trace(NamedTuple):
    """Speeds of n workers over T rounds; NaN if a worker was absent.

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
    cells: dict[
        tuple[int, int], tuple[int, float, float]
    ] = {}  # by round and worker: line, seconds, overhead
    for line, fields in _rows(path):
        if wrong := _wrong(fields, gaps):
            raise PacelineError(f"{path}, line {line}: {wrong}")
        cell = int(fields[0]), int(fields[1])
        if cell in cells:
            raise PacelineError(
                f"{path}, line {line}: round {cell[0]} of worker {cell[1]} is given a second time; expected each once"
            )
        cells[cell] = line, fields[2], fields[3]
    if not cells:
        raise PacelineError(f"{path}: no rows below the header; expected {','.join(COLUMNS)}")
    rounds, workers = (sorted({cell[axis] for cell in cells}) for axis in (0, 1))
    for axis, name, seen, first in ((0, "round", rounds, rounds[0]), (1, "worker", workers, 0)):
        for number, due in zip(seen, range(first, first + len(seen)), strict=True):
            if number != due:
                line = next(cells[cell][0] for cell in cells if cell[axis] == number)
                raise PacelineError(
                    f"{path}, line {line}: {name} {number} with no {name} {number - 1}; expected none left out"
                )
    shape = len(rounds), len(workers)
    if shape[0] * shape[1] > CELLS:
        raise PacelineError(
            f"{path}: {shape[0]:,} rounds of {shape[1]:,} workers; expected at most {CELLS:,} of both together"
        )
    filled = np.full((2, *shape), np.nan)
    line = 1
    for t, i in product(rounds, workers) if gaps == "error" else sorted(cells):
        if (t, i) not in cells:
            raise PacelineError(
                f"{path}, line {line}: after this row worker {i} has none in round {t}; expected every worker in "
                "every round"
            )
        line, *filled[:, t - rounds[0], i] = cells[t, i]
    filled[1, np.isnan(filled[0])] = np.nan
    return Trace(*filled)


def write(path: str | os.PathLike[str], trace: Trace) -> Path:
    """Write a trace that ``read`` gives back exactly; an absent worker's fields are nan."""
    rounds, workers = np.indices(trace.seconds_per_sample.shape)
    columns = (rounds.ravel(), workers.ravel(), trace.seconds_per_sample.ravel(), trace.overhead.ravel())
    rows = zip(*(column.tolist() for column in columns), strict=True)
    lines = (f"{t},{i},{seconds!r},{overhead!r}\n" for t, i, seconds, overhead in rows)
    return write_whole(path, ",".join(COLUMNS) + "\n" + "".join(lines))


def _rows(path: Path) -> Iterator[tuple[int, list[float]]]:
    """Each row: the number of its line, and its four columns."""
    try:
        with io.TextIOWrapper(open_file(path), encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = [name.strip() for name in next(reader, [])]
            for name in COLUMNS:
                if header.count(name) > 1:
                    raise PacelineError(f"{path}, line 1: {header.count(name)} columns {name}; expected one")
            if missing := [name for name in COLUMNS if name not in header]:
                raise PacelineError(
                    f"{path}, line 1: no column {', '.join(missing)}; expected {','.join(COLUMNS)}"
                )
            for fields in filter(None, reader):
                try:
                    values = [_number(name, fields[header.index(name) :]) for name in COLUMNS]
                    if len(fields) != len(header):
                        raise PacelineError(f"{len(fields)} fields; expected {len(header)}, as in the header")
                except PacelineError as error:
                    raise PacelineError(f"{path}, line {reader.line_num}: {error}") from None
                yield reader.line_num, values
    except OSError as error:
        raise PacelineError(f"cannot read the trace {path}: {error.strerror}; expected a CSV file") from error
    except UnicodeDecodeError as error:
        raise PacelineError(f"{path} is no text; expected a CSV file with {','.join(COLUMNS)}") from error
    except csv.Error as error:
        raise PacelineError(f"{path}, line {reader.line_num}: {error}") from error


def _number(name: str, fields: list[str]) -> float:
    """The first of these fields as a number, NaN if it is empty; not what only Python's own source calls a number, as
    1_0."""
    if not fields:
        raise PacelineError(f"no {name}; expected a number")
    text = fields[0].strip()
    try:
        if "_" in text or not text.isascii():
            raise ValueError
        return float(text) if text else np.nan
    except ValueError:
        raise PacelineError(f"{name} is {text!r}; expected a number") from None


def _wrong(fields: list[float], gaps: str) -> str:
    """Why a row's numbers cannot be; "" if they can."""
    absent = gaps == "absent" and np.isnan(fields[2])
    spans = (("a whole number, 0 or more",) * 2) + (f"{costs.SPAN} seconds", f"{costs.SPAN_0} seconds")
    for place, (name, value, expected) in enumerate(zip(COLUMNS, fields, spans, strict=True)):
        if place < 2:
            odd = not (0 <= value < 2**53 and value == int(value))
        else:
            odd = not absent and bool(costs.outside(value, 0.0 if place == 3 else costs.LEAST))
        if odd:
            return f"{name} is {value:g}; expected {expected}"
    return ""
