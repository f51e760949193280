"""What is in a checkpoint of ``paceline train``; read without running anyone's code (weights_only)."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.torch import progress
from paceline.train.checkpoint import Checkpoints

CHECKPOINT = "checkpoint.pt"
PARTS = ("model", "optimizer", "pace")


def of_run(run_dir: Path) -> Checkpoints[dict[str, Any]]:
    """The checkpoints in a run directory; ``load`` gives a dict with the state dicts that PARTS names."""
    return Checkpoints(run_dir / CHECKPOINT, decode)


def encode(**parts: Any) -> bytes:
    """The state dicts ``model``, ``optimizer`` and ``pace``, and what else is given, as an archive."""
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    return buffer.getvalue()


def decode(content: bytes) -> dict[str, Any]:
    """What ``encode`` was given. Raises PacelineError where that is another kind of content."""
    parts = torch.load(io.BytesIO(content), weights_only=True)
    if not isinstance(parts, dict) or any(not isinstance(parts.get(part), dict) for part in PARTS):
        raise PacelineError(f"expected {', '.join(PARTS)} in it")
    progress.check_state(parts["pace"])
    return parts
