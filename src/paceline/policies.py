"""The names by which people ask for a policy, and what checkpoints keep of one.

``create("dolbie:alpha=0.001", cluster)`` gives a policy; ``init`` its first plan and state; ``step`` the next
ones. A policy never sleeps, prints, sends or reads a clock: the same object runs on a virtual clock and under
real training, and replicas that see the same rounds make the same plans.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import combinations
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

    Fields of a state, or of one within it, that have a default are newer than the others: where nothing was stored of
    them, they are the template's. Raises PacelineError when the number of arrays or their shapes are another policy's
    or cluster's.
    """
    if isinstance(stored, str) or not isinstance(stored, Sequence):
        raise PacelineError(f"the stored policy state is {stored!r:.60}; expected a list of arrays")
    remaining = list(stored)
    expected = leaves(template)
    absent = _absent(template, len(expected) - len(remaining))
    if absent is None:
        raise PacelineError(
            f"the stored policy state has {len(remaining)} arrays, expected {len(expected)}; "
            "it belongs to another policy"
        )

    def rebuild(part: Any) -> Any:
        if isinstance(part, tuple):
            named = getattr(part, "_fields", range(len(part)))
            without = getattr(part, "_field_defaults", ()) if type(part) in absent else ()
            parts = [p if name in without else rebuild(p) for name, p in zip(named, part, strict=True)]
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


def _absent(template: Any, missing: int) -> set[type] | None:
    """Whose newer fields a stored state lacks, if it lacks so many arrays; None where that cannot be."""
    counts: dict[type, int] = {}

    def count(part: Any) -> None:
        if isinstance(part, tuple):
            if newer := sum(
                len(leaves(getattr(part, name))) for name in getattr(part, "_field_defaults", ())
            ):
                counts[type(part)] = counts.get(type(part), 0) + newer
            for each in part:
                count(each)

    count(template)
    for size in range(len(counts) + 1):
        for kinds in combinations(counts, size):
            if sum(counts[kind] for kind in kinds) == missing:
                return set(kinds)
    return None


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
