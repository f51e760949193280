"""Learning-rate rules."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.errors import PacelineError
from paceline.paramserver import rates


def test_rules():
    """DBW, baseline static-k."""
    for k in range(1, 17):
        assert rates.create("fixed", 16, 0.08).of(k, 1, 1) == 0.08  # DBW's and B-DBW's
        assert rates.create("proportional", 16, 0.08).of(k, 1, 1) == pytest.approx(0.005 * k)
    assert rates.create("knee:table=0.1/0.2", 2, 0.5).of(2, 1, 1) == 0.2


def test_adascale_lies_between_fixed_and_proportional():
    rule = rates.create("adascale", 8, 0.8)
    assert rule.of(2, 1.0, 0.0) == pytest.approx(0.8)  # no noise: nothing to lose with few gradients
    assert rule.of(2, 0.0, 1.0) == pytest.approx(0.2)  # all noise: in proportion
    assert rule.of(2, np.nan, np.nan) == pytest.approx(0.2)
    assert 0.2 < rule.of(2, 1.0, 3.0) < 0.8
    assert rates.gain(4, 1.0, 3.0) == pytest.approx(4 / 1.75)


def test_the_knee_of_a_known_curve():
    """A quadratic of curvature 10 falls fastest below 2 / 10 and diverges above (DBW, baseline static-k)."""
    sweep = np.geomspace(1e-4, 1.0, 150)
    w, losses = 1.0, []
    for rate in sweep:
        losses.append(5.0 * w * w)
        w -= rate * 10.0 * w
    assert 0.003 < rates.knee(sweep, np.array(losses)) < 0.2


def test_the_knee_of_a_run_that_only_diverges():
    sweep = np.geomspace(0.1, 10.0, 30)
    losses = np.geomspace(1.0, 1e6, 30)
    assert rates.knee(sweep, losses) < 1.0
    with pytest.raises(PacelineError, match="diverged at once"):
        rates.knee(sweep, np.full(30, np.nan))


@pytest.mark.parametrize(
    ("text", "full"), [("knee:table=1/2", 1.0), ("fixed", -1.0), ("fast", 1.0), ("knee", 1.0)]
)
def test_bad_input(text, full):
    with pytest.raises(PacelineError):
        rates.create(text, 3, full)
