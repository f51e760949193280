"""Every policy on loads that are costs: it sees fractions of the round's cost, and need not know."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import Cluster, Machines, policies
from paceline.balancer import Balancer
from paceline.samples import CostLearner, SampleCosts

GUARANTEES = ("Ranks receive parts by their speed: parts of equal cost if they are equally fast.",)

NAMES = [name for name in policies.names() if not policies.create(name, Cluster(2, 8)).needs_upcoming]
N, BATCH, ROUNDS = 4, 64, 30
SPEEDS = np.array([1.0, 1.0, 0.5, 2.0])


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_runs_on_costs(name: str, padded: bool) -> None:
    """Every sample is dealt once, no round is lost on the way, and whoever adapts gets the slow worker less to do."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(5, 1, BATCH * ROUNDS)), 16, 1024)
    costs = SampleCosts.checked(lengths, len(lengths))
    cluster = Cluster(N, BATCH, machines=Machines(np.ones(N), np.ones(N), np.ones(N)))
    learner = CostLearner(costs, N, BATCH, padded=padded)
    loop = Balancer(policies.create(name, cluster), learner=learner)
    parts, costs_of = np.zeros(3), np.zeros(N)
    for step in range(ROUNDS):
        batch = lengths[step * BATCH : (step + 1) * BATCH]
        dealt = loop.deal(step, batch)
        assert sorted(dealt.order.tolist()) == list(range(BATCH))
        if not padded:
            assert dealt.parts[:, 0].sum() == pytest.approx(batch.sum())
        seconds = dealt.parts @ [1e-3, 1e-6, 0.05] / SPEEDS
        cpu = np.full(N, 0.5)
        _, planned = loop.report(step, dealt.loads, seconds, cpu=cpu, memory=cpu, parts=dealt.parts)
        assert planned.sum() == pytest.approx(1)
        assert planned.min() >= 0
        parts, costs_of = dealt.parts, dealt.costs
    assert np.isfinite(parts).all()
    if name in ("level", "lbbsp", "wlbs", "auto", "factoring", "abs"):
        assert costs_of[2] < costs_of[3]
    if name == "level":
        assert (seconds.max() - seconds.min()) / seconds.max() < (0.4 if padded else 0.05)
