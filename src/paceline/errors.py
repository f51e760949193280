"""The one exception for what a person can put right."""

from __future__ import annotations


class PacelineError(ValueError):
    """Bad input or an outside fault, said in one sentence: what was given, what was expected, what to do.

    The command line prints the sentence and exits with 2; a Python caller catches it as a ValueError.
    """


class WorkerError(PacelineError):
    """A worker failed while the run was on: the command names it and exits with 1."""
