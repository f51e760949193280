"""The launcher's own test of a run's last checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.data import datasets
from paceline.errors import PacelineError
from paceline.learners import models
from paceline.rounds import RoundResult
from paceline.torch import progress
from paceline.train.checkpoint import encode, of_run
from paceline.train.config import TrainConfig
from paceline.train.journal import Journal


@pytest.mark.parametrize("damage", ["none", "older", "gone"])
def test_no_other_model_than_that_of_the_last_round_is_tested(tmp_path: Path, damage: str) -> None:
    data, files, one = datasets.load("digits"), of_run(tmp_path), np.ones(1)
    state = models.create("mlp", data.shape, data.classes).state_dict()
    journal = Journal(TrainConfig(workers=1), tmp_path, lambda event: None, False)
    journal.take({"type": "start", "rounds": 2, "first": 0, "policy": "equal"}, 0)
    for step in range(2):
        result = RoundResult(
            step=step,
            batch=1,
            loads=one,
            compute=one,
            overhead=one,
            seconds=1.0,
            shares=one,
            loss=1.0,
            learning_rate=0.1,
            ended=1.0,
        )
        journal.take({"type": "round", "round": step, "rounds": 2, "result": result}, 0)
        counts = dict.fromkeys(progress.COUNTS, 1) | {"rounds": step + 1}
        pace = {"version": progress.VERSION, "policy": "equal", "balancer": {}, **counts}
        prepared = files.prepare(encode(model=state, optimizer={}, pace=pace))
        journal.take({"type": "checkpoint", "rounds": step + 1, "prepared": prepared}, 0)
        journal.settle([0], (), False)
    journal.take({"type": "test"}, 0)
    if damage != "none":
        files.newest.write_bytes(b"no checkpoint")
    if damage == "gone":
        files.newest.unlink()
        files.older.unlink()
    try:
        if damage == "none":
            assert 0 <= journal.end()["test_accuracy"] <= 1
        else:
            with pytest.raises(
                PacelineError, match=r"of the last round in .* is missing or damaged.*--resume"
            ):
                journal.end()
    finally:
        journal.close()
