"""The gates, which decide when parameters move, one in each file; and their names."""

from __future__ import annotations

from typing import Any

from paceline import options
from paceline.errors import PacelineError, expected, whole
from paceline.sync.asp import Asp
from paceline.sync.bsp import Bsp
from paceline.sync.lsp import Lsp
from paceline.sync.protocol import Apply, Drop, Effect, Effects, Gate, Gradient, Interrupt, Release
from paceline.sync.ssp import Ssp

GATES: dict[str, type[Any]] = {"asp": Asp, "bsp": Bsp, "lsp": Lsp, "ssp": Ssp}
"""Every gate's class, by its name for ``create``."""

MODES = Bsp.modes
"""How parameters may reach the workers: push-wait, push-interrupt or pull."""


def create(text: str, workers: int, mode: str = "push-wait") -> Gate[Any]:
    """Make the gate named by ``text``.

    Args:
        text: ``bsp``, ``asp``, ``ssp:10``, ``lsp:3:5``, or with ``key=value``.
        workers: Number of workers, n.
        mode: How parameters reach the workers: "push-wait", "push-interrupt" or "pull".

    Returns:
        The gate.

    Raises:
        PacelineError: For an unknown name, option or mode, a value out of range, or a gate and a mode that exclude
            each other.
    """
    whole("workers", workers)
    if not isinstance(mode, str) or mode not in MODES:
        raise PacelineError(f"mode {mode!r} is unknown{expected(mode, MODES)}")
    named = options.keyed(GATES, text, "workers", "mode")
    gate: Gate[Any] = options.build(GATES, named, "gate", workers=workers, mode=mode)
    if mode not in gate.modes:
        raise PacelineError(
            f"{text.split(':')[0]} and {mode} exclude each other: only bsp drops late gradients or hands out their "
            "samples again; use push-wait, or bsp"
        )
    return gate


__all__ = [
    "GATES",
    "MODES",
    "Apply",
    "Drop",
    "Effect",
    "Effects",
    "Gate",
    "Gradient",
    "Interrupt",
    "Release",
    "create",
]
