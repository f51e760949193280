"""LB-BSP on virtual clusters, and on real network namespaces where they are allowed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from paceline.papers.lbbsp_clusters import ABUNDANT, DEFICIENT, MEGABYTES, cluster_a, cluster_c, converged
from paceline.simulate import run
from support.experiments import ran
from support.skips import with_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["fig8", "fig9"])
def test_the_more_uneven_the_more_is_saved(tmp_path: Path, name: str) -> None:
    """LB-BSP, Figs. 8, 9."""
    result, _ = ran("lbbsp", name, tmp_path)
    saved = [1 - level["LB-BSP"] / level["BSP"] for level in result["levels"].values()]
    assert saved == sorted(saved)
    assert saved[2] > 0.3
    for level in result["levels"].values():
        assert level["oracle"] <= level["level"] * 1.001
        assert level["ASP"] <= level["BSP"]


def test_cluster_a_has_its_unevenness() -> None:
    """LB-BSP, setting."""
    assert cluster_a(3.0, 128, 0.015, 300, 1).size == 32
    assert cluster_a(3.0, 128, 0.015, 300, 1).global_batch == 32 * 128
    played = run(cluster_a(3.0, 128, 0.015, 300, 1), ["equal"]).policies["equal"]
    pace = played.first_seconds / played.first_seconds.min()
    assert pace.max() == pytest.approx(3.0, rel=0.15)


def test_cluster_b(tmp_path: Path) -> None:
    """LB-BSP, Fig. 10."""
    result, _ = ran("lbbsp", "fig10", tmp_path)
    faster = result["times_as_fast"]
    assert faster["equal"] == 1
    assert 1.2 < faster["lbbsp-cpu"] < faster["optimum"]


def test_cluster_c_has_the_papers_batches(tmp_path: Path) -> None:
    """LB-BSP, Figs. 12, 13."""
    ran("lbbsp", "fig12", tmp_path)
    result, rows = ran("lbbsp", "fig13", tmp_path)
    seconds = result["seconds"]
    assert seconds["LB-BSP"]["batch abundant"] == pytest.approx(235, abs=3)
    assert seconds["LB-BSP"]["batch deficient"] < 200
    slower = 8 * MEGABYTES * (1 / DEFICIENT - 1 / ABUNDANT)
    assert seconds["BSP"]["deficient"] - seconds["BSP"]["abundant"] == pytest.approx(slower, rel=0.1)
    batches = {float(r["testee_batch"]) for r in rows if r["policy"] == "LB-BSP"}
    assert min(batches) >= 58
    assert max(batches) <= 384
    assert np.isfinite(cluster_c(4, 2).workers[0].link.seconds(3))  # type: ignore[union-attr]


@pytest.mark.nightly
@pytest.mark.processes
def test_three_workers_on_real_links() -> None:
    """LB-BSP, Figs. 12, 13."""
    command = ["benchmarks/network.py", "--period", "7", "--policy", "equal", "--policy", "level"]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    if ran.stdout.startswith("not run: "):
        pytest.skip(ran.stdout)
    rows = {line.split()[0]: line.split()[1:] for line in ran.stdout.splitlines()[1:]}
    assert set(rows) == {"equal", "level"}
    for policy, (fast, slow, _, loads) in rows.items():
        # A ring of three sends 4/3 of LeNet-5's 247 kB over each link: 0.16 s at 16 Mbit/s, less the bucket's burst.
        assert float(slow) > max(100.0, float(fast))
        each = [int(load) for load in loads.split("/")]
        assert sum(each) == 96
        assert each[2] < (20 if policy == "level" else 33)


def test_training_converges_with_ten_losses_in_a_row_below_the_target() -> None:
    """LB-BSP, setting."""
    rng = np.random.default_rng(3)
    for _ in range(200):
        losses = list(rng.choice([0.1, 0.599, 0.6, 3.0], 60, p=[0.5, 0.4, 0.05, 0.05]))
        below = "".join("b" if loss < 0.6 else "-" for loss in losses)
        first = below.find("b" * 10)  # -1 if there is none
        stops = [len(each) for each in (losses[:i] for i in range(61)) if converged(each)]
        assert (stops[0] if stops else -1) == (first + 10 if first >= 0 else -1)
    # nine small losses after a large one do not suffice, however small their mean
    assert not converged([0.61] + [0.0] * 9)
    assert converged([9.0] + [0.59] * 10)
    assert converged([1.4] * 10, 1.5)


@with_data("mnist")
def test_updates_of_each_scheme_take_the_time_of_their_waiting(tmp_path: Path) -> None:
    """LB-BSP, Fig. 8."""
    _, rows = ran("lbbsp", "fig8sync", tmp_path)
    found = {(row["level"], row["scheme"]): row for row in rows}
    for level, slowest in {"Homo": 1.0, "Hetero-L2": 2.0, "Hetero-L3": 3.0}.items():
        trips = np.linspace(1.0, slowest, 8)  # seconds of each worker's gradient
        each = {
            scheme: float(found[level, scheme]["seconds_an_update"]) for scheme in ("BSP", "ASP", "LB-BSP")
        }
        assert each["BSP"] == pytest.approx(slowest / 8, rel=0.1)  # all wait for the slowest
        assert each["ASP"] == pytest.approx(1 / (1 / trips).sum(), rel=0.1)  # nobody waits
        assert each["ASP"] * 0.95 < each["LB-BSP"] <= each["BSP"] * 1.02
        assert found[level, "BSP"]["updates"] == found[level, "LB-BSP"]["updates"]
