"""What the workers' machines are, and each one's part of it."""

import os
import platform

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
    found = measure()
    assert len(found.processors) == len(os.sched_getaffinity(0))
    assert 2**27 < found.memory < 2**50
    again = [measure() for _ in range(3)]
    assert {machine.host for machine in again} == {found.host}
    # Seen again, give or take who else is busy.
    assert max(machine.speed for machine in again) == pytest.approx(found.speed, rel=2.0)


def test_a_kernel_without_a_boot_id_goes_by_the_machines_name(monkeypatch, tmp_path):
    monkeypatch.setattr("paceline.machines.BOOT", tmp_path / "none")
    assert measure().host == platform.node()
