"""How many gradients do we wait for? One file a policy; the names by which people ask for them."""

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
"""Every backup policy's class, by the name that ``create`` knows it by."""


def create(text: str, workers: int, mode: str = "push-wait") -> Backup[Any]:
    """The backup policy that text asks for: ``everyone``, ``static:12``, ``dbw``, or with ``key=value``.

    Raises PacelineError on an unknown name or option, or a value out of range, such as k > n.
    """
    given: dict[str, Any] = {"workers": workers}
    kind: Any = BACKUPS.get(str(text).split(":")[0].strip())
    if kind is not None and any(field.name == "mode" for field in dataclasses.fields(kind)):
        given["mode"] = mode
    policy: Backup[Any] = options.build(
        BACKUPS, options.keyed(BACKUPS, text, *given), "backup policy", **given
    )
    return policy


__all__ = ["BACKUPS", "Backup", "Everyone", "Iteration", "Timings", "create"]
