"""The table of methods on real workers: a row of each engine runs through, and checks what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.blocks import ROOT


def cells(row: str, steps: int) -> list[str]:
    """The row's line of the table."""
    command = [sys.executable, "benchmarks/real.py", "--rows", row, "--steps", str(steps)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    assert lines[0].startswith("| method | where | seconds |")
    return [cell.strip() for cell in lines[1][1:-1].split("|")]


@pytest.mark.processes
@pytest.mark.usefixtures("warm")
def test_peers_without_a_master_play_dolbies_algorithm_2_on_real_processes() -> None:
    """DOLBIE, Algorithm 2."""
    found = cells("dolbie-peers", 6)
    assert found[1] == "5 processes, gloo, no master"
    assert found[5].startswith("all shares are those of Algorithm 1")
    assert "; 144 messages," in found[5]  # each round 5 x 4 announcements and 4 shares to the straggler


@pytest.mark.nightly  # ray/test_matmul.py has products of workers that are killed, and the row above the table
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_two_masters_products_outlive_a_worker() -> None:
    found = cells("coded", 4)
    assert found[5].startswith("8 products are numpy's")
    assert "was killed half-way" in found[5]


def test_a_wrong_row_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "benchmarks/real.py", "--rows", "nothing"], cwd=ROOT, capture_output=True, text=True,
        timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "invalid choice: 'nothing'" in done.stderr
