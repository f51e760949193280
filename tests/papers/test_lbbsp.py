"""LB-BSP's experiments: the fits against known lines, and that each writes what it says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.forecast.series import bursty
from paceline.papers import lbbsp
from paceline.papers.lbbsp import fit_knee, fit_line, measure
from support.experiments import ran
from support.skips import with_data


def test_a_line_is_found_again() -> None:
    batch = np.array([8.0, 16, 32, 64, 128])
    line = fit_line(batch, 0.003 * batch + 0.02)
    assert line == pytest.approx((0.003, 0.02, 0.0, 1.0))
    assert fit_knee(batch, 0.003 * batch + 0.02).knee == 0


def test_a_knee_is_found_again() -> None:
    """LB-BSP, Fig. 6."""
    batch = 2.0 ** np.arange(12)
    noise = np.exp(0.01 * np.random.default_rng(0).normal(size=12))
    line = fit_knee(batch, (2e-4 * np.maximum(batch, 100) + 0.01) * noise)
    assert line.knee == pytest.approx(100, rel=0.15)
    assert line.slope == pytest.approx(2e-4, rel=0.05)


def test_fig3_reports_the_line_that_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LB-BSP, Fig. 3."""
    slopes = {"lenet5": 1e-4, "resnet18": 0.02}
    monkeypatch.setattr(
        lbbsp, "measure", lambda model, batches, *_: {b: 0.001 + slopes[model] * b for b in batches}
    )
    result, rows = ran("lbbsp", "fig3", tmp_path)
    assert "resnet18: 20 ms a sample and 1 ms a step, R^2 1.0000" in result["ours"]
    found = [float(r["seconds"]) for r in rows if r["model"] == "resnet18"]
    assert found == pytest.approx([0.041, 0.081, 0.161, 0.321])


def test_a_real_measurement() -> None:
    pytest.importorskip("torch")
    found = measure("lenet5", [1, 256], 2, "cpu")
    assert 0 < found[1] < found[256]


@with_data("traces")
def test_fig6_without_a_gpu_takes_published_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result, rows = ran("lbbsp", "fig6", tmp_path)
    assert len(rows) == 10
    assert result["lines"]["V100"]["slope"] == pytest.approx(2.77e-4, rel=0.15)
    assert result["lines"]["V100"]["r2"] > 0.95


def test_fig11_shows_narx_ahead_of_ema_at_every_jump(tmp_path: Path) -> None:
    """LB-BSP, Fig. 11."""
    result, rows = ran("lbbsp", "fig11", tmp_path)
    assert len(rows) == 100
    assert set(rows[0]) == {"round", "actual", "ema", "narx"}
    assert result["error_at_jumps"]["narx"] < 0.5 * result["error_at_jumps"]["ema"]


def test_table3_has_every_forecast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LB-BSP, Table 3."""
    series = bursty(np.random.default_rng(0), rounds=620, workers=3)
    monkeypatch.setattr(lbbsp, "_found", lambda quick: {"short": series})
    result, rows = ran("lbbsp", "table3", tmp_path)
    assert [r["forecast"] for r in rows] == [*lbbsp.PRINTED, *lbbsp.OWN, "(noise-free)"]
    assert all(float(r["time_over_oracle"]) >= 1 for r in rows)
    assert result["ours"].startswith("short: RMSE narx ")


def test_fig14_puts_decisions_over_the_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LB-BSP, Fig. 14."""
    monkeypatch.setattr(lbbsp, "measure", lambda *_: {8: 8 * 0.02})
    monkeypatch.setattr(lbbsp, "_deciding", lambda name, workers, rounds: np.full(rounds, workers * 1e-5))
    result, rows = ran("lbbsp", "fig14", tmp_path)
    assert result["iteration_seconds"] == pytest.approx(128 * 0.02 / 8)
    assert [float(r["percent"]) for r in rows[:3]] == pytest.approx([0.1, 0.2, 0.3])


@pytest.mark.parametrize("name", ["lbbsp-cpu:forecast=narx", "level"])
def test_a_decision_is_timed_each_round(name: str) -> None:
    spent = lbbsp._deciding(name, 32, 20)
    assert spent.shape == (20,)
    assert np.all(spent > 0)


def test_measuring_ends_where_the_memory_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from paceline.learners import models

    class Small(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, images: Any) -> Any:
            if len(images) > 8:
                raise torch.OutOfMemoryError("out of memory")
            return super().forward(images.flatten(1))

    monkeypatch.setattr(models, "create", lambda name, shape: Small(28 * 28, 10))
    assert list(measure("lenet5", [1, 2, 4, 8, 16, 32], 1, "cpu")) == [1, 2, 4, 8]
