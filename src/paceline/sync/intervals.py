"""Local steps: the interval between two merges, and the outer optimizer that applies the workers' changes.

Between two merges each worker takes its own optimizer steps. The real engines and the one on a virtual clock use
these options, sizes and values.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from paceline import options
from paceline.errors import MANY, PacelineError, number, short

AUTO, SECONDS = "auto", re.compile(r"(\d+\.?\d*|\.\d+) ?s")  # forms of the option ``every``
LINK = 0.1  # with "auto", merges take at most this part of the time
HIDDEN = 0.8  # the same, as a part of the steps' time, if merges overlap with the steps
MOST_STEPS = 1024  # average steps of a worker in an interval, at most, if ``next_size`` chooses it
GROWTH = 4.0  # the largest ratio of an interval to the one before


@dataclass(frozen=True)
class Mean:
    """The outer optimizer that takes the mean of the workers' parameters without change."""

    lr: ClassVar[float] = 1.0
    momentum: ClassVar[float] = 0.0
    nesterov: ClassVar[bool] = False


@dataclass(frozen=True)
class Nesterov:
    """The outer optimizer of DiLoCo (arXiv 2311.08105), with its values. lr, momentum: as torch.optim.SGD's."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: ClassVar[bool] = True

    def __post_init__(self) -> None:
        number("nesterov: lr", self.lr, "a learning rate above 0, at most 10", lambda lr: 0 < lr <= 10)
        number("nesterov: momentum", self.momentum, "a momentum above 0 and below 1", lambda m: 0 < m < 1)


OUTER: dict[str, type[Any]] = {"mean": Mean, "nesterov": Nesterov}


def outer(spec: str) -> Mean | Nesterov:
    """``mean`` or ``nesterov``, with options as ``nesterov:lr=0.7``. Raises PacelineError for anything else."""
    found: Mean | Nesterov = options.build(OUTER, spec, "outer optimizer")
    return found


def interval(every: Any) -> int | float | str:
    """The interval between two merges: average steps of a worker as an int, seconds as a float, or "auto", also for
    None. Raises PacelineError for anything else."""
    if every is None or (isinstance(every, str) and every.strip() == AUTO):
        return AUTO
    asked = every
    if isinstance(every, str):
        found = SECONDS.fullmatch(every.strip())  # cut below, since int() refuses more than 4,300 digits
        asked = float(found[1]) if found else int(every[:20]) if every.isdecimal() else None
    plain = isinstance(asked, int | float | np.integer) and not isinstance(asked, bool)
    if not plain or not 0 < asked < MANY:
        raise PacelineError(
            f"every={short(every)}: expected steps, 1 or more, seconds such as '2 s' or 2.0, or 'auto'"
        )
    return float(asked) if isinstance(asked, float) else int(asked)


def next_size(
    every: float | str, batch: int, size: int, samples: int, seconds: float, link: float, delay: int = 0
) -> int:
    """Samples of the next interval, a multiple of ``batch``, the samples of a step of every worker.

    every: seconds, or "auto". size: of the newest planned interval. samples, seconds: of a finished one, without its
    merge, which took ``link`` seconds, overlapping with the steps if there is a ``delay``."""
    wanted = link * (1 / HIDDEN if delay else 1 / LINK - 1) if every == AUTO else float(every)
    due = min(max(wanted * samples / seconds, size / GROWTH), size * GROWTH)
    return min(max(round(due / batch), 1), MOST_STEPS) * batch
