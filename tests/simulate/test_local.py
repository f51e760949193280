"""``paceline simulate --learn --every``: local steps between merges, against a parameter server and plain loops."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from paceline.paramserver.config import ServerConfig
from paceline.paramserver.samples import Draws
from paceline.simulate.local import SimulatedLocalSteps
from paceline.simulate.server import RoundTrips, SimulatedServer
from paceline.simulate.timing import Constant

GUARANTEES = (
    "`simulate --learn --every` gives what plain loops with `torch.optim.SGD` give on the same samples.",
)

SAMPLES, FEATURES, WORKERS = 400, 6, 4


class Logistic:
    """Logistic regression in float64."""

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.x = rng.standard_normal((SAMPLES, FEATURES))
        self.y = (self.x @ rng.standard_normal(FEATURES) + rng.standard_normal(SAMPLES) > 0).astype(float)

    def start(self):
        return np.full(FEATURES, 0.1)

    def gradient(self, values, samples):
        x, y = self.x[samples], self.y[samples]
        p = 1 / (1 + np.exp(-x @ values))
        return x.T @ (p - y) / len(y), float(-np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)))


def trips(paces=(0.01,) * WORKERS):
    return RoundTrips(WORKERS, Constant(0.05), Constant(np.array(paces)), 7)


def local(every, merges, policy="equal", outer="mean", paces=(0.01,) * WORKERS, **options):
    by = ServerConfig(WORKERS, 40, policy=policy, lr=0.3)
    made = SimulatedLocalSteps(Logistic(), by, trips(paces), Draws(SAMPLES, 5), every, outer, **options)
    return made, made.run(merges, lambda update: False)


def test_one_step_between_merges_is_ddp():
    """A parameter server that waits for all: plain SGD, the mean by samples, the same virtual clock."""
    server = SimulatedServer(Logistic(), ServerConfig(WORKERS, 40, lr=0.3), trips(), Draws(SAMPLES, 5))
    theirs = server.run(50)
    made, ours = local("1", 50)
    assert np.abs(made.parameters.values - server.parameters.values).max() < 1e-12
    assert [each.ended for each in ours] == pytest.approx([each.ended for each in theirs], abs=1e-12)
    assert [each.loss for each in ours] == pytest.approx([each.loss for each in theirs], abs=1e-12)


@pytest.mark.parametrize("outer", ["mean", "nesterov", "nesterov:lr=0.5,momentum=0.6"])
def test_merges_are_those_of_plain_loops(outer):
    torch = pytest.importorskip("torch")
    merges, every = 12, 8
    made, updates = local(str(every), merges, "level", outer, (0.01, 0.01, 0.02, 0.04))
    learner, pool = Logistic(), Draws(SAMPLES, 5)
    common = torch.from_numpy(learner.start()).requires_grad_()
    settings = {"mean": {"lr": 1.0}, "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}
    other = {"lr": 0.5, "momentum": 0.6, "nesterov": True}
    optimizer = torch.optim.SGD([common], **settings.get(outer, other))
    for update in updates:
        loads, changed = update.loads, np.zeros(FEATURES)
        assert loads.sum() == every * 40
        for worker, load in enumerate(loads.tolist()):
            values = common.detach().numpy().copy()
            for size in (task.load for task in update.moved if task.worker == worker):
                gradient, _ = learner.gradient(values, pool.take(worker, size))
                values -= 0.3 * gradient
            changed += load / loads.sum() * (common.detach().numpy() - values)
        common.grad = torch.from_numpy(changed)
        optimizer.step()
    assert np.abs(common.detach().numpy() - made.parameters.values).max() < 1e-12
    loads = updates[-1].loads
    assert loads[0] > 3 * loads[3], "as many steps as the speed allows"
    assert min(task.load for task in updates[-1].moved) >= 8, "each of about B/n samples"
    assert max(task.load for task in updates[-1].moved) <= 12


def test_an_interval_of_seconds_takes_them_and_auto_leaves_links_a_tenth():
    paces = (0.01, 0.01, 0.01, 0.04)
    _, updates = local("4 s", 15, "level", paces=paces)
    assert updates[-1].seconds == pytest.approx(4.0, rel=0.15)
    seconds = np.array([0.1, 0.1, 0.1, 0.7])  # of each worker's link: merges wait for the slowest
    made, updates = local("auto", 30, "level", paces=paces, links=lambda index: seconds)
    assert made.linked == pytest.approx(30 * 0.7)
    later = updates[10:]
    assert 0.7 * len(later) / sum(each.seconds for each in later) == pytest.approx(0.1, abs=0.02)


def test_who_stops_loses_its_steps_since_the_last_merge():
    here = np.ones(WORKERS, bool)

    def members(index):
        stopped = here & (np.arange(WORKERS) == 2) & (index == 3)
        return here if index <= 3 else np.arange(WORKERS) != 2, stopped

    _, updates = local("4", 8, members=members, give_up=9.0)
    assert [each.quorum for each in updates] == [4, 4, 4, 3, 3, 3, 3, 3]
    assert updates[3].seconds == pytest.approx(9.0)
    assert updates[3].dropped == {"died": 4}
    assert updates[4].loads[2] == 0
    assert updates[4].loads.sum() == 160


@pytest.mark.parametrize("absent", [(0, 1), (2, 3)])
@pytest.mark.parametrize("policy", ["equal", "level"])
def test_worker_that_joins_or_rejoins_gets_its_share_again(policy, absent):
    def members(index):
        return ~((np.arange(WORKERS) == 1) & (index in absent)), np.zeros(WORKERS, bool)

    _, updates = local("4", 8, policy, members=members)
    for index in absent:
        assert updates[index].loads[1] == 0
    for update in updates[-2:]:  # workers of the same speed
        assert update.loads == pytest.approx([40] * WORKERS, abs=1)


def test_shares_of_a_merge_are_those_of_the_next_interval():
    _, updates = local("4", 6, "level", paces=(0.01, 0.01, 0.02, 0.04))
    for update, following in itertools.pairwise(updates):
        assert update.shares * 160 == pytest.approx(following.loads, abs=1)


SCENARIO = """
global_batch = 256
rounds = 12
[[workers]]
count = 48
seconds_per_sample = 0.01
link = { megabytes = 2.0, mbps = 16.0 }
[[workers]]
count = 16
seconds_per_sample = 0.04
link = { megabytes = 2.0, mbps = 100.0 }
"""


def test_the_command_plays_64_workers_behind_slow_links(tmp_path, capsys):
    pytest.importorskip("torch")
    from paceline.cli import run

    path, figures = tmp_path / "many.toml", tmp_path / "figures.json"
    path.write_text(SCENARIO)
    common = ["simulate", str(path), "--learn", "--policy", "level", "--json", str(figures)]
    assert run([*common, "--every", "8"]) == 0
    told = capsys.readouterr().out
    assert "12 merges in" in told
    assert "local steps merged every 8 (mean), level" in told
    found = json.loads(figures.read_text())
    assert found["link_seconds"] == pytest.approx(12.0), "16 Mbit at 16 Mbit/s, once a merge"
    assert sum(found["steps"]) >= 12 * 8 * 64 * 0.9
    assert min(found["steps"]) * 3 < max(found["steps"])
    assert run(common) == 0  # a server, whose links are used in each step
    server = json.loads(figures.read_text())
    assert found["curves"]["loss"][-1] < server["curves"]["loss"][-1]
