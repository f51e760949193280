"""The one exception for what a person can put right, and what it says of words that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PacelineError(ValueError):
    """Bad input or an outside fault, said in one sentence: what was given, what was expected, what to do.

    The command line prints the sentence and exits with 2; a Python caller catches it as a ValueError.
    """


class WorkerError(PacelineError):
    """A worker failed while the run was on: the command names it and exits with 1."""


def meant(word: str, known: Iterable[str]) -> str:
    """``; did you mean level?`` where a known word begins with the given one or is like it; else nothing."""
    words = sorted(known)
    near = [each for each in words if len(word.strip("-")) > 2 and each.startswith(word)]
    near = near or difflib.get_close_matches(word, words, 2, 0.7)
    return f"; did you mean {' or '.join(near[:3])}?" if near else ""


def expected(word: str, known: Iterable[str]) -> str:
    """The end of a sentence about an unknown word: what was perhaps meant, and what there is."""
    words = list(known)
    near = meant(word, words)
    return f"{near} Expected one of {', '.join(words)}" if near else f"; expected one of {', '.join(words)}"
