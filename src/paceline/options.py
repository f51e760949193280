"""``name:key=value,key=value``: the text form of a policy or a forecast and its options.

The names come from a registry of frozen dataclasses; the options are their fields, converted by the fields'
types. A nested name writes ";" between its own options: ``lbbsp:forecast=narx:inputs=6;window=256``.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Container, Mapping
from typing import Any, Literal, TypeVar, Union

from paceline.errors import PacelineError, among, expected, meant

T = TypeVar("T")


def build(registry: Mapping[str, type[T]], text: str, noun: str, **given: Any) -> T:
    """The object that ``text`` describes.

    registry: names to frozen dataclasses; text: ``name`` or ``name:key=value,...``; noun: what the names stand for,
    for the messages; given: fields that the caller sets and text may not.

    Raises PacelineError for an unknown name or option, or a value that its field cannot hold.
    """
    name, _, rest = text.strip().partition(":") if isinstance(text, str) else (text, "", "")
    if not isinstance(text, str) or name not in registry:
        raise PacelineError(f"{noun} {name!r} is unknown{expected(name, sorted(registry))}")
    kind = registry[name]
    hints = typing.get_type_hints(kind)
    settable = _settable(kind, given)
    options: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in rest.split(","))):
        key, equals, value = part.partition("=")
        key = key.strip()
        if not equals or key not in settable:
            known = ", ".join(settable) or "no options"
            near = meant(key, settable)
            wanted = f"{near} Expected" if near and equals else "; expected"
            raise PacelineError(f"{noun} {name!r} has no option {part!r}{wanted} key=value with {known}")
        options[key] = _convert(hints[key], value.strip(), f"{noun} {name!r}: {key}")
    return kind(**given, **options)


def keyed(registry: Mapping[str, type[Any]], text: str, *taken: str) -> str:
    """``lsp:3:5`` as ``lsp:group=3,barrier=5``: values without a key belong to the fields in their order.

    taken: fields that the caller sets. Text that cannot be resolved is returned as it is, for ``build`` to refuse.
    """
    name, *parts = (part.strip() for part in str(text).replace(",", ":").split(":"))
    if name not in registry or not parts:
        return text
    fields = _settable(registry[name], taken)
    keyless = [part for part in parts if "=" not in part]
    named = [f"{field}={value}" for field, value in zip(fields, keyless, strict=False)]
    return f"{name}:" + ",".join(named + keyless[len(fields) :] + [part for part in parts if "=" in part])


def _settable(kind: type[Any], taken: Container[str]) -> list[str]:
    """The fields that text may set, in their order."""
    return [field.name for field in dataclasses.fields(kind) if field.init and field.name not in taken]


def _convert(hint: Any, text: str, what: str) -> Any:
    """Text as a value of the annotated type."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):
        if text.lower() == "none" and type(None) in inner:
            return None
        hint = next(h for h in inner if h is not type(None))
        return _convert(hint, text, what)
    if origin is Literal:
        for choice in inner:
            if str(choice) == text:
                return choice
        raise PacelineError(f"{what}={text}: expected one of {among(text, map(str, inner))}")
    if hint is bool:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise PacelineError(f"{what}={text}: expected true or false")
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            word = "a whole number" if hint is int else "a number"
            raise PacelineError(f"{what}={text}: expected {word}") from None
    return text
