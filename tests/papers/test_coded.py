"""The coded paper's exploration (Alg. 1), against what the text says of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.coded import assign
from paceline.coded.assign import iterated
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
