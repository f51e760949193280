"""Checkpoints: written whole or not at all, and read without running anyone's code (weights_only)."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import torch

from paceline.errors import PacelineError
from paceline.files import write_whole

PARTS = ("model", "optimizer", "pace")


def save(path: str | os.PathLike[str], **parts: Any) -> Path:
    """Write the state dicts ``model``, ``optimizer`` and ``pace``, and what else is given, to ``path``."""
    buffer = io.BytesIO()
    torch.save(parts, buffer)
    return write_whole(path, buffer.getvalue())


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what ``save`` wrote. Raises PacelineError where it is missing, damaged or of another kind."""
    path = Path(path)
    if not path.exists():
        raise PacelineError(f"{path} does not exist; expected a checkpoint")
    try:
        parts = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for a damaged file
        raise PacelineError(
            f"{path} is damaged or is no checkpoint ({type(error).__name__}); start the run again, or put back a "
            "copy"
        ) from error
    if not isinstance(parts, dict) or any(part not in parts for part in PARTS):
        raise PacelineError(f"{path} is no checkpoint of a training run; expected {', '.join(PARTS)} in it")
    return parts
