"""The names by which people ask for a policy, and what checkpoints keep of one.

``create("dolbie:alpha=0.001", cluster)`` gives a policy; ``init`` its first plan and state; ``step`` the next
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
from paceline.errors import PacelineError, expected
from paceline.rounds import Cluster, Plan

__all__ = ["Policy", "create", "describe", "digest", "leaves", "names", "register", "restore"]

S = TypeVar("S")


def create(text: str, cluster: Cluster) -> Policy[Any]:
    """The policy that text asks for: ``name`` or ``name:key=value,...``.

    Raises PacelineError on an unknown name or option, or a value that does not fit, and lists what does.
    """
    policy: Policy[Any] = options.build(POLICIES, text, "policy", cluster=cluster)
    complete(policy)
    return policy


def register(name: str, kind: type[Any]) -> None:
    """Makes a policy of your own known by name: a frozen dataclass with ``cluster`` as its first field.

    Raises PacelineError when the name is taken.
    """
    if POLICIES.setdefault(name, kind) is not kind:
        raise PacelineError(f"policy {name!r} exists already; choose another name")


def names() -> list[str]:
    """Every policy's name, sorted."""
    return sorted(POLICIES)


def describe(name: str) -> str:
    """One line on a policy: the first of its docstring."""
    if name not in POLICIES:
        raise PacelineError(f"policy {name!r} is unknown{expected(name, names())}")
    return (POLICIES[name].__doc__ or "").strip().splitlines()[0]


def leaves(state: Any) -> list[NDArray[Any]]:
    """A state's arrays in a fixed order, nested states flattened: what a checkpoint stores."""
    if isinstance(state, tuple):
        return [leaf for part in state for leaf in leaves(part)]
    return [np.asarray(state)]


def restore(template: S, stored: Sequence[ArrayLike]) -> S:
    """The state that ``leaves`` took apart. template: any state of the same policy, such as ``init`` gives.

    Fields at the end of a state that have a default are newer than the others: where nothing was stored of them, they
    are the template's. Raises PacelineError when the number of arrays or their shapes are another policy's or
    cluster's.
    """
    if isinstance(stored, str) or not isinstance(stored, Sequence):
        raise PacelineError(f"the stored policy state is {stored!r:.60}; expected a list of arrays")
    remaining = list(stored)
    expected = leaves(template)
    newer = sum(len(leaves(getattr(template, name))) for name in getattr(template, "_field_defaults", ()))
    if len(remaining) not in (len(expected), len(expected) - newer):
        raise PacelineError(
            f"the stored policy state has {len(remaining)} arrays, expected {len(expected)}; "
            "it belongs to another policy"
        )

    def rebuild(part: Any) -> Any:
        if isinstance(part, tuple):
            parts = [rebuild(p) for p in part]
            return type(part)(*parts) if hasattr(part, "_fields") else tuple(parts)
        wanted = np.asarray(part)
        if not remaining:
            return wanted
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


DIGESTS = 2**52 - 47  # a prime: numbers that differ in a few bits have other remainders


def digest(plan: Plan) -> int:
    """52 bits of what the plan divides, the same on every machine; exact as a float64, to travel among floats."""
    numbers = plan.shares.ravel().tolist()
    for part in plan.piece_plan or ():
        numbers += np.asarray(part).ravel().tolist()
    told = struct.pack(
        f"<{len(numbers) + 1}d", len(numbers), *[number + 0.0 for number in numbers]
    )  # one zero
    return int.from_bytes(told, "little") % DIGESTS
