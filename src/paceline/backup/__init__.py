"""The backup policies, which decide how many gradients an update waits for, one in each file; and their names."""

from __future__ import annotations

import dataclasses
from typing import Any

from paceline import options
from paceline.backup.adasync import Adasync
from paceline.backup.dbw import Blind, Dbw
from paceline.backup.dropcompute import DropCompute
from paceline.backup.everyone import Everyone, Static
from paceline.backup.protocol import Backup, Iteration, Timings

BACKUPS: dict[str, type[Backup[Any]]] = {
    "adasync": Adasync,
    "blind": Blind,
    "dbw": Dbw,
    "dropcompute": DropCompute,
    "everyone": Everyone,
    "static": Static,
}
"""Every backup policy's class, by its name for ``create``."""


def create(text: str, workers: int, mode: str = "push-wait") -> Backup[Any]:
    """The backup policy named by ``text``: ``everyone``, ``static:12``, ``dbw``, or with ``key=value``.

    Args:
        text: A name with options.
        workers: Number of workers, n.
        mode: How parameters reach the workers: "push-wait", "push-interrupt" or "pull".

    Returns:
        The policy; pass it each update with ``step``.

    Raises:
        PacelineError: For an unknown name or option, or a value out of range, for example k > n.
    """
    given: dict[str, Any] = {"workers": workers}
    kind: Any = BACKUPS.get(str(text).split(":")[0].strip())
    if kind is not None and any(field.name == "mode" for field in dataclasses.fields(kind)):
        given["mode"] = mode
    named = options.keyed(BACKUPS, text, *given)
    policy: Backup[Any] = options.build(BACKUPS, named, "backup policy", **given)
    return policy


__all__ = ["BACKUPS", "Backup", "Everyone", "Iteration", "Timings", "create"]
