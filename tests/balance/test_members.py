"""Limits and shares without absent workers, by hand; and the properties that a policy may leave out."""

from __future__ import annotations

import numpy as np
import pytest

from paceline import Cluster, Round
from paceline.balance.equal import Equal
from paceline.balance.level import Level
from paceline.balance.members import (
    among_present,
    bounds,
    carried,
    even,
    fill_unknown,
    measured_slopes,
    remembered,
    slowest,
)
from paceline.balance.protocol import Policy, complete
from paceline.rounds import Plan

ALL, SOME = np.array([True, True, True]), np.array([True, False, True])


def test_absent_workers_have_no_room_while_the_others_hold_the_batch() -> None:
    cluster = Cluster(3, 10, least=[1, 2, 0], most=[4, 8, 9])
    least, most = bounds(cluster, ALL)
    assert (least.tolist(), most.tolist()) == ([0.1, 0.2, 0.0], [0.4, 0.8, 0.9])
    least, most = bounds(cluster, SOME)
    assert (least.tolist(), most.tolist()) == ([0.1, 0.0, 0.0], [0.4, 0.0, 0.9])


def test_absent_workers_take_what_the_others_cannot_hold_in_proportion_to_their_limits() -> None:
    cluster = Cluster(3, 10, most=[4, 8, 4])
    least, most = bounds(cluster, np.array([True, False, False]))
    np.testing.assert_allclose(most, [0.4, 0.6 * 8 / 12, 0.6 * 4 / 12])
    assert least.tolist() == [0.0, 0.0, 0.0]
    _, nobody = bounds(cluster, np.zeros(3, bool))
    np.testing.assert_allclose(nobody, [0.25, 0.5, 0.25])
    _, rows = bounds(cluster, np.array([[True, False, False], [True, True, True]]))
    np.testing.assert_allclose(rows, [[0.4, 0.4, 0.2], [0.4, 0.8, 0.4]])


def test_shares_of_those_present_follow_the_weights() -> None:
    cluster = Cluster(3, 10, most=[4, 10, 10])
    np.testing.assert_allclose(among_present(cluster, ALL, np.array([1.0, 2, 1])), [0.25, 0.5, 0.25])
    np.testing.assert_allclose(among_present(cluster, SOME, np.array([1.0, 2, 1])), [0.4, 0.0, 0.6])
    np.testing.assert_allclose(even(cluster), 1 / 3)
    assert even(Cluster(2, 10, realizations=(3,))).tolist() == [[0.5, 0.5]] * 3


def test_carried_shares_change_only_where_somebody_is_away() -> None:
    cluster = Cluster(3, 10, realizations=(2,))
    shares = np.array([[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]])
    assert carried(cluster, np.array([ALL, ALL]), shares) is shares
    found = carried(cluster, np.array([ALL, SOME]), shares)
    assert found[0].tolist() == [0.2, 0.3, 0.5]
    np.testing.assert_allclose(found[1], [2 / 7, 0.0, 5 / 7])


def test_remembered_shares_wait_for_those_who_are_away() -> None:
    before, new = np.array([0.2, 0.3, 0.5]), np.array([0.4, 0.0, 0.6])
    assert remembered(ALL, new, before) is new
    np.testing.assert_allclose(remembered(SOME, new, before), [0.28, 0.3, 0.42])
    rows = remembered(np.array([ALL, SOME]), np.array([new, new]), np.array([before, before]))
    np.testing.assert_allclose(rows, [[0.4, 0.0, 0.6], [0.28, 0.3, 0.42]])


def test_slowest_worker_is_the_first_of_equals_among_those_with_seconds() -> None:
    rows = [[1.0, 3.0, 3.0], [np.nan, 1.0, 2.0], [2.0, np.nan, 1.0]]
    assert slowest(np.array(rows)).tolist() == [[1], [2], [0]]


def test_unknown_paces_are_the_mean_of_the_known_ones() -> None:
    known = np.array([1.0, 2.0])
    assert fill_unknown(known) is known
    assert fill_unknown(np.array([1.0, np.nan, 3.0])).tolist() == [1.0, 2.0, 3.0]
    assert fill_unknown(np.array([[np.nan, np.nan], [np.nan, 0.5]])).tolist() == [[1.0, 1.0], [0.5, 0.5]]
    assert fill_unknown(np.array([0.0, np.nan])).tolist() == [0.0, 1.0]


def test_slopes_are_measured_or_flat_or_kept() -> None:
    """A worker whose load took its overhead alone is flat, if the load is a thousandth of an equal one or more."""
    before, overhead = np.array([7.0, 8.0, 9.0, 6.0]), np.full(4, 0.5)
    shares, seconds = np.array([0.5, 0.4998, 0.0, 0.0002]), np.array([1.5, 0.5, 0.5, 0.5])
    round = Round(shares, seconds, 1000, overhead)
    np.testing.assert_allclose(measured_slopes(round, before), [1 / 500, 0.0, 9.0, 6.0])
    edge = Round(np.array([0.99975, 0.00025, 0.0, 0.0]), seconds, 1000, overhead)
    np.testing.assert_allclose(measured_slopes(edge, before), [1 / 999.75, 0.0, 9.0, 6.0])
    absent = Round(np.array([0.5, 0.5]), np.array([1.5, np.nan]), 1000, np.full(2, 0.5))
    assert measured_slopes(absent, before[:2]).tolist() == [1 / 500, 8.0]
    below = Round(np.array([0.5, 0.5]), np.array([1.5, 0.4]), 1000, np.full(2, 0.5))
    assert measured_slopes(below, before[:2]).tolist() == [1 / 500, 8.0]  # less than its overhead is no pace


def test_flat_is_a_billionth_of_the_seconds_and_a_thousandth_of_an_equal_load() -> None:
    before = np.array([7.0, 8.0])
    for seconds, beyond, flat in ((100.0, 0.5e-7, True), (100.0, 2e-7, False), (0.01, 2e-11, False)):
        round = Round(np.array([0.5, 0.5]), np.full(2, seconds), 8, np.full(2, seconds - beyond))
        expected = 0.0 if flat else beyond / 4
        np.testing.assert_allclose(measured_slopes(round, before), expected, rtol=1e-3)
    # Two realizations of five workers: an equal load is 200, so 0.2 samples are enough, and 0.1 are not.
    shares = np.array([[0.9998, 0.0002, 0.0, 0.0, 0.0], [0.9999, 0.0001, 0.0, 0.0, 0.0]])
    round = Round(shares, np.full((2, 5), 0.5), 1000, np.full((2, 5), 0.5))
    found = measured_slopes(round, np.full((2, 5), 7.0))
    np.testing.assert_array_equal(found, [[0, 0, 7, 7, 7], [0, 7, 7, 7, 7]])


def test_class_without_properties_gets_those_of_the_protocol() -> None:
    class Own:
        settles = False

        def init(self) -> tuple[Plan, None]:
            return Plan(np.ones(1)), None

    policy = Own()
    complete(policy)  # type: ignore[arg-type]
    own: Policy[None] = policy  # type: ignore[assignment]
    assert (own.needs_upcoming, own.needs_machines, own.needs_noise, own.settles) == (False,) * 4
    assert (own.needs_readings, own.trains, own.train("state")) == (False, False, "state")  # type: ignore[arg-type]


def test_policies_need_nothing_and_settle_unless_they_say_so() -> None:
    equal, level = Equal(Cluster(2, 8)), Level(Cluster(2, 8))
    for policy in (equal, level):
        needs = (policy.needs_upcoming, policy.needs_machines, policy.needs_noise, policy.needs_readings)
        assert (*needs, policy.trains) == (False,) * 5
    assert Policy.settles
    assert equal.train("state") == "state"  # type: ignore[arg-type]


@pytest.mark.parametrize(("forecast", "readings", "trains"), [("ema", False, False), ("narx", True, True)])
def test_policy_has_the_properties_of_its_forecast(forecast: str, readings: bool, trains: bool) -> None:
    policy = Level(Cluster(2, 8), forecast)
    assert (policy.needs_readings, policy.trains) == (readings, trains)
    assert policy.forecaster().trains == trains
