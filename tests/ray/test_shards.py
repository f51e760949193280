"""A server actor's accounts, without Ray: what is added ahead of its update, and what when it is not wanted."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ray")

from paceline.ray.shards import Shard


def shard():
    made = Shard(momentum=0.0, statistics=False)
    made.set(np.zeros(2))
    return made


def ones(factor):
    return factor * np.ones(2)


def test_gradients_added_ahead_are_those_of_the_update():
    ahead, at_once = shard(), shard()
    ahead.hold(7, 3, ones(1))
    ahead.hold(8, 1, ones(5))
    values, (norm2, _) = ahead.update([7, 8], [(2, 0.5)], None, 0.1, ones(11))
    expected, _ = at_once.update([], [(3, 1.0), (1, 1.0), (2, 0.5)], None, 0.1, ones(1), ones(5), ones(11))
    assert values == pytest.approx(expected)
    assert expected == pytest.approx(ones(-0.1 * 19 / 5))
    assert norm2 == pytest.approx(2 * (19 / 5) ** 2)


def test_one_that_was_lost_on_its_way_is_asked_for_again():
    made = shard()
    made.hold(7, 3, ones(1))
    assert made.update([7, 8], [(2, 1.0)], None, 0.1, ones(11)) == (None, None)
    values, _ = made.update([], [(3, 1.0), (3, 1.0)], None, 0.1, ones(1), ones(3))
    assert values == pytest.approx(ones(-0.2))


def test_one_that_is_not_wanted_after_all_is_left_out():
    made = shard()
    made.hold(7, 3, ones(100))
    values, _ = made.update([], [(2, 1.0)], None, 0.1, ones(1))
    assert values == pytest.approx(ones(-0.1))
    made.hold(9, 2, ones(1))
    values, _ = made.update([9], [], None, 0.1)
    assert values == pytest.approx(ones(-0.2))
