"""Learning by coded products: the examples, run as they stand."""

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.ray, pytest.mark.xdist_group("ray-products")]

EXAMPLES = Path(__file__).parents[2] / "examples"


def shown(monkeypatch, capfd, name, *arguments):
    """The lines that an example prints, those of the commands that it runs included."""
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capfd.readouterr().out.splitlines()


@pytest.mark.nightly  # the next test solves with such products, and test_matmul.py compares them with numpy's
def test_regression_on_coded_products_is_numpy_s_within_1e_8(cluster, monkeypatch, capfd):
    lines = shown(monkeypatch, capfd, "coded_regression.py", "--steps", "40")
    told = [re.fullmatch(r"(\w+): ([\d.]+) % right after 40 steps, (\S+) from numpy", line) for line in lines]
    assert [each[1] for each in told] == ["linear", "logistic"]
    for each in told:
        assert float(each[2]) > 95
        assert float(each[3]) < 1e-8


def test_cg_on_measured_workers_is_numpy_s_solution_although_one_is_killed_and_replaced(
    cluster, monkeypatch, capfd
):
    lines = shown(monkeypatch, capfd, "coded_cg.py", "--images", "100", "--digits", "3")
    at = [lines.index(f"step {step}: w1 is {what}") for step, what in ((20, "killed"), (40, "replaced"))]
    assert at == sorted(at)
    assert re.search(r"whichever they are: kernel [1-5]\.", " ".join(lines))
    products, right, apart = re.search(
        r"(\d+) products: .* ([\d.]+) % of the test .* by (\S+)$", " ".join(lines)
    ).groups()
    assert int(products) > 100
    assert float(right) > 80
    assert float(apart) < 1e-6
