"""The library logs what it decides; its loggers are silent by default."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest

from paceline import Cluster, policies
from paceline.balancer import Balancer
from paceline.paramserver.config import ServerConfig
from paceline.paramserver.coordinator import Coordinator
from paceline.paramserver.engine import Moved, Start, WorkerJoin, WorkerLeave
from paceline.paramserver.samples import Epochs
from paceline.serve.models import Settings
from paceline.serve.service import Service
from paceline.train.checkpoint import Checkpoints, with_digest

GUARANTEES = (
    "A program that has not asked for Paceline's log sees nothing printed, and nothing is composed for it.",
)


def _round(balancer: Balancer, step: int) -> None:
    balancer.report(step, balancer.loads(step, 96), np.array([1.0, 2.0, np.nan]))


def test_round_is_logged_only_if_enabled(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    balancer = Balancer(policies.create("level", Cluster(3, 96)))
    with caplog.at_level(logging.DEBUG, "paceline"):
        _round(balancer, 0)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("paceline.balancer", "DEBUG")
    assert record.getMessage().startswith(
        "round 0: 32, 32, 32 samples, worker 1 was last after 2 s (mean 1.5 s)"
    )

    def told(*_: object) -> str:
        raise AssertionError("put together though nobody listens")

    monkeypatch.setattr("paceline.balancer._sentence", told)
    with caplog.at_level(logging.INFO, "paceline"):
        _round(balancer, 1)
    assert len(caplog.records) == 1


def test_policy_that_starts_without_its_state_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    before = Balancer(policies.create("level", Cluster(2, 96))).state_dict()
    with caplog.at_level(logging.INFO, "paceline"):
        Balancer(policies.create("level", Cluster(3, 96))).load_state_dict(before, 7)
    assert [record.getMessage() for record in caplog.records] == [
        "the policy starts again at round 7: its state is of 2 workers, and 3 take part now"
    ]


class Idle:
    """An engine whose workers never end."""

    def compute(self, task: object) -> None: ...

    def cancel(self, tasks: object) -> None: ...

    def update(self, parts: object, batch: object, rate: object) -> Moved:
        raise AssertionError("nobody delivers")


def test_worker_that_leaves_and_rejoins_a_server_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    config = ServerConfig(2, 8, policy="level")
    coordinator = Coordinator(Idle(), config, Epochs(16, 1, seed=0), lambda _: None)
    coordinator.handle(Start(0.0))
    with caplog.at_level(logging.INFO, "paceline"):
        coordinator.handle(WorkerLeave(1.0, 1, "given up"))
        coordinator.handle(WorkerJoin(2.0, 1))
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1 no longer takes part: given up",
        "worker 1 takes part",
    ]


def test_damaged_checkpoint_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run.npz").write_bytes(b"damaged")
    (tmp_path / "run-previous.npz").write_bytes(with_digest(b"an archive"))
    with caplog.at_level(logging.INFO, "paceline"):
        checkpoints = Checkpoints(tmp_path / "run.npz", len)
        assert checkpoints.load()
    assert [record.getMessage() for record in caplog.records] == [checkpoints.note]


def test_worker_that_joins_and_leaves_a_service_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def played() -> None:
        service = Service(tmp_path, record=False)
        await service.start(("j", Settings.of(batch=8, workers=2)))
        _, secret = await service.join("j", "a", None, None)
        await service.leave("j", "a", secret)
        await service.stop()

    with caplog.at_level(logging.INFO, "paceline"):
        asyncio.run(played())
    said = [record.getMessage() for record in caplog.records]
    assert said == ["job 'j': worker 'a' joined in place 0", "job 'j': worker 'a' has left"]
