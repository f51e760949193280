"""A disk on which only what was forced to it outlives a power cut; names are kept at once, the worst case."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class Disk:
    """From now on hears of each ``os.fsync`` and ``os.fdatasync`` of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._forced: dict[int, bytes] = {}  # by inode: what the file held when it was forced last
        for name in ("fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._forcing)

    def _forcing(self, file: int) -> None:
        self._forced[os.fstat(file).st_ino] = Path(f"/proc/self/fd/{file}").read_bytes()

    def after_a_cut(self, folder: Path, there: Path) -> Path:
        """The files of a folder as they would be found after a power cut at this moment, in the folder ``there``."""
        there.mkdir()
        for path in folder.iterdir():
            (there / path.name).write_bytes(self._forced.get(path.stat().st_ino, b""))
        return there
