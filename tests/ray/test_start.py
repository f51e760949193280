"""Joining a Ray leaves this process's signals to whoever handled them."""

from __future__ import annotations

import signal
import sys

import pytest

pytest.importorskip("ray")

import ray

from paceline.ray import start


@pytest.mark.parametrize("address", [None, "auto"])
def test_sigterm_stays_with_whoever_had_it(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """``ray.init`` takes SIGTERM for itself, and then the command would end without its report."""

    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))

    def ours(*_: object) -> None: ...

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    before = signal.signal(signal.SIGTERM, ours)
    try:
        assert start.connect(address, 2)
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)
