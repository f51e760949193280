"""The last two checkpoints: damage anywhere is found, and the one before is taken."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline import PacelineError
from paceline.train.checkpoint import Checkpoints, sound, with_digest
from support.guarantees import guarantee

FINDS_DAMAGE = guarantee(
    "A damaged checkpoint is found when it is read, and the one before it is used; if both are damaged, "
    "nothing changes."
)


def archive(value: int) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, value=np.full(100, value))
    return buffer.getvalue()


def decode(content: bytes) -> int:
    with np.load(io.BytesIO(content)) as stored:
        return int(stored["value"][0])


def torch_archive() -> bytes:
    buffer = io.BytesIO()
    torch.save({"model": {"w": torch.arange(300.0)}, "epoch": 3}, buffer)
    return buffer.getvalue()


def kept(place: Path) -> Checkpoints:
    return Checkpoints(place / "run.npz", decode)


def damage(path: Path, at: int = 300) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + 8] = bytes(byte ^ 0xFF for byte in content[at : at + 8])
    path.write_bytes(content)


WITH_DIGEST = {"numpy": with_digest(archive(7)), "torch": with_digest(torch_archive())}


@FINDS_DAMAGE
@pytest.mark.parametrize("kind", WITH_DIGEST)
def test_eight_flipped_bytes_are_found_wherever_they_are(kind: str) -> None:
    content = WITH_DIGEST[kind]
    assert sound(content)
    for at in range(len(content) - 7):
        flipped = content[:at] + bytes(b ^ 0xFF for b in content[at : at + 8]) + content[at + 8 :]
        assert not sound(flipped), at


@FINDS_DAMAGE
@given(data=st.data(), kind=st.sampled_from(sorted(WITH_DIGEST)))
def test_any_other_damage_is_found(data: Any, kind: str) -> None:
    content = WITH_DIGEST[kind]
    start = data.draw(st.integers(0, len(content) - 1))
    end = data.draw(st.integers(start, len(content)))
    instead = data.draw(st.binary(max_size=40))
    damaged = content[:start] + instead + content[end:]
    assert sound(damaged) == (damaged == content)


def test_other_programs_read_it_as_before(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(WITH_DIGEST["torch"])
    for options in ({}, {"mmap": True}):
        assert torch.load(path, weights_only=True, **options)["model"]["w"].sum() == 299 * 150
    assert zipfile.ZipFile(path).testzip() is None
    assert decode(WITH_DIGEST["numpy"]) == 7


@FINDS_DAMAGE
def test_an_archive_without_a_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.npz").write_bytes(archive(5))
    with pytest.raises(PacelineError, match=r"run\.npz is damaged or is no checkpoint"):
        kept(tmp_path).load()


def test_the_older_is_taken_where_the_newest_is_damaged_or_gone(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    assert checkpoints.load() is None
    for value in (1, 2, 3):
        checkpoints.save(archive(value))
    assert (checkpoints.load(), checkpoints.note) == (3, "")
    damage(checkpoints.newest)
    assert checkpoints.load() == 2
    assert "run.npz is damaged" in checkpoints.note
    assert "run-previous.npz" in checkpoints.note
    checkpoints.newest.unlink()
    assert checkpoints.load() == 2
    assert "does not exist" in checkpoints.note
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run-previous.npz"]


def test_a_damaged_one_never_takes_the_place_of_the_older(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    for value in (1, 2):
        checkpoints.save(archive(value))
    damage(checkpoints.newest)
    assert checkpoints.load() == 1
    checkpoints.save(archive(3))
    assert decode(checkpoints.older.read_bytes()) == 1
    checkpoints.save(archive(4))
    assert decode(checkpoints.older.read_bytes()) == 3


@FINDS_DAMAGE
def test_two_damaged_checkpoints_raise_with_both_names(tmp_path: Path) -> None:
    checkpoints = kept(tmp_path)
    for value in (1, 2):
        checkpoints.save(archive(value))
    damage(checkpoints.newest)
    damage(checkpoints.older)
    with pytest.raises(PacelineError, match=r"run\.npz is damaged .* and .*run-previous\.npz is damaged"):
        checkpoints.load()


@guarantee(
    "After a kill or a full disk at any moment, `--resume` continues with no round missing and nothing half "
    "written."
)
@pytest.mark.parametrize("links", [True, False])
def test_a_write_that_fails_leaves_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    checkpoints = kept(tmp_path)
    for value in (1, 2):
        checkpoints.save(archive(value))
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        for _ in range(2):
            with pytest.raises(PacelineError, match="No space left"):
                checkpoints.save(archive(3))
            assert kept(tmp_path).load() == 2
    checkpoints.save(archive(4))
    assert kept(tmp_path).load() == 4
    assert decode(checkpoints.older.read_bytes()) == 2
    assert len(list(tmp_path.iterdir())) == 2, "nothing else is left"
