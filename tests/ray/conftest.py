"""One Ray for all tests of this folder, kept small and quiet."""

import logging
import os
import sys
from pathlib import Path

import pytest

from support import ray_forks

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# Ray's workers import the programs by the names that the tests know them by.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def cluster(forks_of_ray):
    ray = pytest.importorskip("ray")
    ray_forks.use()
    ray.init(
        address="local",  # not another that stands on this machine
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=200 * 2**20,
    )
    yield ray
    ray.shutdown()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Ray's own processes would go on beside all later tests: end them with the last test of a group."""
    if nextitem is not None and nextitem.nodeid.rpartition("@")[2] == item.nodeid.rpartition("@")[2]:
        return
    if "@" in item.nodeid and "ray" in sys.modules:
        sys.modules["ray"].shutdown()


@pytest.fixture
def kept(cluster, monkeypatch):
    """For tests of what happens in a run, not of how its processes start: they are those of the runs before."""
    import kept

    monkeypatch.setattr("paceline.ray.server.Crew", kept.KeptCrew)
    monkeypatch.setattr("paceline.ray.server.Shards", kept.KeptShards)
