"""Checkpoints of the parameter server: the older is taken where the newest is damaged; what is none is refused."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("torch")

from paceline.errors import PacelineError
from paceline.train import ray_engine
from paceline.train.config import TrainConfig

GUARANTEES = (
    "If a parameter server's worker is lost, each sample still counts once per epoch and the record names "
    "it; damaged checkpoints are noticed.",
)

CONFIG = TrainConfig(engine="ray", steps=9)


def archive(**changes: Any) -> bytes:
    arrays = {
        "values": np.ones(5),
        "velocity": np.zeros(5),
        "version": 4,
        "uses": np.array([1, 1, 0]),
    } | changes
    buffer = io.BytesIO()
    np.savez(buffer, **{name: value for name, value in arrays.items() if value is not None})
    return buffer.getvalue()


def test_a_damaged_one_gives_way_to_the_one_before_it(tmp_path: Path) -> None:
    kept = ray_engine._checkpoints(tmp_path)
    assert ray_engine.done(CONFIG, tmp_path, 3) is None
    for version in (4, 8):
        kept.save(archive(version=version))
    assert ray_engine.done(CONFIG, tmp_path, 3) == (8, False)
    good = kept.newest.read_bytes()
    for at in range(0, len(good), 40):
        kept.newest.write_bytes(good[:at] + bytes(byte ^ 0xFF for byte in good[at : at + 8]) + good[at + 8 :])
        assert ray_engine.done(CONFIG, tmp_path, 3) == (4, False), f"8 bytes flipped at {at}"
    pool = ray_engine.Epochs(3, 2, 0)
    state = ray_engine._go_on(kept, pool)
    assert state is not None
    assert state["version"] == 4
    assert "continues from the checkpoint before it, server-previous.npz" in kept.note
    assert pool.uses.tolist() == [1, 1, 0]


def test_one_without_a_digest_is_refused(tmp_path: Path) -> None:
    (tmp_path / "server.npz").write_bytes(archive(version=9))
    with pytest.raises(PacelineError, match=r"server\.npz is damaged or is no checkpoint"):
        ray_engine.done(CONFIG, tmp_path, 3)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": None}, "expected version in it"),
        ({"version": np.array(["x"])}, "expected version in it"),
        ({"version": -3}, "version is below 0"),
        ({"uses": None}, "expected uses in it"),
        ({"uses": np.array([[1, 2, 3]])}, "expected uses in it"),
        ({"uses": np.array([1, -1, 0])}, "uses is below 0"),
        ({"values": np.array([1, 2])}, "expected values in it"),
    ],
)
def test_what_is_none_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    kept = ray_engine._checkpoints(tmp_path)
    kept.save(archive(**changes))
    with pytest.raises(PacelineError, match=words):
        ray_engine.done(CONFIG, tmp_path, 3)


def test_another_data_set_is_refused(tmp_path: Path) -> None:
    kept = ray_engine._checkpoints(tmp_path)
    kept.save(archive())
    with pytest.raises(PacelineError, match="training set of 3 samples, the data has 7"):
        ray_engine._go_on(kept, ray_engine.Epochs(7, 1, 0))
