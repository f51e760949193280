"""A coded product to be planned: several masters, each with the rows of its matrix, and the workers that they share;
and problems read from files of delays, or of measured times."""

from __future__ import annotations

import csv
import io
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from paceline.coded.delay import (
    Delay,
    Empirical,
    Fit,
    ShiftedExponential,
    Transmitted,
    Weibull,
    fit,
    fit_shifted_exponential,
)
from paceline.costs import Array
from paceline.errors import PacelineError
from paceline.files import open_file

HISTORY = 200  # products whose times are kept
ENOUGH = 5  # finished products of a worker from which on its parameters are fitted


@dataclass(frozen=True)
class Problem:
    """M masters and N workers.

    Args:
        masters: Names of the M masters.
        workers: Names of the N workers.
        rows: L, rows of each master's matrix, shape (M,), at least 1.
        delay: Milliseconds for a row, of pairs of shape (M, N).
        latency: Milliseconds that a pair loses once per product, independent of its rows (sending x and the result),
            shape (M, N), 0 or more; None for none.

    Raises:
        PacelineError: For no rows, fewer workers than masters, duplicate names and arrays that do not fit.
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

    def to_json(self) -> dict[str, Any]:
        """The problem as plain data.

        Returns:
            What ``problem_from_json`` reads.
        """
        delay = self.delay
        parameters = {
            f.name: [[np.asarray(each).tolist() for each in row] for row in getattr(delay, f.name)]
            for f in fields(delay)  # type: ignore[arg-type]
        }
        return {
            "masters": list(self.masters),
            "workers": list(self.workers),
            "rows": self.rows.tolist(),
            "delay": type(delay).__name__,
            "parameters": parameters,
            "latency": None if self.latency is None else self.latency.tolist(),
        }


def problem_from_json(found: Mapping[str, Any]) -> Problem:
    """The problem of ``Problem.to_json``. Raises KeyError, TypeError or ValueError for anything else."""
    masters, workers = tuple(found["masters"]), tuple(found["workers"])
    if found["delay"] == "Empirical":
        times = np.empty((len(masters), len(workers)), object)
        for m, n in np.ndindex(times.shape):
            times[m, n] = np.array(found["parameters"]["times"][m][n], float)
        delay: Delay = Empirical(times)
    else:
        family = {each.__name__: each for each in (ShiftedExponential, Weibull, Transmitted)}[found["delay"]]
        delay = family(**{name: np.array(values, float) for name, values in found["parameters"].items()})
    return Problem(masters, workers, np.array(found["rows"], float), delay, found["latency"])


def random_problem(
    masters: int, workers: int, rows: float, rng: np.random.Generator, speeds: Sequence[float] | None = None
) -> Problem:
    """A random problem as in the paper's section V: u uniform on [1, 5] per ms for each pair, a = 1 / u.

    Args:
        masters: M.
        workers: N.
        rows: L, the same for all masters.
        rng: The source of the draws.
        speeds: Draw u from these values instead, with equal probability.

    Returns:
        A problem with masters "master0", ... and workers "worker0", ....
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

    Raises PacelineError, naming the file and line, if the file or one of its columns is missing.
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
            + (f" and, if known, {', '.join(optional)}" if optional else "")
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
    """A field as a positive, finite number, or also 0 with ``zero``; PacelineError names the line otherwise."""
    try:
        value = float(line[name])
    except (TypeError, ValueError):
        value = math.nan
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0))):
        sort = "a finite number of 0 or more" if zero else "a positive, finite number"
        raise PacelineError(f"{path}, line {line['line']}: {name} is {line[name]!r}, expected {sort}")
    return value


def pair_table(
    lines: list[dict[str, str]], path: Path, what: str, many: str
) -> tuple[tuple[str, ...], tuple[str, ...], dict[tuple[str, str], list[dict[str, str]]]]:
    """(masters, workers, the lines of each pair): names in order of appearance; each pair has at least one line.

    what, many: the noun for the lines, and how many of them are expected, for the message."""
    for line in lines:
        for name in ("master", "worker"):
            line[name] = line[name].strip()
            if not line[name]:
                raise PacelineError(f"{path}, line {line['line']}: the {name} has no name; give it one")
    masters, workers = (tuple(dict.fromkeys(line[name] for line in lines)) for name in ("master", "worker"))
    found: dict[tuple[str, str], list[dict[str, str]]] = {pair: [] for pair in product(masters, workers)}
    for line in lines:
        found[line["master"], line["worker"]].append(line)
    for (master, worker), mine in found.items():
        if not mine:
            raise PacelineError(
                f"{path} has no {what} for master {master!r} and worker {worker!r}: expected {many} for every pair"
            )
    return masters, workers, found


def rows_for(masters: Sequence[str], rows: float | Mapping[str, float]) -> Array:
    """L for each master, from one number for all, or from numbers by name, with "" for the others."""
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
    """Read a problem from a CSV file with columns master, worker, u, a, and, if known, latency and gamma.

    u is per millisecond, a milliseconds per row, latency milliseconds, gamma per millisecond (``Transmitted``). Every
    master needs a line for every worker.

    Args:
        path: A CSV file.
        rows: Rows of every master's matrix, or of each by its name.

    Returns:
        The problem.

    Raises:
        PacelineError: Naming the file and the line, for a value, pair or column that is missing, repeated or out of
            range.
    """
    lines = read_table(path, ("master", "worker", "u", "a"), ("latency", "gamma"))
    masters, workers, found = pair_table(lines, path, "line", "one")
    for (master, worker), (first, *others) in found.items():
        if others:
            raise PacelineError(
                f"{path}, line {others[0]['line']}: master {master!r} and worker {worker!r} are already on line "
                f"{first['line']}; keep one of them"
            )
    columns = {
        name: np.reshape(
            [positive(line, name, path, zero=name == "latency") for (line,) in found.values()],
            (len(masters), len(workers)),
        )
        for name in ("u", "a", "latency", "gamma")
        if name in lines[0]
    }
    u, a = columns["u"], columns["a"]
    delay = Transmitted(u, a, columns["gamma"]) if "gamma" in columns else ShiftedExponential(u, a)
    return Problem(masters, workers, rows_for(masters, rows), delay, columns.get("latency"))


def read_times(
    path: Path, rows: float | Mapping[str, float], family: str = "shifted-exponential"
) -> tuple[Problem, Fit]:
    """Fit a problem to a CSV file with columns master, worker, rows, milliseconds: one line per measured product.

    Args:
        path: A CSV file.
        rows: Rows of every master's matrix, or of each by its name.
        family: The distribution to fit, by its name.

    Returns:
        The problem, and the fit of its delays.

    Raises:
        PacelineError: Naming the line that is wrong, or the pair with too few measurements.
    """
    lines = read_table(path, ("master", "worker", "rows", "milliseconds"))
    masters, workers, found = pair_table(lines, path, "times", "some")
    times = np.empty((len(masters), len(workers)), object)
    for pair, ((master, worker), mine) in zip(np.ndindex(times.shape), found.items(), strict=True):
        per_row = [positive(line, "milliseconds", path) / positive(line, "rows", path) for line in mine]
        times[pair] = np.array(per_row)
        if family != "empirical" and np.ptp(times[pair]) <= 0:
            raise PacelineError(
                f"{path} has {len(mine)} times for master {master!r} and worker {worker!r}: expected at least "
                "two that differ per row"
            )
    fitted = fit(times, family)
    return Problem(masters, workers, rows_for(masters, rows), fitted.delay), fitted


class Observations:
    """Each worker's last products: milliseconds per row, which are a lower bound if a product was not finished."""

    def __init__(self, workers: int) -> None:
        self.seen: list[deque[tuple[float, bool]]] = [deque(maxlen=HISTORY) for _ in range(workers)]

    def add(self, worker: int, milliseconds: float, rows: int, finished: bool) -> None:
        """Record the time of these rows; with ``finished`` False they would have taken longer."""
        self.seen[worker].append((milliseconds / rows, finished))

    def fitted(self, problem: Problem, master: int) -> Problem:
        """The problem with a master's delays as observed, cancelled work included.

        Workers with fewer than five finished products keep their parameters. Raises PacelineError if the
        problem's delays are not shifted exponentials.
        """
        delay = problem.delay
        if not isinstance(delay, ShiftedExponential):
            raise PacelineError("observed times are fitted by shifted exponentials; make the plan with these")
        u, a = delay.u.copy(), delay.a.copy()
        for n, seen in enumerate(self.seen):
            z = np.array([per_row for per_row, _ in seen])
            finished = np.array([each for _, each in seen], bool)
            if finished.sum() >= ENOUGH and np.ptp(z[finished]) > 0:
                u[master, n], a[master, n], *_ = fit_shifted_exponential(z, finished)
        return replace(problem, delay=ShiftedExponential(u, a))
