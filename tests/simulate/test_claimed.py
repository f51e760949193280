"""Pieces that are claimed by cost on the virtual clock: every sample once, and a stall costs a piece, not a round."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.rounds import PiecePlan
from paceline.samples import CostModel, Room, deal, in_pieces
from paceline.samples.cost import batch_parts, cost_of
from paceline.simulate import dealt
from paceline.simulate.dealt import play
from simulate.test_dealt import scenario

GUARANTEES = (
    "Every sample is dealt once within all limits, with the same deal on every rank, in pieces, in the "
    "service and on the virtual clock.",
)


def plan_of(n: int, at_once: float, part: float, least: float, speeds: np.ndarray) -> PiecePlan:
    return PiecePlan(np.array(at_once), np.array(part), np.array(part), np.full(n, least), speeds)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_sample_is_run_once_by_present_workers(data: st.DataObject) -> None:
    batch, n = data.draw(st.integers(2, 60)), data.draw(st.integers(1, 4))
    lengths = np.array(data.draw(st.lists(st.integers(1, 40), min_size=batch, max_size=batch)), float)
    believed = CostModel(0.05, 0.0, data.draw(st.sampled_from([None, 0.2])), data.draw(st.booleans()))
    truth = CostModel(0.04, 0.001, 0.3, believed.padded)
    slope = np.array(data.draw(st.lists(st.floats(0.1, 10), min_size=n, max_size=n)))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    assume(present.any())
    shares = np.where(present, 1 / slope, 0.0)
    plan = plan_of(
        n,
        data.draw(st.sampled_from([0.0, 0.4, 0.9])),
        data.draw(st.sampled_from([0.0, 0.5, 1.0])),
        data.draw(st.floats(0.5, 5)),
        data.draw(st.sampled_from([np.zeros(n), shares])),
    )
    most = np.full(n, data.draw(st.sampled_from([batch, -(-2 * batch // n)])))
    room = Room(most=np.where(present, most, 0), micro_batch=data.draw(st.sampled_from([None, 4])))
    found = in_pieces(lengths, believed, shares / shares.sum(), float(plan.at_once), plan.least, room)
    if found is None:
        return
    micro = 4 if room.micro_batch else batch
    ran = play(found, plan, truth, slope, np.full(n, 0.1), np.full(n, 1e-3), micro, most, present)
    assert ran.loads.sum() == batch
    assert np.all(ran.loads <= np.where(present, most, 0))
    if not believed.padded:
        assert ran.parts[:, 0].sum() == pytest.approx(lengths.sum())
    seconds = 0.1 + slope * cost_of(truth, ran.parts)
    asked = 4e-4 * ran.parts[:, 2]
    assert np.all(np.where(present, (ran.seconds >= seconds - 1e-9) & (ran.seconds <= seconds + asked), True))
    parts, took = ran.first
    np.testing.assert_allclose(took[~np.isnan(took)], (0.1 + slope * cost_of(truth, parts))[~np.isnan(took)])


def test_who_stalls_leaves_its_samples_to_the_others() -> None:
    lengths = np.clip(np.round(np.random.default_rng(3).lognormal(5, 1, 128)), 16, 1024)
    model = CostModel(1 / lengths.mean())
    speeds, shares = np.full(4, 1e3), np.full(4, 0.25)
    slope = np.array([1e-3, 1e-3, 1e-3, 8e-3])  # the last has an eighth of the speed that was planned with
    plan = plan_of(4, 0.25, 0.5, 1.0, speeds)
    found = in_pieces(lengths, model, shares, 0.25, plan.least, Room())
    assert found is not None
    everybody, all_of_it = np.ones(4, bool), np.full(4, 128)
    ran = play(found, plan, model, slope, np.zeros(4), np.full(4, 1e-5), 128, all_of_it, everybody)
    planned = slope * cost_of(model, deal(lengths, model, np.ones(4)).parts)
    best = model.of(lengths).sum() / (1 / slope).sum()
    assert ran.seconds.max() < 0.4 * planned.max()
    # It had begun on a quarter of its part; all others end within a small piece of each other.
    assert np.ptp(ran.seconds[:3]) < 0.05 * best
    longest = batch_parts(found.own.lengths[found.own.starts[3] :][:1], np.array([1]), False)
    assert cost_of(model, longest) >= model.of(found.pool.lengths[:1])  # the longest were not left to the end


def test_auto_by_cost_learns_to_run_steady_rounds_as_planned() -> None:
    outcome = dealt.run(scenario(8, 256, 4, 40), ["auto"])
    latency = outcome.ways["auto", "by cost"].latency
    assert outcome.bound[5:].sum() / latency[5:].sum() > 0.98
    # The first plan knows nothing of the speeds, and its round as planned would reach 0.28: claims make up for it.
    assert outcome.bound[0] / latency[0] > 0.6
