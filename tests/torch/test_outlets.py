"""The rounds of a training loop as Prometheus and other sinks are told of them."""

from __future__ import annotations

import socket
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

import torch

from paceline import PacelineError
from paceline.runs import sinks
from paceline.runs.sinks import Sink
from paceline.torch import Pace
from paceline.torch.measuring.audience import asked


def trained(**options: Any) -> Pace:
    """A handle after four rounds in this process alone."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = Pace(model, 8, **options)
    data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
    for x, y in pace.loader(data, seed=0):
        pace.backward(torch.nn.functional.mse_loss(model(x), y))
        pace.step(optimizer)
    pace.flush()
    return pace


def test_prometheus_reads_a_training_run(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pace = trained(record=tmp_path / "mine", metrics_port=port)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        told = answer.read().decode().splitlines()
    assert 'paceline_rounds_total{job="mine"} 4.0' in told
    assert 'paceline_samples_total{job="mine"} 32.0' in told
    pace.detach()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)


class Broken(Sink):
    """Takes one round, and fails with the next."""

    taken = 0

    def _log(self, values: dict[str, float], step: int) -> None:
        type(self).taken += 1
        if step:
            raise OSError("the disk is full")


def test_a_sink_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sinks.SINKS, "broken", Broken)
    with pytest.warns(UserWarning, match="nothing more is sent to broken, which failed: the disk is full"):
        pace = trained(report_to="broken")
    assert pace.rounds == 4
    assert Broken.taken == 2
    pace.detach()


def test_what_is_no_sink_is_refused() -> None:
    for options, words in (
        ({"report_to": "wandbb"}, "sink 'wandbb' is unknown; did you mean wandb"),
        ({"report_to": [3]}, "expected names of sinks"),
        ({"metrics_port": "here"}, "expected a port, or HOST:PORT"),
    ):
        with pytest.raises(PacelineError, match=words):
            Pace(torch.nn.Linear(2, 1), 8, **options)  # type: ignore[arg-type]
    assert asked("wandb", "0.0.0.0:9100") == ["wandb", "prometheus:port=9100,host=0.0.0.0"]
