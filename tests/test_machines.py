"""What the workers' machines are, and each one's part of it."""

import os

import numpy as np
import pytest

from paceline.machines import Machine, measure, sizes


def test_workers_share_what_they_run_on():
    gib = 2.0**30
    found = sizes(
        [
            Machine("a", (0, 1, 2, 3), 100.0, 8 * gib),
            Machine("a", (0, 1, 2, 3), 100.0, 8 * gib),
            Machine("b", (0, 1), 300.0, 8 * gib),
            Machine("c", (0,), 100.0, 8 * gib),
            Machine("c", (0, 1), 100.0, 8 * gib),
        ]
    )
    np.testing.assert_allclose(found.cpus, [2, 2, 2, 0.5, 1.5])
    np.testing.assert_allclose(found.cores, [200, 200, 600, 50, 150])
    np.testing.assert_allclose(found.memory, np.array([4, 4, 8, 4, 4]) * gib)


def test_this_machine():
    found = measure("here")
    assert found.host == "here"
    assert len(found.processors) == len(os.sched_getaffinity(0))
    assert 2**27 < found.memory < 2**50
    again = [measure("here").speed for _ in range(3)]
    assert max(again) == pytest.approx(found.speed, rel=2.0)  # seen again, give or take who else is busy
