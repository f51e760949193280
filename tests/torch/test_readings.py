"""Processors and memory that others leave: with a scripted machine, and on this one."""

from __future__ import annotations

import time
from types import SimpleNamespace

import psutil
import pytest

from paceline.torch.readings import Readings


def test_own_work_does_not_count_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 102.0, 103.0])
    spent = iter([5.0, 8.0, 8.0])
    busy = iter([0.0, 75.0, 50.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: next(busy))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(percent=30.0))
    monkeypatch.setattr(
        psutil,
        "Process",
        lambda: SimpleNamespace(cpu_times=lambda: SimpleNamespace(user=next(spent) - 1, system=1)),
    )
    readings = Readings()
    # 3 of 8 processor seconds were ours, 6 of 8 were busy: others had 3/8
    assert readings.take() == pytest.approx((1 - 3 / 8, 0.7))
    assert readings.take() == pytest.approx((0.5, 0.7))


def test_portions_on_this_machine() -> None:
    readings = Readings()
    sum(range(200_000))
    cpu, memory = readings.take()
    assert 0 <= cpu <= 1
    assert 0 < memory < 1
