"""A run's options as run.json keeps them, and how slow they make its workers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paceline import PacelineError
from paceline.train import slowdown
from paceline.train.config import TrainConfig


def test_a_run_is_read_back_as_it_was_kept_and_what_no_option_can_be_is_refused() -> None:
    config = TrainConfig(
        slowdown=[1.0, 1.0, 1.0, 4.0], limits=[(1, 64), (None, None)], steps=3, elastic=False
    )
    kept = json.loads(json.dumps(config.as_dict() | {"unknown": 3}))
    assert TrainConfig.from_dict(kept) == config
    assert TrainConfig.from_dict({"lr": 1}).lr == 1, "JSON may write a whole number"
    for name, wrong in [
        ("slowdown", "quick"), ("slowdown", [1.0, "x"]), ("slowdown_trace", 3), ("limits", [[1, 2, 3]]),
        ("limits", [[1, 2.5]]), ("steps", True), ("steps", 1.5), ("lr", None), ("policy", ["a"]),
    ]:  # fmt: skip
        with pytest.raises(
            PacelineError, match=rf"{name}=.* in run\.json: expected .*; put back the run's own file"
        ):
            TrainConfig.from_dict({name: wrong})


def test_a_slowdown_makes_the_slowest_the_measure_of_all() -> None:
    slowed = slowdown.create(TrainConfig(workers=3, slowdown=[1.0, 1.5, 4.0]), lambda: [0.002, 0.004, 0.001])
    assert slowed is not None
    seconds = [slowed(worker, 7, 10) for worker in range(3)]
    assert np.allclose(np.add(seconds, [0.02, 0.04, 0.01]), [0.04, 0.06, 0.16])
    assert np.allclose(slowed(2, 7, 10, first=False), 0.15)
    quick = slowdown.create(TrainConfig(workers=2, slowdown=[1.0, 2.0]), lambda: [0.0, 0.0])
    assert quick is not None
    assert np.allclose([quick(0, 0, 5), quick(1, 0, 5)], [0.005, 0.01])
    assert slowdown.create(TrainConfig(), lambda: pytest.fail("nobody asked for it")) is None
