"""``paceline train --elastic``: workers are killed, frozen told to leave; the run comes to what one process does."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import datasets
from paceline.errors import PacelineError, WorkerError
from paceline.runs import read, trace
from paceline.runs.findings import findings
from paceline.torch.elastic.keeper import Loss
from paceline.torch.elastic.member import Mended
from paceline.torch.measuring.open_rounds import RoundResult
from paceline.train import elastic_launch, launch
from paceline.train.config import TrainConfig

pytestmark = pytest.mark.xdist_group("elastic")
STEPS = 90


def parameters(run_dir: Path) -> torch.Tensor:
    held = torch.load(run_dir / "checkpoint.pt", weights_only=True)["model"]
    return torch.cat([value.flatten() for value in held.values()])


def test_workers_are_lost_and_the_run_goes_on(tmp_path: Path) -> None:
    hits = {
        15: ("worker 0", signal.SIGKILL),
        40: ("worker 1", signal.SIGTERM),
        60: ("worker 2", signal.SIGSTOP),
    }
    said: list[dict[str, Any]] = []

    def take(event: dict[str, Any]) -> None:
        said.append(event)
        if event["type"] == "round" and (hit := hits.get(event["round"])):
            for child in multiprocessing.active_children():
                if child.name == hit[0] and child.pid is not None:
                    os.kill(child.pid, hit[1])

    options: dict[str, Any] = {
        "global_batch": 60,
        "steps": STEPS,
        "seed": 2,
        "policy": "factoring",
        "lr": 0.02,
    }
    config = TrainConfig(workers=3, elastic=True, slowdown_ms=[0.5, 0.5, 1.0], checkpoint_every=25, **options)
    config.check(datasets.load(config.data))
    summary = elastic_launch.run(config, tmp_path / "three", take)
    launch.run(TrainConfig(workers=1, **options), tmp_path / "one", lambda event: None)

    run = read(tmp_path / "three")
    assert run.round.tolist() == list(range(STEPS))
    assert run.loads.sum(1).tolist() == [60] * 29 + [run.loads[29].sum()] + run.loads.sum(1).tolist()[30:]
    difference = (parameters(tmp_path / "three") - parameters(tmp_path / "one")).abs().max()
    assert difference < 1e-4, difference
    assert summary["workers_lost"] == 2, said
    told = [event["text"] for event in said if event["type"] == "note"]
    assert any(words.startswith("worker 0 was killed by SIGKILL in round") for words in told), told
    assert any(words.startswith("worker 1 left in round") for words in told), told
    assert any(words.startswith("worker 2 gave no sign of life for 1 s in round") for words in told), told
    assert any(words.startswith("worker 0 joined at round") for words in told), told
    happened = [event["what"] for events in run.extras["events"] if events for event in events]
    assert "worker 0 was killed by SIGKILL" in happened
    assert any(words.startswith("Worker 0 was killed by SIGKILL in round") for words in findings(run))
    names = {event["name"] for event in json.loads(trace.write(run).read_text())["traceEvents"]}
    assert any(name.startswith("worker 2 gave no sign of life for 1 s, ") for name in names)


def test_a_lost_worker_that_had_completed_a_round_alone_is_told_of(tmp_path: Path) -> None:
    """Its round is on record by then; what became of it is told with the next."""
    said: list[dict[str, Any]] = []
    story = elastic_launch._Story(TrainConfig(workers=2), tmp_path, said.append, False)
    half, loads = np.full(2, 0.5), np.array([30, 30])

    def ran(step: int) -> dict[str, Any]:
        result = RoundResult(step, 0, 60, loads, half, 0 * half, 0.5, 1.0, half)
        return {"type": "round", "result": result}

    story.take({"type": "start", "first": 0}, 0)
    story.take({"type": "members", "mended": Mended(0, 0, (0, 1), 0.1, False)}, 0)
    story.take(ran(0), 0)
    story.take(ran(1), 1)  # whom the launcher loses now, while the other still sums
    story.lost([Loss(1, 1, "was killed by SIGKILL", 0.0, True)], True)
    story.take({"type": "members", "mended": Mended(1, 1, (0,), 0.1, True)}, 0)
    story.take(ran(1), 0)
    story.take(ran(2), 0)
    story.close()
    words = [event["text"] for event in said if event["type"] == "note"]
    assert len(words) == 1
    assert words[0].startswith("worker 1 was killed by SIGKILL in round 2; 0.00 s lost; no sample lost")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weigh": "hook"}, "the hook leaves the sum to DDP"),
        ({"policy": "level:forecast=narx"}, "trains beside the rounds"),
        ({"dead_after": 0.0}, "--dead-after of at least 0.2"),
        ({"max_restarts": -1}, "max-restarts=-1"),
    ],
)
def test_what_does_not_go_with_it(changed: dict[str, Any], words: str) -> None:
    config = TrainConfig(elastic=True, **changed)
    with pytest.raises(PacelineError, match=words):
        config.check(datasets.load(config.data))


def test_all_are_told_to_leave(tmp_path: Path) -> None:
    """As where the machine is taken away: the run ends with a checkpoint of its last round, and can go on."""

    def take(event: dict[str, Any]) -> None:
        if event["type"] == "round" and event["round"] == 15:
            for child in multiprocessing.active_children():
                if child.name.startswith("worker") and child.pid is not None:
                    os.kill(child.pid, signal.SIGTERM)

    options: dict[str, Any] = {"global_batch": 60, "steps": 40, "seed": 2, "policy": "level", "lr": 0.02}
    config = TrainConfig(workers=2, elastic=True, **options)
    with pytest.raises(WorkerError, match=r"no worker is left after round .*worker . left"):
        elastic_launch.run(config, tmp_path / "two", take)
    kept = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    assert kept["pace"]["rounds"] == read(tmp_path / "two").round[-1] + 1 < 40
    elastic_launch.run(config, tmp_path / "two", lambda event: None, resume=True)
    launch.run(TrainConfig(workers=1, **options), tmp_path / "one", lambda event: None)
    assert (parameters(tmp_path / "two") - parameters(tmp_path / "one")).abs().max() < 1e-4
