"""A run's options as run.json keeps them, by this version and by earlier ones."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import PacelineError
from paceline.train import slowdown
from paceline.train.config import TrainConfig

EARLIER = {"data": "digits", "workers": 4, "pace": [1.0, 1.0, 1.0, 4.0], "pace_ms": None, "pace_trace": None}


def test_what_earlier_versions_called_pace_is_the_slowdown() -> None:
    config = TrainConfig.from_dict(EARLIER | {"unknown": 3})
    assert config.slowdown == [1.0, 1.0, 1.0, 4.0]
    assert (config.slowdown_ms, config.slowdown_trace) == (None, None)
    assert TrainConfig.from_dict(config.as_dict()) == config
    traced = TrainConfig.from_dict(EARLIER | {"pace": None, "pace_trace": "speeds.csv"})
    assert (traced.slowdown, traced.slowdown_trace) == (None, "speeds.csv")
    with pytest.raises(PacelineError, match="expected list"):
        TrainConfig.from_dict(EARLIER | {"pace": "quick"})


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
