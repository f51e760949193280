"""What Ray's workers find here, and processes that several tests share."""

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
# Ray's workers import the programs by the names that the tests know them by.
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])


@pytest.fixture
def kept(cluster, monkeypatch):
    """For tests of what happens in a run, not of how its processes start: they are those of the runs before."""
    import kept

    monkeypatch.setattr("paceline.ray.server.Crew", kept.KeptCrew)
    monkeypatch.setattr("paceline.ray.server.Shards", kept.KeptShards)
