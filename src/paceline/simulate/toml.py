"""Reads a scenario from TOML: checks every field, and names the place of a mistake."""

from __future__ import annotations

import dataclasses
import os
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Union

from paceline import files
from paceline.data import traces
from paceline.errors import PacelineError, among, saying
from paceline.simulate.scenario import Scenario, from_trace
from paceline.simulate.timing import MODELS, Constant, Replay, TimingModel

LARGEST = 2**63 - 1  # the largest whole number


def read(path: str | os.PathLike[str]) -> Scenario:
    """Read a scenario.

    Args:
        path: A TOML file.

    Returns:
        The scenario.

    Raises:
        PacelineError: Naming the file and the table, for any mistake in it.
    """
    path = Path(path)
    with saying(f"cannot read the scenario {path}", "expected a TOML file"):
        written = files.read(path, files.SMALL)
    try:
        content = tomllib.loads(written.decode())
    except (ValueError, RecursionError) as error:
        raise PacelineError(f"{path} is not valid TOML: {error}") from error
    try:
        if "workers" not in content:
            raise PacelineError("no workers: expected at least one [[workers]] table")
        return _Reader(path.parent).table(Scenario, {"name": path.stem} | content, "")
    except PacelineError as error:
        raise PacelineError(f"{path}: {error}") from None


def of_trace(path: str | os.PathLike[str], **fields: object) -> Scenario:
    """The scenario that plays a trace file; gaps in it are absences.

    Args:
        path: A CSV file.
        fields: Of ``Scenario``.

    Returns:
        The scenario, named like the file.

    Raises:
        PacelineError: Naming the file, for any mistake in it.
    """
    try:
        return from_trace(traces.read(path, gaps="absent"), **{"name": Path(path).stem} | fields)
    except PacelineError as error:
        raise PacelineError(str(error) if str(path) in str(error) else f"{path}: {error}") from None


@dataclasses.dataclass(frozen=True)
class _Trace:
    """Columns (workers) of a trace file; all of them by default."""

    file: Path
    workers: tuple[int, ...] | None = None


class _Reader:
    """Builds a scenario from TOML values. folder: trace files are relative to it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def table(self, kind: type[Any], content: Any, where: str) -> Any:
        """A dataclass from a TOML table."""
        if not isinstance(content, Mapping):
            raise PacelineError(f"{where or 'the file'} is {content!r}; expected a table")
        hints, place = typing.get_type_hints(kind), f"{where}: " if where else ""
        fields = {field.name: field for field in dataclasses.fields(kind)}
        for name in content:
            if name not in fields:
                raise PacelineError(f"{place}unknown field {name!r}; expected one of {among(name, fields)}")
        for name, field in fields.items():
            needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
            if needed and name not in content:
                raise PacelineError(f"{place}{name} is missing")
        values = {name: self._value(hints[name], value, name, where) for name, value in content.items()}
        try:
            return kind(**values)
        except PacelineError as error:
            raise PacelineError(f"{place}{error}") from None

    def _value(self, hint: Any, value: Any, name: str, where: str) -> Any:
        origin, inner = typing.get_origin(hint), typing.get_args(hint)
        path = f"{where}.{name}" if where else name
        if hint is TimingModel:
            return self._timing(value, path, name)
        if origin in (Union, types.UnionType):
            hint = float if float in inner else next(each for each in inner if each is not type(None))
            origin, inner = typing.get_origin(hint), typing.get_args(hint)
        if origin is tuple:
            if not isinstance(value, list):
                raise PacelineError(f"{path} is {value!r}; expected a list")
            return tuple(
                self._value(inner[0], item, f"{name}[{index}]", where) for index, item in enumerate(value)
            )
        if hint is Path:
            return self._folder / self._value(str, value, name, where)
        if dataclasses.is_dataclass(hint):
            return self.table(hint, value, path)  # type: ignore[arg-type]
        words = {int: "a whole number", float: "a number", str: "a string in quotes", bool: "true or false"}
        kinds = (int, float) if hint is float else (hint,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
            raise PacelineError(f"{path}={value!r}: expected {words[hint]}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise PacelineError(
                f"{path} is a number of {len(str(value))} digits; expected {words[hint]} below 2**63"
            )
        return float(value) if hint is float else value

    def _timing(self, value: Any, path: str, name: str) -> TimingModel:
        """A number, or a table {model = ..., ...}."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return self.table(Constant, {"seconds": value}, path)
        if not isinstance(value, Mapping) or "model" not in value:
            raise PacelineError(f"{path}={value!r}: expected seconds, or a table with a model")
        rest = {key: item for key, item in value.items() if key != "model"}
        model = value["model"]
        if model == "trace":
            named = self.table(_Trace, rest, path)
            trace = traces.read(named.file, gaps="absent")
            table = trace.overhead if name == "overhead" else trace.seconds_per_sample
            columns = list(range(table.shape[1]) if named.workers is None else named.workers)
            if not columns or min(columns) < 0 or max(columns) >= table.shape[1]:
                raise PacelineError(
                    f"{path}.workers={columns!r}: expected a list of workers of the trace, 0 to {table.shape[1] - 1}"
                )
            return Replay(table[:, columns])
        if model not in MODELS:
            raise PacelineError(
                f"{path}: unknown model {model!r}; expected one of {', '.join(MODELS)}, trace"
            )
        return self.table(MODELS[model], rest, path)
