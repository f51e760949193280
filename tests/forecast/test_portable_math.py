"""Logarithms, exponentials and quantiles against numpy and SciPy, and plans of machines that are unlike."""

import os
import subprocess
import sys

import numpy as np
import pytest
from scipy import special

from paceline.forecast import portable_math
from support.guarantees import guarantee


def test_logarithms_and_exponentials_are_those_of_the_c_library_to_a_bit():
    values = np.array([0.0, -1.0, np.inf, np.nan, 1e-320, 0.3, 1.0, 1e300])
    with np.errstate(divide="ignore", invalid="ignore"):
        np.testing.assert_allclose(portable_math.log(values), np.log(values), rtol=3e-16)
    powers = np.array([-np.inf, -800.0, -0.7, 0.0, 1.5, 708.0, 709.5, 1000.0, np.nan])
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(portable_math.exp(powers), np.exp(powers), rtol=3e-16)
    assert portable_math.log(np.float64(2.0)).shape == ()


def test_quantiles_are_those_of_scipy_of_one_run_and_of_many():
    parts = np.concatenate(
        [[0.0, 5e-324, 1e-300, 0.5, np.nan], np.random.default_rng(0).uniform(0, 0.5, 500)]
    )
    np.testing.assert_allclose(portable_math.quantile(parts), special.ndtri(parts), rtol=1e-14)
    many = np.full((2, 3), 0.1)
    np.testing.assert_allclose(portable_math.quantile(many), special.ndtri(many), rtol=0)


PLANS = """
import sys
import numpy as np
from paceline import Cluster, policies
from paceline.balancer import Balancer
for n in (3, 12, 40, 300):
    balancer, rng = Balancer(policies.create("auto", Cluster(n, 16 * n))), np.random.default_rng(0)
    for step in range(60):
        loads = balancer.loads(step, 16 * n)
        balancer.report(step, loads, loads * (0.5 + rng.random(n)) / 1000)
        print(balancer.digest)
assert "scipy" not in sys.modules, "a rank would load it for nothing"
"""


@guarantee("Ranks on different processors make the same plans to the last bit, with as many as 4,096 ranks.")
def test_different_processors_make_the_same_plans():
    """A rank whose plan differs in the last bit is refused by the others."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    lacks = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    if not lacks:
        pytest.skip("no instructions that numpy could leave out: run on a processor with AVX2 or newer")
    printed = {
        subprocess.run(
            [sys.executable, "-c", PLANS],
            env=dict(os.environ, NPY_DISABLE_CPU_FEATURES=names),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for names in ("", lacks)
    }
    assert len(printed) == 1
