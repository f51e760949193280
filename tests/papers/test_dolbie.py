"""DOLBIE's experiments: each writes what it says, and the settings are what they claim."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.papers import data_folder, dolbie_accuracy
from paceline.papers.dolbie import NETWORKS, RESNET_SAMPLE, measured
from support.experiments import ran
from support.skips import with_data


@pytest.mark.parametrize("name", ["fig3", "fig4"])
def test_the_papers_policies_keep_their_order(tmp_path: Path, name: str) -> None:
    """DOLBIE, Figs. 3, 4."""
    result, rows = ran("dolbie", name, tmp_path)
    at = {(r["setting"], r["policy"]): float(r["seconds"]) for r in rows if r["round"] == "40"}
    for setting in ("measured", "A"):
        assert at[setting, "OPT"] < at[setting, "level"] < at[setting, "DOLBIE"] < at[setting, "EQU"]
        percent = result["percent_less_at_40"][setting]["EQU"]
        assert percent == pytest.approx(100 * (1 - at[setting, "DOLBIE"] / at[setting, "EQU"]), abs=0.01)
        assert result["oracle_ratio"][setting]["level"] < 1.2


def test_regret_is_what_was_summed(tmp_path: Path) -> None:
    """DOLBIE, Fig. 5."""
    result, rows = ran("dolbie", "fig5", tmp_path)
    last = {(r["setting"], r["policy"]): float(r["regret_s"]) for r in rows if r["round"] == "100"}
    for (setting, policy), seconds in last.items():
        assert result["regret_seconds"][setting][policy] == pytest.approx(seconds, rel=1e-4, abs=1e-6)
    assert last["measured", "OPT"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("name", ["fig9", "fig10"])
def test_workers_each_have_their_line(tmp_path: Path, name: str) -> None:
    """DOLBIE, Figs. 9, 10."""
    _, rows = ran("dolbie", name, tmp_path)
    assert len(rows) == 7 * 100 * 30
    if name == "fig10":
        loads = [float(r["value"]) for r in rows if r["policy"] == "DOLBIE" and r["round"] == "50"]
        assert sum(loads) == pytest.approx(256, abs=0.01)


def test_time_is_computing_communicating_and_waiting(tmp_path: Path) -> None:
    """DOLBIE, Fig. 11."""
    result, rows = ran("dolbie", "fig11", tmp_path)
    by_name = {r["policy"]: r for r in rows}
    assert float(by_name["OPT"]["waiting_s"]) < float(by_name["DOLBIE"]["waiting_s"])
    assert all(micro > 0 for micro in result["decide_microseconds"].values())


def test_accuracy_is_trained_once_and_set_on_each_policys_clock(tmp_path: Path, monkeypatch: Any) -> None:
    """DOLBIE, Figs. 6 to 8."""
    runs: list[str] = []

    def train(network: str, epochs: int, samples: int | None) -> list[float]:
        runs.append(network)
        return list(np.linspace(0.1, 1.0, 60))

    monkeypatch.setattr(dolbie_accuracy, "trained", train)
    result, rows = ran("dolbie", "fig7", tmp_path)
    assert runs == ["resnet18"]
    steps = {policy: [r for r in rows if r["policy"] == policy] for policy in ("EQU", "DOLBIE", "level")}
    curves = [[r["accuracy"] for r in lines] for lines in steps.values()]
    assert curves[0] == curves[1] == curves[2]
    ends = {policy: float(lines[-1]["seconds"]) for policy, lines in steps.items()}
    assert ends["level"] < ends["DOLBIE"] < ends["EQU"]
    assert result["final_accuracy"] > 0.95


def test_a_real_training_learns() -> None:
    pytest.importorskip("torch")
    accuracy = dolbie_accuracy.trained("lenet5", 12)
    assert np.mean(accuracy[-6:]) > np.mean(accuracy[:6]) + 0.1


def test_sizes_of_the_networks_are_those_of_ours() -> None:
    pytest.importorskip("torch")
    from paceline.learners import models

    for name, network in NETWORKS.items():
        assert sum(p.numel() for p in models.create(name, (3, 32, 32)).parameters()) == network.parameters


@with_data("traces")
def test_seconds_a_sample_are_fitted_to_the_measured_throughputs() -> None:
    with (data_folder() / "traces" / "gavel_isolated_throughputs.csv").open(newline="") as opened:
        table = csv.DictReader(line for line in opened if line[0] != "#")
        rows = [r for r in table if r["model"] == "ResNet-18"]
    for place, gpu in enumerate(("v100", "p100")):
        ours = [r for r in rows if r["accelerator"] == gpu and r["num_gpus"] == "1"]
        batch = np.array([float(r["batch_size"]) for r in ours])
        seconds = 1 / np.array([float(r["steps_per_s"]) for r in ours])
        slope = np.polyfit(batch, seconds, 1)[0]
        assert RESNET_SAMPLE[place] == pytest.approx(slope, rel=0.1)


def test_communication_grows_with_the_parameters() -> None:
    overheads = [measured(name).workers[0].overhead.mean for name in ("lenet5", "vgg16")]  # type: ignore[attr-defined]
    assert overheads[0] < overheads[1]
