"""The options that ``paceline train --engine ray`` gives the parameter server."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from paceline.train.checks import server
from paceline.train.config import TrainConfig


@pytest.mark.parametrize(
    ("limits", "expected"),
    [(None, ((2, None), (2, None))), ([(None, 40), (5, None)], ((2, 40), (5, None)))],
    ids=["default", "given"],
)
def test_each_worker_of_a_model_with_batch_norm_gets_two_samples_or_more(limits, expected):
    config = TrainConfig(engine="ray", workers=2, global_batch=64, policy="level", limits=limits)
    made = server(config, min_samples=2)
    assert made.limits == expected
    assert made.build(shared=True).balancer.policy.cluster.least.tolist() == [low for low, _ in expected]
