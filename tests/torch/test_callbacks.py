"""The rounds of a training loop as Prometheus and other sinks are told of them."""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch")
pytest.importorskip("prometheus_client")

import torch

from paceline import PacelineError
from paceline.runs import sinks
from paceline.runs.sinks import Sink
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import Callback, Prometheus, Record, TensorBoard, Training, Wandb
from support.guarantees import guarantee
from support.ports import free_port


def trained(*callbacks: Callback) -> Pace:
    """A handle after four rounds in this process alone."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = Pace(model, 8, callbacks=callbacks)
    data = torch.utils.data.TensorDataset(torch.randn(32, 2), torch.randn(32, 1))
    for x, y in pace.loader(data, seed=0):
        pace.backward(torch.nn.functional.mse_loss(model(x), y))
        pace.step(optimizer)
    pace.host.flush()
    return pace


def test_options_of_trackers_that_are_no_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match=r"^Wandb\(project=3\): expected a text$"):
        Wandb(project=3)  # type: ignore[arg-type]
    with pytest.raises(PacelineError, match=r"^TensorBoard\(folder=7\): expected a text$"):
        TensorBoard(7)  # type: ignore[arg-type]
    assert TensorBoard(tmp_path)._options == {"folder": str(tmp_path)}


def test_prometheus_reads_a_training_run(tmp_path: Path) -> None:
    port = free_port()
    pace = trained(Record(tmp_path / "mine"), Prometheus(port))
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        told = answer.read().decode().splitlines()
    assert 'paceline_rounds_total{job="mine"} 4.0' in told
    assert 'paceline_samples_total{job="mine"} 32.0' in told
    pace.host.detach()
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60)


@dataclass
class Broken(Sink):
    """Takes one round, and fails with the next."""

    folder: str = ""
    taken: ClassVar[int] = 0

    def _log(self, values: dict[str, float], step: int) -> None:
        type(self).taken += 1
        if step:
            raise OSError("the disk is full")


@guarantee(
    "A tracker that fails causes one warning and the training continues; a missing package or a wrong port "
    "raises before it."
)
def test_a_sink_that_fails_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "TensorBoardSink", Broken)
    with pytest.warns(
        RuntimeWarning, match="nothing more is sent to TensorBoard, which failed: the disk is full"
    ):
        pace = trained(TensorBoard())
    assert pace.rounds == 4
    assert Broken.taken == 2
    pace.host.detach()


@guarantee(
    "A tracker that fails causes one warning and the training continues; a missing package or a wrong port "
    "raises before it."
)
def test_port_that_is_no_number_raises_before_training() -> None:
    with pytest.raises(PacelineError, match="metrics port='here': expected a whole number"):
        Pace(torch.nn.Linear(2, 1), 8, callbacks=[Prometheus("here")])  # type: ignore[arg-type]


def test_callback_that_cannot_start_closes_the_started_ones(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("")
    calls: list[str] = []

    class Mine(Callback):
        def on_start(self, training: Training) -> None:
            calls.append("start")

        def on_close(self) -> None:
            calls.append("close")

    with pytest.raises(PacelineError, match="exists; choose another"):
        Pace(torch.nn.Linear(2, 1), 8, callbacks=[Mine(), Record(tmp_path)])
    assert calls == ["start", "close"]


def test_error_of_the_last_round_closes_the_callbacks() -> None:
    calls: list[str] = []

    class Mine(Callback):
        def on_round(self, result: RoundResult) -> None:
            raise ValueError("the last round")

        def on_close(self) -> None:
            calls.append("closed")

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pace = Pace(model, 8, callbacks=[Mine()])
    for size in pace.sizes(1):
        pace.backward(model(torch.randn(size, 4)).square().mean())
        pace.step(optimizer)
    with pytest.raises(ValueError, match="the last round"):
        pace.close()
    assert calls == ["closed"]
    pace.close()
    assert calls == ["closed"]


def test_own_callback_is_called_for_each_round_and_epoch_and_closed_once() -> None:
    calls: list[Any] = []

    class Mine(Callback):
        def on_start(self, training: Training) -> None:
            calls.append((training.rank, training.config["global_batch"], training.place.name))

        def on_round(self, result: RoundResult) -> None:
            calls.append(result.step)

        def on_epoch(self, epoch: int) -> None:
            calls.append(f"epoch {epoch}")

        def on_close(self) -> None:
            calls.append("closed")

    pace = trained(Mine())
    pace.host.detach()
    pace.host.detach()
    assert calls == [(0, 8, "training"), 0, 1, 2, 3, "epoch 0", "closed"]
