"""``paceline train``: workers are killed, frozen, told to leave; the run comes to what one process does."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import datasets
from paceline.errors import PacelineError, WorkerError
from paceline.learners import models
from paceline.rounds import RoundResult
from paceline.runs import read, trace
from paceline.runs.findings import findings
from paceline.torch import progress
from paceline.torch.elastic.member import Mended
from paceline.torch.elastic.supervisor import Loss, Supervisor
from paceline.torch.liveness.shutdown import end_with
from paceline.train import checkpoint, checks, launch
from paceline.train.config import TrainConfig
from paceline.train.journal import Journal
from support.guarantees import guarantee

STEPS = 90


DEAD = 10.0  # seconds: less, and a busy machine holds up the heartbeats of a worker that is well


def parameters(run_dir: Path) -> torch.Tensor:
    held = torch.load(run_dir / "checkpoint.pt", weights_only=True)["model"]
    return torch.cat([value.flatten() for value in held.values()])


@guarantee(
    "After kills, freezes, departures and joins at any instant, each sample of a round counts once, with the "
    "model of one process."
)
def test_run_continues_after_lost_workers(tmp_path: Path) -> None:
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
    elastic: dict[str, Any] = {"elastic": True, "slowdown_ms": [0.5, 0.5, 1.0], "dead_after": DEAD}
    config = TrainConfig(workers=3, checkpoint_every=25, **elastic, **options)
    checks.check(config, datasets.load(config.data))
    summary = launch.run(config, tmp_path / "three", take)
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
    assert any(words.startswith(f"worker 2 gave no heartbeat for {DEAD:g} s in round") for words in told), (
        told
    )
    assert any(words.startswith("worker 0 joined at round") for words in told), told
    happened = [event["what"] for events in run.extras["events"] if events for event in events]
    assert "worker 0 was killed by SIGKILL" in happened
    assert any(words.startswith("Worker 0 was killed by SIGKILL in round") for words in findings(run))
    names = {event["name"] for event in json.loads(trace.write(run).read_text())["traceEvents"]}
    assert any(name.startswith(f"worker 2 gave no heartbeat for {DEAD:g} s, ") for name in names)


KILLED = Loss(1, 1, "was killed by SIGKILL", lost=True, failed=False)


class Told:
    """The journal of two workers, and what it tells."""

    def __init__(self, run_dir: Path) -> None:
        self.said: list[dict[str, Any]] = []
        self.run_dir = run_dir
        self.journal = Journal(TrainConfig(workers=2), run_dir, self.said.append, False)
        self.journal.take({"type": "start", "first": 0}, 0)
        self.members(0, 0, (0, 1))

    def members(self, step: int, generation: int, places: tuple[int, ...]) -> None:
        self.journal.take({"type": "members", "mended": Mended(step, generation, places, 0.1, False)}, 0)

    def ran(self, step: int, ident: int, loads: tuple[int, int] = (30, 30)) -> None:
        half = np.full(2, 0.5)
        took = {"compute": half, "overhead": 0 * half, "seconds": 0.5, "ended": step + 1.0}
        result = RoundResult(step=step, batch=60, loads=np.array(loads), loss=1.0, shares=half, **took)
        self.journal.take({"type": "round", "round": step, "result": result}, ident)

    def kept(self, rounds: int) -> float:
        """The rounds are over, and there is a checkpoint; the accuracy of the model in it."""
        data = datasets.load("digits")
        model = models.create("mlp", data.shape, data.classes).eval()
        pace = dict.fromkeys((*progress.COUNTS, *progress.LATER), 1) | {"version": progress.VERSION}
        pace |= {"policy": "equal", "balancer": {}, "rounds": rounds}
        archive = checkpoint.encode(model=model.state_dict(), optimizer={}, pace=pace)
        prepared = checkpoint.of_run(self.run_dir).prepare(archive)
        self.journal.take({"type": "checkpoint", "rounds": rounds, "prepared": prepared}, 0)
        self.journal.take({"type": "test"}, 0)
        with torch.no_grad():
            guess = model(torch.from_numpy(datasets.floats(data.x_test))).argmax(1).numpy()
        return float(np.mean(guess == data.y_test))

    def settle(self, members: list[int], *losses: Loss) -> None:
        self.journal.settle(members, losses, True)

    @property
    def rounds(self) -> list[int]:
        return [event["round"] for event in self.said if event["type"] == "round"]

    @property
    def notes(self) -> list[str]:
        return [event["text"] for event in self.said if event["type"] == "note"]


@guarantee("A round that only the lost worker had completed is on record once, as the others ran it.")
def test_a_round_that_a_lost_worker_had_completed_alone_is_on_record_as_the_others_ran_it(
    tmp_path: Path,
) -> None:
    told = Told(tmp_path)
    told.ran(0, 0)
    told.settle([0, 1])
    assert not told.rounds, "the other may still run it once more"
    told.ran(0, 1)
    told.settle([0, 1])
    assert told.rounds == [0]
    told.ran(1, 1)  # whom the launcher loses now, while the other still sums
    told.journal.lost([KILLED])
    told.settle([0], KILLED)
    assert told.rounds == [0]
    told.members(1, 1, (0,))
    told.ran(1, 0, loads=(60, 0))
    told.settle([0])
    told.ran(2, 0)
    told.settle([0, 2])  # another has joined since, and tells of no round before its first
    assert told.rounds == [0, 1]
    told.ran(3, 2)
    told.settle([0, 2])
    assert told.rounds == [0, 1, 2], "whoever completed a later round needed all in this one"
    told.kept(4)
    told.journal.end()
    told.journal.close()
    assert read(tmp_path).loads.tolist() == [[30, 30], [60, 0], [30, 30], [30, 30]]
    (words,) = told.notes
    assert words.startswith("worker 1 was killed by SIGKILL in round 1; 0.00 s lost; no sample lost")
    assert words.endswith("the round's 60 were run by worker 0")


def test_worker_lost_after_the_rounds_is_reported_and_counted(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.ran(0, 0)
    told.ran(0, 1)
    told.settle([0, 1])
    assert not told.journal.over
    accuracy = told.kept(1)
    assert told.journal.over
    told.journal.lost([KILLED])
    told.settle([0], KILLED)
    summary = told.journal.end()
    assert (summary["workers_lost"], summary["test_accuracy"]) == (1, accuracy)
    told.journal.close()
    assert told.notes == ["worker 1 was killed by SIGKILL; it was in no round at that time"]


def test_worker_lost_after_the_rounds_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[int](), Supervisor.start

    def counted(keeper: Supervisor, place: int) -> int:
        started.append(place)
        return start(keeper, place)

    def take(event: dict[str, Any]) -> None:
        if event["type"] == "test":  # all may have ended by now
            for child in multiprocessing.active_children():
                if child.name == "worker 1" and child.pid is not None:
                    os.kill(child.pid, signal.SIGKILL)

    monkeypatch.setattr(Supervisor, "start", counted)
    config = TrainConfig(workers=2, model="resnet18", global_batch=8, steps=1, elastic=True, dead_after=60.0)
    summary = launch.run(config, tmp_path, take)
    assert started == [0, 1]
    assert summary["workers_lost"] <= 1
    assert summary["test_accuracy"] > 0


def test_a_worker_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.ran(0, 0)
    told.ran(0, 1)
    told.journal.take({"type": "fault", "message": "ValueError: no such sample."}, 1)
    failed = Loss(1, 1, "ended with status 1", lost=True, failed=True)
    with pytest.raises(WorkerError) as ended:
        told.settle([0], KILLED._replace(ident=2), failed)
    told.journal.close()
    assert str(ended.value) == (
        "worker 1 failed after round 0: ValueError: no such sample; the other workers were ended"
    )
    assert read(tmp_path).round.tolist() == [0]


@guarantee(
    "A model, loop, policy or option that cannot survive a lost rank is refused, or named at the start, with "
    "what to use instead."
)
@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"weigh": "hook"}, "--weigh hook leaves the sum to DDP"),
        ({"policy": "level:forecast=narx"}, "trains beside the rounds"),
        ({"dead_after": 0.0}, "--dead-after=0.0: expected at least 0.2 seconds"),
        ({"dead_after": float("inf")}, "--dead-after=inf: expected .* a finite number"),
        ({"dead_after": float("nan"), "weigh": "hook", "elastic": None}, "--dead-after=nan"),
        ({"max_restarts": -1}, "max-restarts=-1"),
    ],
)
def test_what_does_not_go_with_it(changed: dict[str, Any], words: str) -> None:
    config = TrainConfig(**{"elastic": True, **changed})
    with pytest.raises(PacelineError, match=words):
        check(config)


def check(config: TrainConfig, joined: bool = False) -> bool:
    checks.check(config, datasets.load(config.data))
    return checks.survives(config, joined)


@guarantee(
    "A model, loop, policy or option that cannot survive a lost rank is refused, or named at the start, with "
    "what to use instead."
)
def test_run_is_elastic_by_default_where_it_can_be() -> None:
    assert check(TrainConfig())
    assert not check(TrainConfig(elastic=False))
    assert not checks.warning(TrainConfig()) + checks.warning(TrainConfig(elastic=False, weigh="hook"))
    for config, joined, words in [
        (TrainConfig(weigh="hook"), False, "--weigh hook leaves the sum to DDP, which needs every worker"),
        (TrainConfig(policy="level:forecast=narx"), False, "level:forecast=narx trains beside the rounds"),
        (TrainConfig(), True, "torchrun has started its workers"),
    ]:
        assert not check(config, joined)
        assert checks.warning(config, joined).startswith("A worker that is lost ends this run: " + words)
    alone = TrainConfig(workers=1)
    assert not check(alone)
    assert not checks.warning(alone), "whoever has one worker knows"
    assert check(TrainConfig(workers=1, elastic=True))


def test_run_reports_whether_elastic_was_asked_for() -> None:
    for elastic in (None, True, False):
        assert TrainConfig.from_dict(TrainConfig(elastic=elastic).as_dict()).elastic is elastic
    with pytest.raises(PacelineError, match=r"elastic=1 in run\.json"):
        TrainConfig.from_dict({"elastic": 1})


@guarantee(
    "If all workers are killed, the run ends with status 1; on SIGTERM it ends with a checkpoint. `--resume` "
    "continues exactly."
)
def test_all_are_killed_at_once(tmp_path: Path) -> None:
    def take(event: dict[str, Any]) -> None:
        if event["type"] == "round" and event["round"] == 15:
            workers = [
                child for child in multiprocessing.active_children() if child.name.startswith("worker")
            ]
            for sent in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that none sees the other's end
                for child in workers:
                    assert child.pid is not None
                    os.kill(child.pid, sent)

    config = TrainConfig(workers=2, global_batch=60, steps=40, policy="equal", checkpoint_every=5)
    with pytest.raises(WorkerError) as ended:
        launch.run(config, tmp_path, take)
    assert re.fullmatch(
        r"no worker is left after round \d+ \(worker 0 was killed by SIGKILL; worker 1 was killed by SIGKILL\); "
        rf"continue from the last checkpoint with --resume {tmp_path}",
        str(ended.value),
    )
    assert not [child for child in multiprocessing.active_children() if child.name.startswith("worker")]


def first_ends(*given: Any) -> None:
    """In place of ``launch._work``: the first of the workers ends before the run begins, and the others do not."""
    end_with(given[-1])
    if given[4].place:
        time.sleep(600)
    os._exit(0)


def test_worker_that_ends_before_the_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are needed to begin, so nothing is waited for, also if it has ended in good order."""
    monkeypatch.setattr(launch, "_work", first_ends)
    with pytest.raises(WorkerError) as ended:
        launch.run(TrainConfig(workers=2), tmp_path, lambda event: None)
    assert str(ended.value) == (
        "worker 0 ended before the first round was done; the other workers were ended; nothing of the run was "
        "written yet: start it again"
    )


def test_a_run_of_one_step_waits_for_its_directory(tmp_path: Path) -> None:
    """The worker is through before the launcher, which is busy, has begun the record."""

    def take(event: dict[str, Any]) -> None:
        if event["type"] == "starting" and event["ready"]:
            time.sleep(4)

    config = TrainConfig(workers=1, steps=1, elastic=True)
    assert launch.run(config, tmp_path / "run", take)["test_accuracy"] > 0
    assert checkpoint.of_run(tmp_path / "run").load() is not None


@guarantee(
    "Without a fault, a run with two workers and constant plans has "
    "the bits and the accuracy of `--no-elastic`."
)
def test_the_same_bits_as_without_it(tmp_path: Path) -> None:
    """With two workers, whose gradients have one sum; with more, the sums are taken in another order."""
    accuracies = []
    for name in ("elastic", "plain"):
        config = TrainConfig(
            workers=2,
            global_batch=60,
            steps=15,
            policy="equal",
            checkpoint_every=5,
            elastic=name == "elastic",
        )
        accuracies.append(launch.run(config, tmp_path / name, lambda event: None)["test_accuracy"])
        older = torch.load(tmp_path / name / "checkpoint-previous.pt", weights_only=True)
        assert older["pace"]["rounds"] == 10, "the two that are kept are of different rounds"
    assert torch.equal(parameters(tmp_path / "elastic"), parameters(tmp_path / "plain"))
    assert accuracies[0] == accuracies[1] > 0.5


@guarantee(
    "If all workers are killed, the run ends with status 1; on SIGTERM it ends with a checkpoint. `--resume` "
    "continues exactly."
)
def test_sigterm_to_all_workers_ends_with_a_checkpoint(tmp_path: Path) -> None:
    """As where the machine is taken away: the run ends with a checkpoint of its last round, and can go on."""

    def take(event: dict[str, Any]) -> None:
        if event["type"] == "round" and event["round"] == 15:
            for child in multiprocessing.active_children():
                if child.name.startswith("worker") and child.pid is not None:
                    os.kill(child.pid, signal.SIGTERM)

    # Few rounds, which are long enough for the signal: rounding, which depends on who ran what, grows with each.
    options: dict[str, Any] = {"global_batch": 60, "steps": 150, "seed": 2, "policy": "level", "lr": 0.02}
    config = TrainConfig(workers=2, elastic=True, slowdown_ms=[0.3, 0.3], **options)
    with pytest.raises(WorkerError, match=r"no worker is left after round .*worker . left"):
        launch.run(config, tmp_path / "two", take)
    kept = torch.load(tmp_path / "two" / "checkpoint.pt", weights_only=True)
    assert kept["pace"]["rounds"] == read(tmp_path / "two").round[-1] + 1 < 150
    launch.run(config, tmp_path / "two", lambda event: None, resume=True)
    launch.run(TrainConfig(workers=1, **options), tmp_path / "one", lambda event: None)
    assert (parameters(tmp_path / "two") - parameters(tmp_path / "one")).abs().max() < 2e-5


@guarantee(
    "After a kill or a full disk at any moment, `--resume` continues with no round missing and nothing half "
    "written."
)
def test_a_checkpoint_is_committed_when_its_rounds_are_on_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before the record is on the disk itself."""
    synced, fsync = list[str](), os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    told, newest = Told(tmp_path), tmp_path / "checkpoint.pt"
    prepared = []
    for rounds in (2, 4):
        prepared.append(tmp_path / f".paceline-{rounds}")
        prepared[-1].write_bytes(b"%d" % rounds)
        event = {"type": "checkpoint", "rounds": rounds, "prepared": prepared[-1]}
        told.journal.take(event, 0)
    told.ran(0, 0)
    told.ran(1, 0)
    told.settle([0, 1])
    assert not newest.exists(), "round 1 may still be run once more"
    monkeypatch.setattr(os, "fsync", noted)
    told.ran(1, 1)
    told.ran(0, 1)
    told.settle([0, 1])
    assert (newest.read_bytes(), synced) == (b"2", ["rounds.jsonl"])
    told.journal.close()
    assert newest.read_bytes() == b"2"
    assert not any(path.exists() for path in prepared)


def test_last_round_is_on_record_without_a_report_of_a_joined_worker(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.ran(0, 0)
    told.journal.take({"type": "test"}, 0)
    told.journal.take({"type": "checkpoint", "rounds": 1, "prepared": tmp_path / ".paceline-1"}, 0)
    (tmp_path / ".paceline-1").write_bytes(b"1")
    told.settle([0, 2])
    assert told.rounds == [0]
    assert (tmp_path / "checkpoint.pt").read_bytes() == b"1"
    told.journal.close()


@guarantee(
    "If all workers are killed, the run ends with status 1; on SIGTERM it ends with a checkpoint. `--resume` "
    "continues exactly."
)
@pytest.mark.parametrize(("when", "model"), [("round", "mlp"), ("test", "resnet18")])
def test_sigterm_in_or_after_the_last_round_lets_the_run_end(tmp_path: Path, when: str, model: str) -> None:
    """The run is done all the same, and is evaluated: whoever waited for another would wait for ever."""

    def take(event: dict[str, Any]) -> None:
        if event["type"] == when and event.get("round", 0) == 0:
            for child in multiprocessing.active_children():
                if child.name.startswith("worker") and child.pid is not None:
                    os.kill(child.pid, signal.SIGTERM)

    steps = 2 if when == "round" else 1
    config = TrainConfig(
        workers=2, model=model, global_batch=8, steps=steps, policy="equal", slowdown_ms=[60.0, 60.0], elastic=True
    )  # fmt: skip
    summary = launch.run(config, tmp_path, take)
    assert summary["test_accuracy"] > 0
    assert read(tmp_path).round.tolist() == list(range(steps))
