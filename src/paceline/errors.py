"""The one exception for what a person can put right, and what it says of words that nobody knows."""

from __future__ import annotations

import difflib
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

MANY = 2**31 - 1  # of most things that are counted, at most


class PacelineError(ValueError):
    """Bad input or an outside fault, said in one sentence: what was given, what was expected, what to do.

    The command line prints the sentence and exits with 2; a Python caller catches it as a ValueError.
    """


class WorkerError(PacelineError):
    """A worker failed while the run was on: the command names it and exits with 1."""


def refuse(what: str, reasons: Mapping[str, object]) -> None:
    """Raises PacelineError for the first reason, a sentence, that is true: ``what``, a colon, and the sentence."""
    for reason, holds in reasons.items():
        if holds:
            raise PacelineError(f"{what}: {reason}")


@contextmanager
def saying(words: str, advice: str = "") -> Iterator[None]:
    """Makes a PacelineError of an OSError that comes within: ``words``, why, and ``advice``."""
    try:
        yield
    except OSError as error:
        end = f"; {advice}" if advice else ""
        raise PacelineError(f"{words}: {error.strerror or error}{end}") from error


def among(word: object, known: Iterable[str]) -> str:
    """The words that there are, and which of them was perhaps meant by another one."""
    words = list(known)
    return f"{', '.join(words)}{meant(word, words)}"


def meant(given: object, known: Iterable[str]) -> str:
    """``; did you mean level?`` if a known word begins with the given one or is like it; else nothing."""
    words, word = sorted(known), str(given)
    near = [each for each in words if len(word.strip("-")) > 2 and each.startswith(word)]
    near = near or [
        each
        for each in difflib.get_close_matches(word, words, 2, 0.6)
        if _edits(word, each) <= max(1, min(len(word), len(each)) // 4)
    ]
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def expected(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: what was perhaps meant, and what there is."""
    words = list(known)
    near = meant(word, words)
    return f"{near} Expected one of {', '.join(words)}" if near else f"; expected one of {', '.join(words)}"


def short(value: object) -> str:
    """A value as Python writes it, cut to what fits into a sentence."""
    return textwrap.shorten(repr(value), 60, placeholder="...")


def whole(name: str, value: Any, least: int = 1, most: int = MANY) -> None:
    """Raises PacelineError if this is no whole number in this range."""
    counts = isinstance(value, Integral) and not isinstance(value, bool)
    if not counts or not least <= value <= most:
        raise PacelineError(f"{name}={short(value)}: expected a whole number, {least} to {most:,}")


def number(name: str, value: Any, expected: str, fits: Callable[[Any], Any]) -> None:
    """Raises PacelineError if this is no number, or one that does not fit what is ``expected``."""
    if not isinstance(value, Real) or isinstance(value, bool) or not fits(value):
        raise PacelineError(f"{name}={short(value)}: expected {expected}")


def switches(**given: Any) -> None:
    """Raises PacelineError for the first that is neither True nor False: any text, also "no", would count as True."""
    for name, value in given.items():
        kind = type(value).__name__  # bool_ is numpy's
        if value is not None and not (kind in ("bool", "bool_", "int") and value in (0, 1)):
            raise PacelineError(f"{name}={short(value)}: expected True or False")


def _edits(one: str, other: str) -> int:
    """Letters that are added, left out, changed or swapped with the next one, from one word to the other."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, a in enumerate(one):
        last, before, row = before, row, [i + 1]
        for j, b in enumerate(other):
            row.append(min(before[j] + (a != b), before[j + 1] + 1, row[j] + 1))
            if i and j and a == other[j - 1] and one[i - 1] == b:
                row[-1] = min(row[-1], last[j - 1] + 1)
    return row[-1]
