"""Options of the command line, made from the fields of a dataclass, and the parsers of lists in options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from paceline.errors import MANY, PacelineError

Limits = list[tuple[int | None, int | None]]
Command = Callable[..., None]
SHOWN: dict[Any, str] = {  # what the help shows in place of a value
    **dict.fromkeys((int, int | None), "N"),
    **dict.fromkeys((float, float | None), "NUMBER"),
    **dict.fromkeys((str, str | None), "WORD"),
}
Json = Annotated[
    str | None, typer.Option("--json", help="Write all figures; - for standard output.", metavar="FILE|-")
]


def options_of(kind: type, *names: str, panel: str | None = None) -> Callable[[Command], Command]:
    """A decorator that gives a command the fields of a class as options, after its own parameters.

    kind: a dataclass whose fields have help and panel as metadata, or a pydantic model. names: the fields to take;
    all if none is named. panel: the panel of all these options, in place of the fields' own. The command gets only
    the fields that were written on the command line, as ``**given``.
    """
    hints = get_type_hints(kind)
    readers: dict[Any, tuple[Callable[[str, str], Any], str]] = {list[float] | None: (numbers, "X,Y,...")}
    readers[Limits | str | None] = (limits_or_memory, "LEAST:MOST,...|memory")
    readers |= dict.fromkeys((Limits | None, list[list[int | None]] | None), (limits, "LEAST:MOST,..."))
    read = {name: readers[hint] for name, hint in hints.items() if hint in readers}
    found: dict[str, tuple[Any, str, str | None]]  # default, help, panel
    forms: dict[str, str | None] = {}
    if dataclasses.is_dataclass(kind):
        known = dataclasses.fields(kind)
        found = {each.name: (each.default, each.metadata["help"], each.metadata["panel"]) for each in known}
        forms = {each.name: each.metadata["metavar"] for each in known}
    else:
        found = {
            name: (None if each.is_required() else each.default, each.description, None)
            for name, each in kind.model_fields.items()  # type: ignore[attr-defined]
        }
    chosen = names or tuple(found)

    def parameter(name: str) -> inspect.Parameter:
        default, text, its_panel = found[name]
        metavar = read[name][1] if name in read else forms.get(name) or SHOWN.get(hints[name])
        about = typer.Option(help=text, rich_help_panel=panel or its_panel, metavar=metavar)
        written: Any = str if name in read else hints[name]
        annotation = Annotated[written if default is not None else written | None, about]  # type: ignore[valid-type]
        return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    def decorated(command: Command) -> Command:
        @functools.wraps(command)
        def made(context: typer.Context, **values: Any) -> None:
            given = {}
            for name in chosen:
                value, source = values.pop(name), context.get_parameter_source(name)
                if source is not None and source.name == "COMMANDLINE":
                    option = "--" + name.replace("_", "-")
                    given[name] = read[name][0](value, option) if name in read else value
            command(**values, **given)

        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        made.__signature__ = inspect.Signature([context, *map(parameter, chosen), *named])  # type: ignore[attr-defined]
        made.__annotations__ = {}
        return made

    return decorated


def fields(text: str) -> list[str]:
    """A list of policies that are separated by commas; a policy's own options, key=value, stay with it."""
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
    """The numbers of a text such as ``1,1,4``."""
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise PacelineError(f"{option} {text}: expected numbers separated by commas, as in 1,1,4") from None


def limits(text: str, option: str) -> Limits:
    """The pairs of a text ``least:most,least:most,...``; an empty side means no limit."""
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


def limits_or_memory(text: str, option: str) -> Limits | str:
    """The pairs as from ``limits``, or "memory"."""
    if text.isalpha() and text != "memory":
        raise PacelineError(
            f"{option} {text}: expected memory, or least:most for each worker, as in 1:64,1:64"
        )
    return text if text == "memory" else limits(text, option)


def _samples(text: str) -> int | None:
    """A number of samples, None for no text."""
    if text and int(text) > MANY:
        raise ValueError
    return int(text) if text else None
