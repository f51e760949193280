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


@pytest.mark.parametrize("size", [0, 1, 2, 5])
def test_small_systems_are_solved_as_by_lapack(size):
    rows = np.random.default_rng(size).standard_normal((4, 3, size + 2, size))
    square = rows.swapaxes(-1, -2) @ rows
    right = rows.sum(-2)
    expected = np.linalg.solve(square, right[..., None])[..., 0]
    upper = np.moveaxis(np.triu(square), (-2, -1), (0, 1))
    found = portable_math.solve(upper, np.moveaxis(right, -1, 0))
    np.testing.assert_allclose(np.moveaxis(found, 0, -1), expected, rtol=1e-9)


PLANS = """
import sys
import numpy as np
from paceline import Cluster, policies
from paceline.balancer import Balancer
from paceline.samples import CostLearner, SampleCosts
for name, n in (*(("auto", n) for n in (3, 12, 40, 300)), ("level:forecast=arima", 12)):
    balancer, rng = Balancer(policies.create(name, Cluster(n, 16 * n))), np.random.default_rng(0)
    for step in range(60):
        loads = balancer.loads(step, 16 * n)
        balancer.report(step, loads, loads * (0.5 + rng.random(n)) / 1000)
        print(balancer.digest)
for n in (2, 5, 33):
    rng = np.random.default_rng(1)
    lengths, speeds = np.rint(rng.lognormal(5, 1, 960 * n)), 0.5 + rng.random(n)
    balancer = Balancer(policies.create("level", Cluster(n, 16 * n)))
    balancer.learn(CostLearner(SampleCosts.checked(lengths, len(lengths)), n, 16 * n), 0)
    for step in range(60):
        own = lengths[16 * n * step :][: 16 * n]
        dealt = balancer.deal(step, own)
        long, square, launches = dealt.parts.T
        took = (1e-5 * long + 1e-8 * square + 1e-4 * launches + 1e-3) * speeds * (1 + rng.random(n) / 10)
        balancer.report(step, dealt.loads, took, parts=dealt.parts)
        print(balancer.digest, *balancer.learner.model().__dict__.values(), *dealt.loads)
assert "scipy" not in sys.modules, "a rank would load it for nothing"
"""


@guarantee(
    "Ranks on different processors make the same plans to the last bit, also of samples that cost differently, "
    "with as many as 4,096 ranks."
)
def test_different_processors_make_the_same_plans():
    """A rank whose plan differs in the last bit is refused by the others."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    lacks = " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name))
    if not lacks:
        pytest.skip("no instructions that numpy could leave out: run on a processor with AVX2 or newer")
    printed = {
        subprocess.run(
            [sys.executable, "-c", PLANS],
            env=dict(os.environ, NPY_DISABLE_CPU_FEATURES=names, **blas),
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for names, blas in (("", {}), (lacks, {"OPENBLAS_CORETYPE": "Nehalem"}))
    }
    assert len(printed) == 1
