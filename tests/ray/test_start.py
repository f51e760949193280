"""Joining a Ray leaves this process's signals to whoever handled them."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import pytest

pytest.importorskip("ray")

import ray

from paceline import PacelineError
from paceline.errors import WorkerError
from paceline.ray import start
from paceline.ray.pool import WorkerPool


def a_pool() -> bool:
    with pytest.raises(PacelineError, match="Ray has 0"):
        WorkerPool(["a"])
    return True


@pytest.mark.parametrize(
    "begin", [lambda: start.connect(None, 2), lambda: WorkerPool(["a"])], ids=["own", "pool"]
)
def test_ray_that_does_not_start_is_one_sentence(
    begin: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise Exception("The node timed out.\n  This could be by load.")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(
        WorkerError, match=r"did not start .* \(The node timed out. This could be by load\); try"
    ):
        begin()


@pytest.mark.parametrize(
    "begin",
    [lambda: start.connect(None, 2), lambda: start.connect("auto", 2), a_pool],
    ids=["own", "auto", "pool"],
)
def test_sigterm_keeps_its_earlier_handler(
    begin: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ray.init`` takes SIGTERM for itself, and then the command would end without its report."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    def ours(*_: object) -> None: ...

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "cluster_resources", dict)
    before = signal.signal(signal.SIGTERM, ours)
    try:
        assert begin()
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
