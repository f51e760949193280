"""A power cut: what is on the disk itself can be gone on from, and a record never promises rounds that are lost."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from paceline.files import write_whole
from paceline.runs import Recorder, read
from support.records import line

GUARANTEES = ("A full disk, a power cut or a clock that is set back leaves a record that can be read.",)
CONFIG = {"policy": "level", "workers": 2}


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


def written(recorder: Recorder, *rounds: int) -> None:
    for t in rounds:
        line(recorder, t)


def test_a_closed_record_outlives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    with Recorder.create(tmp_path / "run", CONFIG) as recorder:
        written(recorder, 0, 1, 2)
    found = read(disk.after_a_cut(tmp_path / "run", tmp_path / "found"))
    assert found.round.tolist() == [0, 1, 2]
    assert found.workers == 2


def test_a_summary_is_not_on_the_disk_before_its_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, replace = Disk(monkeypatch), os.replace
    found: list[Any] = []

    def replaced(part: Any, path: Any) -> None:
        replace(part, path)
        if Path(path).name == "summary.json":
            found.append(read(disk.after_a_cut(tmp_path / "run", tmp_path / f"found-{len(found)}")))

    monkeypatch.setattr(os, "replace", replaced)
    with Recorder.create(tmp_path / "run", CONFIG) as recorder:
        written(recorder, 0, 1)
        recorder.finish()
        written(recorder, 2)
        recorder.finish()
    assert [run.round.tolist() for run in found] == [[0, 1], [0, 1, 2]]
    assert [run.summary["steps"] for run in found] == [2, 3]


def test_a_file_that_is_written_whole_is_whole_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, folder = Disk(monkeypatch), tmp_path / "folder"
    folder.mkdir()
    for number, content in enumerate((b"first", b"second")):
        write_whole(folder / "checkpoint.pt", content)
        found = disk.after_a_cut(folder, tmp_path / f"found-{number}")
        assert [path.read_bytes() for path in found.iterdir()] == [content]
