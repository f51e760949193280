"""The coded paper's exploration (Alg. 1) and Fig. 4, against what the text says of them."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import optimize

from paceline.coded import assign, plan, random_problem
from paceline.coded.assign import iterated
from paceline.papers import experiments
from paceline.rounds import Array


@pytest.mark.parametrize(("masters", "workers"), [(3, 12), (4, 14)])
def test_exploration_takes_out_some_workers_and_puts_them_back_at_their_best_master(
    masters: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sun et al., Alg. 1, lines 23 to 29."""
    values = np.random.default_rng(84).uniform(1, 5, (masters, workers))
    drawn = np.random.default_rng(1)
    taken, began, ended = list[Array](), list[Array](), list[Array]()
    insert, interchange = assign._insert, assign._interchange

    class Generator:
        def choice(self, among: int, count: int, replace: bool) -> Array:
            assert (among, count, replace) == (workers, workers // masters, False)
            taken.append(drawn.choice(among, count, replace=False))
            return taken[-1]

    def inserted(values: Array, owner: Any, *rest: Any, **named: Any) -> bool:
        if len(began) == len(taken):  # the first call of this round
            began.append(owner.copy())
        return insert(values, owner, *rest, **named)

    def interchanged(values: Array, owner: Any, sums: Array) -> bool:
        moved = interchange(values, owner, sums)
        ended[len(taken) :] = [owner.copy()]
        return moved

    monkeypatch.setattr(assign, "_insert", inserted)
    monkeypatch.setattr(assign, "_interchange", interchanged)
    monkeypatch.setattr(np.random, "default_rng", lambda seed: Generator())
    found = iterated(values, rule="printed", rounds=25)
    assert len(ended) == 25
    favourite = values.argmax(0)
    for before, out, after in zip(ended, taken, began[1:], strict=False):
        expected = before.copy()
        expected[out] = favourite[out]
        assert after.tolist() == expected.tolist()
    levels = [min((values * (owner == m)).sum(1)[m] for m in range(masters)) for owner in ended]
    assert (values * found).sum(1).min() == pytest.approx(max(levels))
    assert max(levels) > levels[0] * 1.001  # the exploration found something


def test_fig4_has_the_steps_of_each_ratio_and_where_they_pass_the_greedy(tmp_path: Path) -> None:
    """Sun et al., Fig. 4: the first step is whole, the second 1 - alpha of the way; the limit is that of an LP."""
    pytest.importorskip("cvxpy")
    result = experiments("coded")["fig4"](tmp_path, True)["milliseconds"]
    with (tmp_path / "fig4.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    t = {
        alpha: [float(row["t_ms"]) for row in rows if row["alpha"] == alpha]
        for alpha in ("0.1", "0.01", "0.001")
    }
    assert {len(each) for each in t.values()} == {26}
    start, first = t["0.1"][:2]
    whole = (t["0.001"][2] - first) / 0.999  # the whole second step
    for alpha, each in t.items():
        assert each[:2] == pytest.approx([start, first], rel=1e-5)
        assert each[2] - first == pytest.approx((1 - float(alpha)) * whole, rel=1e-3)
        assert np.all(np.diff(each) < 0)
        assert result[alpha] == pytest.approx(each[-1], rel=1e-5)
    problem = random_problem(2, 12, 1e5, np.random.default_rng(0))
    u = problem.delay.u  # type: ignore[attr-defined]
    v = u / 1e5 / (1 + 2.1461932206205825)  # eq. (8) with a = 1 / u
    # max V so that V <= sum of k v for each master, and each worker's k sum to 1 at most
    upper = np.zeros((2 + 12, 25))
    for m in range(2):
        upper[m, 12 * m : 12 * m + 12], upper[m, -1] = -v[m], 1e-5
    upper[2:, :12] = upper[2:, 12:24] = np.eye(12)
    limit = optimize.linprog(np.append(np.zeros(24), -1), upper, np.append([0, 0], np.ones(12)))
    best = 1e5 / limit.x[-1]
    assert result["probabilistic"] == pytest.approx(best, rel=1e-6)
    assert best < t["0.001"][-1] < t["0.01"][-1] < t["0.1"][-1] < 1.02 * best
    greedy = float(plan(problem, "iterated").t_star.max())
    for alpha, each in t.items():
        below = [i for i, now in enumerate(each) if now < greedy]
        assert result[f"{alpha} below iterated after"] == (below[0] if below else -1)
