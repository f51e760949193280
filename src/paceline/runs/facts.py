"""What run.json and summary.json may hold: they are edited by people, and read into figures and pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

NUMBERS = (
    "seconds",
    "samples_per_second",
    "bound_samples_per_second",
    "share_of_bound",
    "idle_share",
    "train_loss",
    "test_accuracy",
)
LARGEST = 2**53


def check_config(config: dict[str, Any], path: Path) -> None:
    """Raise PacelineError where a field that is read is of another kind than engines write."""
    _check(
        config,
        path,
        {
            "policy": (lambda value: isinstance(value, str), "a text"),
            "workers": (_count, "a whole number"),
            "global_batch": (_count, "a whole number"),
            "loader_workers": (_count, "a whole number"),
            "limits": (_limits, "a pair of whole numbers a worker"),
            "resumed": (_resumed, "a list of the parts, each with its round"),
        },
    )


def check_summary(summary: dict[str, Any], path: Path) -> None:
    """The same for what an engine left at the end."""
    fields: dict[str, tuple[Callable[[Any], bool], str]] = dict.fromkeys(NUMBERS, (_number, "a number"))
    fields |= {"steps": (_count, "a whole number"), "samples": (_count, "a whole number")}
    _check(summary, path, fields | {"final_batches": (_counts, "a list of whole numbers")})


def _check(found: dict[str, Any], path: Path, fields: dict[str, tuple[Callable[[Any], bool], str]]) -> None:
    for name, (sound, expected) in fields.items():
        if found.get(name) is not None and not sound(found[name]):
            given = str(found[name])[:60]
            raise PacelineError(f"{path} is damaged: {name} is {given}; expected {expected}; put it back")


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _limits(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(item is None or _count(item) for item in pair)
        for pair in value
    )


def _resumed(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(part, dict) and _count(part.get("round", 0)) for part in value
    )
