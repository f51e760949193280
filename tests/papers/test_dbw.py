"""DBW's experiments: what they take for the truth against closed forms, and that each writes what it says."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from paceline.papers import REQUIRED, dbw_estimates, experiments
from paceline.shared import data_folder

with_data = pytest.mark.skipif(not (data_folder() / "mnist").is_dir(), reason="the shared MNIST is not here")


def test_the_true_times_meet_what_is_known_of_order_statistics() -> None:
    times = dbw_estimates._stationary(5, 6000)  # round trips of .3 + .7 Exp(1)
    # The k-th of five that start together: .3 + .7 (1/5 + ... + 1/(6 - k)). Some start later, but with k = n none.
    together = 0.3 + 0.7 * np.cumsum(1 / np.arange(5, 0, -1))
    assert times[4] == pytest.approx(together[4], rel=0.02)
    assert np.all(times[:4] > together[:4])
    assert np.all(np.diff(times) > 0)


def test_the_constrained_estimates_are_better_than_plain_means(tmp_path: Path) -> None:
    result = experiments("dbw")["fig3"](tmp_path, True)
    assert set(REQUIRED) <= set(result)
    with (tmp_path / "fig3.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    rare = {
        name: [float(row["rms_error"]) for row in rows if row["estimator"] == name and row["k"] in "34"]
        for name in ("constrained", "naive")
    }
    assert sum(rare["constrained"]) < sum(rare["naive"])


def test_the_stand_in_for_spark_has_the_percentiles_it_was_made_from(tmp_path: Path) -> None:
    experiments("dbw")["fig7"](tmp_path, True)
    with (tmp_path / "fig7.csv").open(newline="") as file:
        found = {float(row["percentile"]): float(row["seconds"]) for row in csv.DictReader(file)}
    one, tail = stats.lognorm(0.4, scale=0.9), stats.lognorm(0.4, scale=2.7)
    for percentile, seconds in found.items():
        share = 0.97 * one.cdf(seconds) + 0.03 * tail.cdf(seconds)
        assert share == pytest.approx(percentile / 100, abs=0.01)


@with_data
def test_a_slowdown_of_half_of_the_workers_is_noticed(tmp_path: Path) -> None:
    result = experiments("dbw")["fig9"](tmp_path, True)  # 40 virtual seconds
    assert "dbw:memory=0.9 16 -> 8" in result["ours"]
    assert (tmp_path / "fig9.png").read_bytes()[:4] == b"\x89PNG"
