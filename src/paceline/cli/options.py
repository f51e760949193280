"""Options of the command line: made from a dataclass that tells them, and lists as people write them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from paceline.errors import PacelineError

MANY = 2**31 - 1  # samples
Limits = list[tuple[int | None, int | None]]
Command = Callable[..., None]


def options_of(kind: type) -> Callable[[Command], Command]:
    """Makes a command that takes the fields of a dataclass as options, after its own parameters.

    The command gets as ``**given`` those fields alone that were written on the command line. Their metadata has the
    help and its panel.
    """
    hints = get_type_hints(kind)
    readers: dict[Any, Callable[[str, str], Any]] = {list[float] | None: numbers, Limits | None: limits}
    read = {name: readers[hint] for name, hint in hints.items() if hint in readers}

    def parameter(field: dataclasses.Field[Any]) -> inspect.Parameter:
        about = typer.Option(help=field.metadata["help"], rich_help_panel=field.metadata["panel"])
        written = (str | None) if field.name in read else hints[field.name]
        return inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[written, about],
        )

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def made(context: typer.Context, **values: Any) -> None:
            given = {}
            for name in hints:
                value, source = values.pop(name), context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    option = "--" + name.replace("_", "-")
                    given[name] = read[name](value, option) if name in read else value
            command(**values, **given)

        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        fields = [parameter(field) for field in dataclasses.fields(kind)]
        made.__signature__ = inspect.Signature([context, *fields, *own])  # type: ignore[attr-defined]
        made.__annotations__ = {}
        return made

    return decorated


def fields(text: str) -> list[str]:
    """Policies separated by commas; a policy's own options, key=value, stay with it."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part:
            parts[-1] += "," + part.strip()
        elif part.strip():
            parts.append(part.strip())
    if not parts:
        raise PacelineError(f"{text!r} names no policy; expected names separated by commas")
    return parts


def numbers(text: str, option: str) -> list[float]:
    """``1,1,4`` as numbers."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise PacelineError(f"{option} {text}: expected numbers separated by commas, as in 1,1,4") from None


def limits(text: str, option: str = "--limits") -> Limits:
    """``least:most,least:most,...``; an empty side means no limit of one's own."""
    pairs = []
    for part in text.split(","):
        low, colon, high = part.strip().partition(":")
        try:
            if not colon:
                raise ValueError
            pairs.append((_samples(low), _samples(high)))
        except ValueError:
            raise PacelineError(
                f"{option} has the entry {part!r}; expected least:most in samples, as in 1:64"
            ) from None
    return pairs


def check_port(port: int) -> None:
    """Raises PacelineError for what is no port."""
    if not 0 <= port <= 65535:
        raise PacelineError(f"--port {port}: expected 0 to 65535")


def _samples(text: str) -> int | None:
    """A number of samples, None for no text."""
    if text and int(text) > MANY:
        raise ValueError
    return int(text) if text else None
