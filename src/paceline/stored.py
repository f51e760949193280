"""Plans as plain lists and numbers, and back: what a checkpoint holds is checked before anything goes by it.

All that reads raises PacelineError, in a sentence, for what no checkpoint can hold.
"""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np

from paceline.costs import Linear
from paceline.errors import PacelineError
from paceline.rounds import Array, PiecePlan, Plan


def plain(plan: Plan) -> dict[str, Any]:
    """A plan as lists and numbers, for a checkpoint."""
    costs = plan.costs
    line = [costs.seconds_per_sample.tolist(), costs.overhead.tolist()] if isinstance(costs, Linear) else None
    piece_plan = None if plan.piece_plan is None else [np.asarray(part).tolist() for part in plan.piece_plan]
    return {"shares": plan.shares.tolist(), "line": line, "pull": piece_plan}


def plan(kept: Any, workers: int) -> Plan:
    """The plan that ``plain`` took apart. Raises PacelineError for what is no plan for so many workers."""
    shares = _numbers(entry(kept, "shares"), (workers,), "shares")
    if not (np.all(shares >= 0) and abs(shares.sum() - 1) < 1e-6):
        raise PacelineError(f"a stored plan has the shares {short(shares.tolist())}; expected parts of 1")
    costs = piece_plan = None
    if (line := entry(kept, "line")) is not None:
        slope, overhead = _parts(line, [(workers,), (workers,)], "line")
        if not (np.all(slope >= 0) and np.all(overhead >= 0)):
            raise PacelineError("a stored plan has costs that are no seconds; expected numbers of at least 0")
        costs = Linear(slope, overhead)
    if (parts := kept.get("pull")) is not None:
        piece_plan = PiecePlan(*_parts(parts, [(), (), (), (workers,), (workers,)], "pull"))
        if not all(np.all(part >= 0) for part in piece_plan):
            raise PacelineError("a stored plan has a piece_plan that is none; expected numbers of at least 0")
    return Plan(shares, costs=costs, piece_plan=piece_plan)


def plans(kept: Any, workers: int, step: int) -> dict[int, Plan]:
    """Plans by the round from which each holds, one of which must hold for round ``step``."""
    if not isinstance(kept, dict):
        raise PacelineError(f"the stored plans are {short(kept)}; expected a dict from rounds to plans")
    found = {whole(first, "plans from round"): plan(each, workers) for first, each in kept.items()}
    if not any(first <= step for first in found):
        raise PacelineError(
            f"the stored plans begin with round {min(found, default=None)}; expected one for round {step}"
        )
    return found


def entry(state: Any, name: str) -> Any:
    """What a stored dict holds under this name."""
    if not isinstance(state, dict) or name not in state:
        raise PacelineError(
            f"the stored balancer or plan is {short(state)}; expected a dict with {name} in it"
        )
    return state[name]


def _parts(stored: Any, shapes: list[tuple[int, ...]], name: str) -> list[Array]:
    if not isinstance(stored, list | tuple) or len(stored) != len(shapes):
        raise PacelineError(
            f"a stored plan has {name}={short(stored)}; expected a list of {len(shapes)} arrays"
        )
    return [_numbers(part, shape, name) for part, shape in zip(stored, shapes, strict=True)]


def _numbers(stored: Any, shape: tuple[int, ...], name: str) -> Array:
    try:
        array = np.asarray(stored, float)
    except (TypeError, ValueError, OverflowError):
        array = None
    if array is None or array.shape != shape:
        raise PacelineError(
            f"a stored plan has {name}={short(stored)}; expected numbers of shape {shape}, one for each worker"
        )
    return array


def whole(kept: Any, name: str) -> int:
    """A whole number, also where JSON has made a string of it."""
    try:
        if isinstance(kept, int | str):
            return int(kept)
    except ValueError:
        pass
    raise PacelineError(f"the stored balancer has {name}={short(kept)}; expected a whole number")


def short(value: Any) -> str:
    """A value as Python writes it, cut to what fits into a sentence."""
    return textwrap.shorten(repr(value), 60, placeholder="...")
