"""A checkpoint that somebody else has made: what is in it is read, and nothing of it is run."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.train.checkpoint import CHECKPOINT, of_run, with_digest

GUARANTEES = ("A stranger's checkpoint is read without running any of it, or refused.",)


class Runs:
    """Makes a file when it is read by whoever runs what a pickle names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_nothing_of_a_checkpoint_is_run(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"model": Runs(tmp_path / "run"), "optimizer": {}, "pace": {}}, buffer)
    (tmp_path / CHECKPOINT).write_bytes(with_digest(buffer.getvalue()))
    with pytest.raises(PacelineError, match="is damaged or is no checkpoint"):
        of_run(tmp_path).load()
    assert not (tmp_path / "run").exists()
