"""A coded product to be planned: several masters, each with a matrix of some rows, and the workers they share."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.coded.delay import Array, Delay, ShiftedExponential, Transmitted
from paceline.errors import PacelineError
from paceline.files import open_file


@dataclass(frozen=True)
class Problem:
    """M masters and N workers.

    rows: L, rows of each master's matrix, shape (M,), at least 1.
    delay: milliseconds for a row, pairs of shape (M, N).
    latency: milliseconds that a pair loses once per product however few its rows (sending x and the answer),
        shape (M, N), 0 or more; None for none.

    Raises PacelineError for no rows, fewer workers than masters, duplicate names and arrays that do not fit.
    """

    masters: tuple[str, ...]
    workers: tuple[str, ...]
    rows: Array
    delay: Delay
    latency: Array | None = None

    def __post_init__(self) -> None:
        m, n = len(self.masters), len(self.workers)
        for kind, names in (("master", self.masters), ("worker", self.workers)):
            if not names:
                raise PacelineError(f"no {kind}s: expected at least one")
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise PacelineError(f"{kind} {twice!r} is named twice; name each once")
        if n < m:
            raise PacelineError(
                f"{n} workers for {m} masters: expected a worker for each master at least; add {m - n}"
            )
        rows = np.asarray(self.rows, float)
        if rows.shape != (m,):
            raise PacelineError(
                f"rows of shape {rows.shape}: expected one number for each of the {m} masters"
            )
        for name, count in zip(self.masters, rows, strict=True):
            if not (math.isfinite(count) and count >= 1 and count == int(count)):
                raise PacelineError(
                    f"{count:g} rows for master {name!r}: expected a whole number of at least 1"
                )
        if self.delay.shape != (m, n):
            raise PacelineError(
                f"delay parameters of shape {self.delay.shape}: expected {m} masters x {n} workers, one for "
                f"each pair"
            )
        if self.latency is not None:
            latency = np.asarray(self.latency, float)
            if latency.shape != (m, n) or not (np.isfinite(latency).all() and (latency >= 0).all()):
                raise PacelineError(f"latency: expected {m} x {n} finite milliseconds, none of them negative")
            object.__setattr__(self, "latency", latency)
        object.__setattr__(self, "rows", rows)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N)."""
        return len(self.masters), len(self.workers)

    @property
    def wait(self) -> Array:
        """The latency as an array, zeros if there is none, shape (M, N)."""
        return np.zeros(self.shape) if self.latency is None else self.latency


def random_problem(
    masters: int, workers: int, rows: float, rng: np.random.Generator, speeds: Sequence[float] | None = None
) -> Problem:
    """A cluster as in the paper's section V: u uniform on [1, 5] per ms for each pair, a = 1 / u.

    speeds: draw u from these values instead, each as likely.
    """
    shape = (masters, workers)
    u = rng.uniform(1, 5, shape) if speeds is None else rng.choice(np.asarray(speeds, float), shape)
    return Problem(
        tuple(f"master{m}" for m in range(masters)),
        tuple(f"worker{n}" for n in range(workers)),
        np.full(masters, float(rows)),
        ShiftedExponential(u, 1 / u),
    )


def read_table(path: Path, required: Sequence[str], optional: Sequence[str] = ()) -> list[dict[str, str]]:
    """The lines of a CSV file with a header, each with its ``line`` number; blank lines are skipped.

    Raises PacelineError, naming the file and line, where the file or one of its columns is missing.
    """
    try:
        with io.TextIOWrapper(open_file(path), newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, skipinitialspace=True)
            header = [name.strip() for name in reader.fieldnames or []]
            reader.fieldnames = header
            lines = [{**line, "line": str(reader.line_num)} for line in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PacelineError(
            f"cannot read {path}: {reason}; give a CSV file with {', '.join(required)}"
        ) from error
    missing = [name for name in required if name not in header]
    if missing:
        raise PacelineError(
            f"{path} has columns {', '.join(header) or 'none'}: expected {', '.join(required)}"
            + (f" and, where known, {', '.join(optional)}" if optional else "")
        )
    if not lines:
        raise PacelineError(f"{path} has no lines below its header: expected one for each master and worker")
    for line in lines:
        if None in line or any(line.get(name) is None for name in required):
            raise PacelineError(
                f"{path}, line {line['line']}: expected {len(header)} fields, as many as the header has"
            )
    return lines


def positive(line: Mapping[str, str], name: str, path: Path, zero: bool = False) -> float:
    """A field as a positive, finite number (0 allowed on request), or a PacelineError that names the line."""
    try:
        value = float(line[name])
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        sort = "a finite number of 0 or more" if zero else "a positive, finite number"
        raise PacelineError(f"{path}, line {line['line']}: {name} is {line[name]!r}, expected {sort}")
    return value


def pair_table(
    lines: list[dict[str, str]], path: Path
) -> tuple[tuple[str, ...], tuple[str, ...], NDArray[np.intp]]:
    """Masters and workers in order of appearance, and for each line its (master, worker) position."""
    for line in lines:
        for name in ("master", "worker"):
            line[name] = line[name].strip()
            if not line[name]:
                raise PacelineError(f"{path}, line {line['line']}: the {name} has no name; give it one")
    masters = tuple(dict.fromkeys(line["master"] for line in lines))
    workers = tuple(dict.fromkeys(line["worker"] for line in lines))
    row_of = {name: i for i, name in enumerate(masters)}
    column_of = {name: i for i, name in enumerate(workers)}
    where = np.array([(row_of[line["master"]], column_of[line["worker"]]) for line in lines])
    return masters, workers, where


def rows_for(masters: Sequence[str], rows: float | Mapping[str, float]) -> Array:
    """L for each master: one number for all, or by name with "" for the others."""
    if not isinstance(rows, Mapping):
        return np.full(len(masters), float(rows))
    for name in rows:
        if name and name not in masters:
            raise PacelineError(f"rows for master {name!r}, which is not among {', '.join(masters)}")
    for name in masters:
        if name not in rows and "" not in rows:
            raise PacelineError(f"no rows for master {name!r}: give --rows {name}=L, or one --rows L for all")
    return np.array([float(rows.get(name, rows.get("", 0))) for name in masters])


def read_problem(path: Path, rows: float | Mapping[str, float]) -> Problem:
    """A problem from a CSV file with columns master, worker, u, a; latency and gamma where known.

    u is per millisecond, a milliseconds per row, latency milliseconds, gamma per millisecond
    (``Transmitted``). Every master needs a line for every worker. Raises PacelineError with the file and line
    at fault.
    """
    lines = read_table(path, ("master", "worker", "u", "a"), ("latency", "gamma"))
    masters, workers, where = pair_table(lines, path)
    seen: dict[tuple[int, int], str] = {}
    columns = {name: np.zeros((len(masters), len(workers))) for name in ("u", "a", "latency", "gamma")}
    extra = [name for name in ("latency", "gamma") if name in lines[0]]
    for line, (m, n) in zip(lines, where.tolist(), strict=True):
        if (m, n) in seen:
            raise PacelineError(
                f"{path}, line {line['line']}: master {masters[m]!r} and worker {workers[n]!r} are already on line "
                f"{seen[m, n]}; keep one of them"
            )
        seen[m, n] = line["line"]
        for name in ("u", "a", *extra):
            columns[name][m, n] = positive(line, name, path, zero=name == "latency")
    for m, master in enumerate(masters):
        for n, worker in enumerate(workers):
            if (m, n) not in seen:
                raise PacelineError(
                    f"{path} has no line for master {master!r} and worker {worker!r}: expected one for every pair"
                )
    u, a = columns["u"], columns["a"]
    return Problem(
        masters,
        workers,
        rows_for(masters, rows),
        Transmitted(u, a, columns["gamma"]) if "gamma" in extra else ShiftedExponential(u, a),
        columns["latency"] if "latency" in extra else None,
    )
