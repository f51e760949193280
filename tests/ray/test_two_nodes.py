"""Joining a standing cluster of two nodes, one of which dies while workers on it compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray")]

SCRIPT = """
import json, logging
from ray.cluster_utils import Cluster

from paceline.coordinator import Choices
from paceline.ray import Server
from paceline.samples import Epochs
from programs import X, Paced, quadratic

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "object_store_memory": 80 * 2**20})
second = cluster.add_node(num_cpus=3, object_store_memory=80 * 2**20)
log, pool = [], Epochs(len(X), 6, seed=1)


def on_update(update):
    log.append(update)
    if update.version == 8:
        cluster.remove_node(second, allow_graceful=False)


choices = Choices(4, 40, lr=0.2)
with Server(
    quadratic, choices, pool, on_update, address=cluster.address, cpus=1.0, pace=Paced([0.02] * 4)
) as server:
    server.run()
print(json.dumps({"uses": sorted(set(pool.uses.tolist())), "present": [u.present for u in log]}))
cluster.shutdown()
"""


def test_the_run_outlives_a_node():
    folder = str(Path(__file__).parent)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=environment, timeout=150
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found["uses"] == [6]
    assert found["present"][0] == 4
    assert found["present"][-1] < 4
