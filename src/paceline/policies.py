"""Policies by name, and what checkpoints store of a policy.

``create("dolbie:alpha=0.001", cluster)`` returns a policy; ``init`` its first plan and state; ``step`` the next
ones. A policy never sleeps, prints, sends or reads a clock: the same object runs on a virtual clock and under
real training, and replicas that see the same rounds make the same plans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paceline import options
from paceline.balance import POLICIES
from paceline.balance.protocol import Policy, complete
from paceline.costs import Linear
from paceline.errors import PacelineError, expected, short
from paceline.rounds import Cluster, PiecePlan, Plan

__all__ = ["Policy", "create", "describe", "digest", "leaves", "names", "register", "restore"]

S = TypeVar("S")
T = TypeVar("T")


def create(text: str, cluster: Cluster) -> Policy[Any]:
    """Make the policy named by ``text``.

    Args:
        text: ``name`` or ``name:key=value,...``, for example ``dolbie:alpha=0.001``.
        cluster: The workers and their limits.

    Returns:
        A frozen policy for this cluster.

    Raises:
        PacelineError: For an unknown name or option, or an invalid value; the message lists the valid ones.
    """
    if not isinstance(cluster, Cluster):
        raise PacelineError(f"cluster={short(cluster)}: expected a paceline.Cluster")
    policy: Policy[Any] = options.build(POLICIES, text, "policy", cluster=cluster)
    complete(policy)
    return policy


def register(name: str, kind: type[Any]) -> None:
    """Register a policy of your own under a name.

    Args:
        name: Letters, digits and "-".
        kind: A frozen dataclass with ``cluster`` as its first field.

    Raises:
        PacelineError: If the name is taken.
    """
    if POLICIES.setdefault(name, kind) is not kind:
        raise PacelineError(f"policy {name!r} exists already; choose another name")


def names() -> list[str]:
    """List every policy's name.

    Returns:
        The names, sorted; those of ``register`` included.
    """
    return sorted(POLICIES)


def describe(name: str) -> str:
    """What a policy does, in one line.

    Args:
        name: A registered policy.

    Returns:
        The first line of its class's docstring.

    Raises:
        PacelineError: For an unknown name.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise PacelineError(f"policy {name!r} is unknown{expected(name, names())}")
    return (POLICIES[name].__doc__ or "").strip().splitlines()[0]


def leaves(state: Any) -> list[NDArray[Any]]:
    """Flatten a state into what a checkpoint stores.

    Args:
        state: An array, or a tuple of states.

    Returns:
        The arrays in a fixed order.
    """
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in leaves(part)]
    return [np.asarray(state)]


def restore(template: S, stored: Sequence[ArrayLike]) -> S:
    """Rebuild the state that ``leaves`` flattened.

    Args:
        template: Any state of the same policy, as from ``init``.
        stored: The arrays, or lists of their numbers.

    Returns:
        A state with the template's structure and the stored numbers.

    Raises:
        PacelineError: If the number of arrays or their shapes belong to another policy or cluster.
    """
    if isinstance(stored, str) or not isinstance(stored, Sequence):
        raise PacelineError(f"the stored policy state is {stored!r:.60}; expected a list of arrays")
    remaining = list(stored)
    expected = leaves(template)
    if len(remaining) != len(expected):
        raise PacelineError(
            f"the stored policy state has {len(remaining)} arrays, expected {len(expected)}; "
            "it belongs to another policy"
        )

    def rebuild(part: Any) -> Any:
        if isinstance(part, tuple):
            parts = [rebuild(p) for p in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        wanted = np.asarray(part)
        try:
            found = np.array(remaining.pop(0), dtype=wanted.dtype)
        except (TypeError, ValueError, OverflowError):
            raise PacelineError(
                f"the stored policy state has an array that holds no numbers of type {wanted.dtype}; it is damaged"
            ) from None
        if found.shape != wanted.shape:
            raise PacelineError(
                f"the stored policy state has an array of shape {found.shape}, expected {wanted.shape}; "
                "it belongs to another number of workers"
            )
        return found

    return rebuild(template)


def in_force(by_step: dict[int, T], step: int) -> T:
    """The entry that holds in round ``step``; the latest entry is last."""
    for first in reversed(by_step):
        if first <= step:
            return by_step[first]
    raise KeyError(step)


DIGESTS = 2**52 - 47  # a prime, so that numbers that differ in a few bits have different remainders


def digest(plan: Plan) -> int:
    """A number by which machines compare plans without sending them.

    Args:
        plan: A plan for the next round.

    Returns:
        52 bits, the same on every machine for the same plan; exact as a float64.
    """
    numbers = plan.shares.ravel().tolist()
    for part in plan.piece_plan or ():
        numbers += np.asarray(part).ravel().tolist()
    # Adding 0.0 turns -0.0 into 0.0.
    packed = struct.pack(f"<{len(numbers) + 1}d", len(numbers), *[number + 0.0 for number in numbers])
    return int.from_bytes(packed, "little") % DIGESTS


def plan_as_lists(plan: Plan) -> dict[str, Any]:
    """A plan as lists and numbers, for a checkpoint."""
    costs = plan.costs
    line = [costs.seconds_per_sample.tolist(), costs.overhead.tolist()] if isinstance(costs, Linear) else None
    piece_plan = None if plan.piece_plan is None else [np.asarray(part).tolist() for part in plan.piece_plan]
    return {"shares": plan.shares.tolist(), "line": line, "pull": piece_plan}


def stored_plan(kept: Any, workers: int) -> Plan:
    """Rebuilds the plan from ``plan_as_lists``. Raises PacelineError if it is not a plan of this many workers."""
    one, each = np.zeros(()), np.zeros(workers)
    (shares,) = restore((each,), [stored_entry(kept, "shares")])
    line, pieces = stored_entry(kept, "line"), stored_entry(kept, "pull")
    costs = None if line is None else Linear(*restore((each, each), line))
    piece_plan = None if pieces is None else restore(PiecePlan(one, one, one, each, each), pieces)
    parts = (shares, *(piece_plan or ()), *((costs.seconds_per_sample, costs.overhead) if costs else ()))
    if not (all(np.all(part >= 0) for part in parts) and abs(shares.sum() - 1) < 1e-6):
        raise PacelineError(
            f"a stored plan is {short(kept)}; expected shares that sum to 1, and numbers of at least 0"
        )
    return Plan(shares, costs=costs, piece_plan=piece_plan)


def stored_plans(kept: Any, workers: int, step: int) -> dict[int, Plan]:
    """Plans by the first round that each holds for; one of them must hold for round ``step``."""
    if not isinstance(kept, dict):
        raise PacelineError(f"the stored plans are {short(kept)}; expected a dict from rounds to plans")
    found = {
        stored_whole(first, "plans from round"): stored_plan(each, workers) for first, each in kept.items()
    }
    if not any(first <= step for first in found):
        raise PacelineError(
            f"the stored plans begin with round {min(found, default=None)}; expected one for round {step}"
        )
    return found


def stored_entry(state: Any, name: str) -> Any:
    """The value of a stored dict under this name."""
    if not isinstance(state, dict) or name not in state:
        raise PacelineError(
            f"the stored balancer or plan is {short(state)}; expected a dict with {name} in it"
        )
    return state[name]


def stored_whole(kept: Any, name: str) -> int:
    """A stored whole number, also if JSON has turned it into a string, as it does with keys."""
    try:
        if isinstance(kept, int | str):
            return int(kept)
    except ValueError:
        pass
    raise PacelineError(f"the stored balancer has {name}={short(kept)}; expected a whole number")
