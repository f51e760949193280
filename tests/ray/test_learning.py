"""Gradient descent on coded products: the example, run as it stands."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray-products")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "coded_regression.py"


def test_regression_on_coded_products_is_numpy_s_within_1e_8(cluster, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "40"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    told = [re.fullmatch(r"(\w+): ([\d.]+) % right after 40 steps, (\S+) from numpy", line) for line in lines]
    assert [each[1] for each in told] == ["linear", "logistic"]
    for each in told:
        assert float(each[2]) > 95
        assert float(each[3]) < 1e-8
