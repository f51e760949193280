"""The exception for faults that a user can correct, checks that raise it, and suggestions for unknown words."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

MANY = 2**31 - 1  # the largest count that checks accept by default


class PacelineError(ValueError):
    """Bad input or an outside fault, said in one sentence: what was given, what was expected, what to do.

    The command line prints the sentence and exits with 2; a Python caller catches it as a ValueError.
    """


class WorkerError(PacelineError):
    """A worker failed during the run: the command names it and exits with 1."""


def refuse(what: str, reasons: Mapping[str, object]) -> None:
    """Raises PacelineError for the first reason, a sentence, whose value is true, as ``what: reason``."""
    for reason, holds in reasons.items():
        if holds:
            raise PacelineError(f"{what}: {reason}")


@contextmanager
def saying(words: str, advice: str = "") -> Iterator[None]:
    """Turns an OSError raised within into a PacelineError: ``words``, the reason, and ``advice``."""
    try:
        yield
    except OSError as error:
        end = f"; {advice}" if advice else ""
        raise PacelineError(f"{words}: {error.strerror or error}{end}") from error


def among(word: object, known: Iterable[str]) -> str:
    """The known words, and which of them the given word perhaps meant."""
    words = list(known)
    return f"{', '.join(words)}{meant(word, words)}"


def meant(given: object, known: Iterable[str]) -> str:
    """``; did you mean level?`` if a known word begins with the given one or is similar to it; else nothing."""
    words, word = sorted(known), str(given)
    near = [each for each in words if len(word.strip("-")) > 2 and each.startswith(word)]
    near = near or [
        each
        for each in difflib.get_close_matches(word, words, 2, 0.6)
        if _edits(word, each) <= max(1, min(len(word), len(each)) // 4)
    ]
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def expected(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: what it perhaps meant, and the known words."""
    words = list(known)
    near = meant(word, words)
    return f"{near} Expected one of {', '.join(words)}" if near else f"; expected one of {', '.join(words)}"


def short(value: object) -> str:
    """A value's ``repr``, cut to a length that fits into a sentence."""
    return textwrap.shorten(repr(value), 60, placeholder="...")


def whole(name: str, value: Any, least: int = 1, most: int = MANY) -> None:
    """Raises PacelineError if this is not a whole number in this range."""
    counts = isinstance(value, Integral) and not isinstance(value, bool)
    if not counts or not least <= value <= most:
        raise PacelineError(f"{name}={short(value)}: expected a whole number, {least} to {most:,}")


def number(name: str, value: Any, expected: str, fits: Callable[[Any], Any]) -> None:
    """Raises PacelineError if this is not a number, or if ``fits`` refuses it. expected: what ``fits`` accepts."""
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
        raise PacelineError(f"{name}={short(value)}: expected {expected}")


def choice(name: str, value: Any, *known: Any) -> None:
    """Raises PacelineError if this is none of the known words or whole numbers."""
    if not isinstance(value, str | Integral) or value not in known:
        given, (*words, last) = value if isinstance(value, str) else short(value), map(str, known)
        raise PacelineError(f"{name}={given}: expected {', '.join(words)} or {last}")


def switches(**given: Any) -> None:
    """Raises PacelineError for the first that is neither True nor False: any text, even "no", would count as True."""
    for name, value in given.items():
        kind = type(value).__name__  # bool_ is numpy's
        if value is not None and not (kind in ("bool", "bool_", "int") and value in (0, 1)):
            raise PacelineError(f"{name}={short(value)}: expected True or False")


def _edits(one: str, other: str) -> int:
    """How many letters differ between two words: added, left out, changed, or swapped with the next one."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one):
        last, before, row = before, row, [i + 1]
        for j, b in enumerate(other):
            row.append(min(before[j] + (a != b), before[j + 1] + 1, row[j] + 1))
            if i and j and a == other[j - 1] and one[i - 1] == b:
                row[-1] = min(row[-1], last[j - 1] + 1)
    return row[-1]
