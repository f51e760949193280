"""The policy of docs/extending.md runs as it is printed there."""

import re
from pathlib import Path

import numpy as np

from paceline import Round, policies
from paceline.balancer import Balancer

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"


def test_the_printed_policy_works(monkeypatch):
    monkeypatch.setattr(policies, "POLICIES", dict(policies.POLICIES))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict = {"__name__": "extending"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), names)
    policy = names["policy"]
    assert policy.part == 0.5
    assert (policy.needs_upcoming, policy.needs_readings, policy.trains) == (False, False, False)
    assert (policy.needs_machines, policy.settles) == (False, True)
    assert Balancer(policy).loads(0, 256).tolist() == [64] * 4
    plan, state = policy.init()
    slopes = np.array([1.0, 1.0, 1.0, 4.0])
    for _ in range(30):
        plan, state = policy.step(state, Round(plan.shares, slopes * plan.shares * 256, 256))
    np.testing.assert_allclose(plan.shares, np.array([4, 4, 4, 1]) / 13, rtol=1e-6)
    absent = np.where([True, True, True, False], slopes * plan.shares * 256, np.nan)
    plan, state = policy.step(state, Round(plan.shares, absent, 256))
    np.testing.assert_allclose(plan.shares, [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)
    plan, state = policy.step(state, Round(plan.shares, slopes * plan.shares * 256, 256))
    assert plan.shares[3] > 0.05
