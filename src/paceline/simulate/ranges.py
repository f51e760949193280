"""Checking that a scenario's numbers lie where the simulation's arithmetic holds."""

from __future__ import annotations

from typing import Any

from paceline import costs
from paceline.errors import PacelineError

SAMPLES = 10**9  # of a round
SIZES = 1e15  # of a machine, or of a link, in whatever unit; and one over it at least
SPREAD = 1e3  # standard deviation of a logarithm: more than any float can hold anyway
ROUNDS = 10**8  # rounds times realizations: 8 bytes each and policy
CELLS = 10**7  # workers times realizations: what a round's arrays hold
SHARES = 10**8  # rounds times workers: 24 bytes each and policy


def require(one: Any, names: tuple[str, ...], least: float, most: float) -> None:
    """Raise PacelineError for the first of these fields that is not from ``least`` to ``most``; NaN never is."""
    for name in names:
        value = getattr(one, name)
        if not least <= value <= most:
            raise PacelineError(f"{name}={value:g}: expected {_short(least)} to {_short(most)}")


def seconds(one: Any, name: str, least: float = 0.0) -> None:
    """The same for seconds; least: 0 where they may be nothing."""
    value = getattr(one, name)
    if costs.outside(value, least):
        raise PacelineError(f"{name}={value:g}: expected {costs.SPAN if least else costs.SPAN_0} seconds")


def _short(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"
