"""A round's samples dealt by cost: every sample once, within the limits, and ending together."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import Cluster, PacelineError, policies
from paceline.balancer import Balancer
from paceline.samples import CostLearner, CostModel, Deal, Room, SampleCosts, deal
from paceline.samples.cost import batch_parts, cost_of
from support.guarantees import guarantee

BATCH_NORM = guarantee(
    "Micro-batches that are cut by cost have the samples that batch norm needs, and every rank takes equally "
    "many."
)


def lengths_of(seed: int, batch: int) -> np.ndarray:
    return np.round(np.clip(np.random.default_rng(seed).lognormal(5, 1, batch), 16, 1024))


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, CostModel, np.ndarray, np.ndarray, Room]:
    """Lengths, a cost model, paces and overheads of some workers, and limits that can hold the samples."""
    batch, n = draw(st.integers(0, 60)), draw(st.integers(1, 6))
    lengths = np.array(draw(st.lists(st.integers(1, 40), min_size=batch, max_size=batch)), float)
    launch = draw(st.one_of(st.none(), st.floats(0, 5)))
    model = CostModel(0.05, draw(st.sampled_from([0.0, 0.002])), launch, draw(st.booleans()))
    pace = np.array(draw(st.lists(st.floats(0.1, 4), min_size=n, max_size=n)))
    overhead = np.array(draw(st.lists(st.floats(0, 3), min_size=n, max_size=n)))
    most = np.array(draw(st.lists(st.integers(0, batch), min_size=n, max_size=n)), int)
    most[draw(st.integers(0, n - 1))] += max(batch - most.sum(), 0)
    least = np.minimum(np.array(draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))), most)
    micro = draw(st.one_of(st.none(), st.integers(1, 20)))
    budget = draw(st.one_of(st.just(np.inf), st.integers(40, 200)))
    return lengths, model, pace, overhead, Room(least, most, micro, budget, lockstep=draw(st.booleans()))


def check(dealt: Deal, lengths: np.ndarray, model: CostModel, room: Room) -> None:
    """Every sample once, each limit held, and the costs those of the micro-batches."""
    batch = len(lengths)
    assert sorted(dealt.order.tolist()) == list(range(batch))
    assert dealt.loads.sum() == batch
    least, most = np.asarray(room.least), np.asarray(room.most)
    assert np.all(dealt.loads <= most)
    if least.sum() <= batch:
        assert np.all(dealt.loads >= least)
    for worker, sizes in enumerate(dealt.sizes):
        mine, start, parts = lengths[dealt.of(worker)], 0, np.zeros(3)
        assert sizes.sum() == len(mine) == dealt.loads[worker]
        for size in sizes.tolist():
            batch_lengths = mine[start : start + size]
            start += size
            if not size:
                continue
            assert room.micro_batch is None or size <= room.micro_batch
            tokens = size * batch_lengths.max() if model.padded else batch_lengths.sum()
            assert tokens <= room.budget
            parts += batch_parts(batch_lengths, np.array([size]), model.padded)
        np.testing.assert_allclose(dealt.parts[worker], parts)
        assert dealt.costs[worker] == pytest.approx(float(cost_of(model, parts)))
    if room.lockstep:
        assert len({len(sizes) for sizes in dealt.sizes}) == 1


@guarantee(
    "Every sample is dealt once within all limits, with the same deal on every rank, in pieces, in the "
    "service and on the virtual clock."
)
@settings(max_examples=100, deadline=None)
@given(rounds())
def test_every_sample_is_dealt_once_within_all_limits(given: tuple) -> None:
    lengths, model, pace, overhead, room = given
    dealt = deal(lengths, model, pace, overhead, room)
    check(dealt, lengths, model, room)
    again = deal(lengths, model, pace, overhead, room)
    assert np.array_equal(dealt.order, again.order)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("micro_steps", [1, 2, 5])
@pytest.mark.parametrize("lockstep", [False, True])
def test_fixed_micro_steps_are_taken_by_every_worker(padded: bool, micro_steps: int, lockstep: bool) -> None:
    lengths = lengths_of(1, 60)
    model = SampleCosts.checked(lengths, 60).with_alpha(0.001, launch=0.1, padded=padded)
    dealt = deal(lengths, model, np.array([1.0, 1, 4]), room=Room(micro_steps=micro_steps, lockstep=lockstep))
    assert [len(sizes) for sizes in dealt.sizes] == [micro_steps] * 3
    check(dealt, lengths, model, Room(0, 60))


@BATCH_NORM
@settings(max_examples=100, deadline=None)
@given(rounds(), st.sampled_from([2, 3]), st.sampled_from([None, 1, 2, 7]))
def test_no_micro_batch_has_fewer_samples_than_batch_norm_needs(
    given: tuple, min_samples: int, micro_steps: int
) -> None:
    lengths, model, pace, overhead, room = given
    if len(lengths) < min_samples:
        return
    if micro_steps is None:
        micro = None if room.micro_batch is None else max(room.micro_batch, 2 * min_samples - 1)
        budget = max(room.budget, (2 * min_samples - 1) * lengths.max())
        room = Room(0, len(lengths), micro, budget, lockstep=room.lockstep, min_samples=min_samples)
    else:
        room = Room(0, len(lengths), micro_steps=micro_steps, min_samples=min_samples)
    dealt = deal(lengths, model, pace, overhead, room)
    check(dealt, lengths, model, room)
    for sizes in dealt.sizes:
        assert np.all((sizes == 0) | (sizes >= min_samples)), sizes
        assert micro_steps is None or len(sizes) == micro_steps


@BATCH_NORM
@pytest.mark.parametrize("pace", [[1, 1, 0.5], [0.5, 1, 1], [1, 0.5, 1]])
@pytest.mark.parametrize("overhead", [[0, 0, 0], [0, 0, 0.5], [0.5, 0, 0]])
def test_samples_too_few_for_batch_norm_join_others_in_their_turn(
    pace: list[float], overhead: list[float]
) -> None:
    lengths, model = np.ones(4), CostModel(0.05, padded=True)
    room = Room(0, 4, micro_steps=1, min_samples=2)
    dealt = deal(lengths, model, np.array(pace), np.array(overhead), room)
    check(dealt, lengths, model, room)
    assert [len(sizes) for sizes in dealt.sizes] == [1, 1, 1]
    assert set(dealt.loads.tolist()) <= {0, 2, 4}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("batch", range(1, 12))
def test_short_round_with_least_loads_of_min_samples_is_dealt_once(padded: bool, batch: int) -> None:
    lengths = np.random.default_rng(batch).integers(1, 20, batch).astype(float)
    room = Room(least=np.full(5, 2), most=27, min_samples=2)
    dealt = deal(lengths, CostModel(0.1, padded=padded), np.ones(5), room=room)
    assert sorted(dealt.order.tolist()) == list(range(batch))
    assert dealt.loads.sum() == batch
    assert batch == 1 or 1 not in dealt.loads


def test_batch_norm_gets_two_samples_or_none() -> None:
    lengths = np.array([100.0, 1, 1, 1])
    dealt = deal(lengths, CostModel(1.0), np.ones(3), room=Room(min_samples=2))
    assert sorted(dealt.loads.tolist()) in ([0, 0, 4], [0, 2, 2])


@pytest.mark.parametrize("padded", [False, True])
def test_batch_norm_gets_two_samples_or_none_also_if_limits_bind(padded: bool) -> None:
    """Against all loads that there are: where any within the limits are each 0 or 2 and more, such are dealt."""
    random = np.random.default_rng(3)
    for _ in range(400):
        n, batch = int(random.integers(1, 5)), int(random.integers(2, 10))
        most = np.minimum(random.integers(1, batch + 1, n), batch)
        every = itertools.product(*(range(each + 1) for each in most.tolist()))
        if not any(sum(loads) == batch and 1 not in loads for loads in every):
            continue
        lengths, pace = random.integers(1, 9, batch).astype(float), random.choice([1.0, 1.5, 4, 50], n)
        dealt = deal(lengths, CostModel(0.2, 0, 0.5, padded), pace, room=Room(most=most, min_samples=2))
        assert sorted(dealt.order.tolist()) == list(range(batch))
        assert dealt.loads.sum() == batch
        assert np.all(dealt.loads <= most), (most, dealt.loads)
        assert 1 not in dealt.loads, (most, pace, lengths, dealt.loads)


def test_a_balancer_deals_by_cost_and_policies_see_costs() -> None:
    """With one worker of a quarter's speed, costs and not counts are in proportion to the speeds in the end."""
    n, batch = 4, 128
    speeds = np.array([1.0, 1, 1, 0.25])
    whole = lengths_of(0, 128 * 40)
    costs = SampleCosts.checked(whole, len(whole))
    loop = Balancer(policies.create("level", Cluster(n, batch)), learner=CostLearner(costs, n, batch))
    truth = costs.with_alpha(0.001)
    for step in range(40):
        lengths = whole[step * batch : (step + 1) * batch]
        dealt = loop.deal(step, lengths)
        costs_now = cost_of(truth, dealt.parts)
        seconds = costs_now / speeds
        loop.report(step, dealt.loads, seconds, parts=dealt.parts)
        if step > 5:
            assert seconds.max() < 1.02 * costs_now.sum() / speeds.sum()
    learned = loop.cost_model(40)
    assert learned.quadratic / learned.linear == pytest.approx(0.001, rel=0.02)


@guarantee(
    "A balancer that is saved within the first rounds continues as without it, and a broken state changes "
    "nothing."
)
def test_a_saved_balancer_deals_on_as_if_nothing_had_happened() -> None:
    whole, speeds = lengths_of(3, 64 * 12), np.array([1.0, 0.5, 2])

    def fresh() -> Balancer:
        learner = CostLearner(SampleCosts.checked(whole, len(whole)), 3, 64, padded=True)
        return Balancer(policies.create("level", Cluster(3, 64)), learner=learner)

    def played(loop: Balancer, start: int, stop: int) -> list[list[int]]:
        orders = []
        for step in range(start, stop):
            dealt = loop.deal(step, whole[64 * step : 64 * (step + 1)])
            orders.append(dealt.order.tolist())
            loop.report(step, dealt.loads, dealt.parts @ [1e-3, 1e-6, 0.1] / speeds, parts=dealt.parts)
        return orders

    straight, stopped, resumed = fresh(), fresh(), fresh()
    orders = played(straight, 0, 12)
    assert played(stopped, 0, 6) == orders[:6]
    resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())), 6)
    assert played(resumed, 6, 12) == orders[6:]
    broken = stopped.state_dict()
    broken["costs"]["fit"] = broken["costs"]["fit"][:-1]
    with pytest.raises(PacelineError, match="stored cost model is not one of 3 workers"):
        resumed.load_state_dict(broken, 6)


PLAIN, PADDED = CostModel(1.0), CostModel(1.0, padded=True)


@pytest.mark.parametrize(
    ("lengths", "model", "pace", "room", "sizes"),
    [
        ([4, 3], PLAIN, [1, 1], {"budget": 4}, [[1], [1]]),
        ([2, 2, 2, 2], PLAIN, [1], {"budget": 4}, [[2, 2]]),
        ([8, 1, 1, 1], PADDED, [1], {"micro_batch": 4}, [[4]]),
        ([1, 1], PLAIN, [1], {"micro_steps": 2}, [[1, 1]]),
        ([1, 1, 1, 1], PLAIN, [1, 50], {"least": [1, 1], "min_samples": 2}, [[2], [2]]),
        ([1, 1, 1, 1, 1], PLAIN, [50, 1, 1], {"least": [2, 1, 1], "min_samples": 2}, [[2], [3], []]),
        ([1, 1, 1, 1], PLAIN, [1, 3], {"most": [3, 2], "min_samples": 2}, [[2], [2]]),
    ],
)
def test_limits_that_are_just_met_hold(
    lengths: list[int], model: CostModel, pace: list[int], room: dict, sizes: list[list[int]]
) -> None:
    dealt = deal(np.array(lengths, float), model, np.array(pace, float), room=Room(**room))
    assert [each.tolist() for each in dealt.sizes] == sizes


def test_sample_longer_than_a_micro_batch_raises() -> None:
    with pytest.raises(PacelineError, match="length 900 is longer than a micro-batch may be"):
        deal(np.array([900.0, 3.0]), CostModel(1.0), np.ones(2), room=Room(budget=512))


def test_a_quantum_and_costs_exclude_each_other() -> None:
    learner = CostLearner(SampleCosts.checked(np.ones(64), 64), 2, 64)
    with pytest.raises(PacelineError, match="quantum=8 counts samples"):
        Balancer(policies.create("level", Cluster(2, 64)), quantum=8, learner=learner)


@pytest.mark.parametrize("model", [PLAIN, PADDED])
@pytest.mark.parametrize(("pace", "loads"), [([1.0, 1.2, 1.4], [3, 0, 0]), ([1.4, 1.2, 1.0], [0, 0, 3])])
def test_slower_workers_leave_samples_too_few_for_batch_norm_to_the_quicker(
    model: CostModel, pace: list[float], loads: list[int]
) -> None:
    dealt = deal(np.ones(3), model, np.array(pace), room=Room(min_samples=2))
    assert dealt.loads.tolist() == loads


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"least": "x"}, "least='x': expected samples, 0 or more"),
        ({"least": -1}, "least=-1: expected samples, 0 or more"),
        ({"most": [3, np.nan]}, "most=.*: expected samples, 0 or more"),
        ({"micro_batch": 0}, "micro_batch=0: expected samples, 1 or more"),
        ({"budget": "x"}, "budget='x': expected a length of more than 0"),
        ({"micro_steps": 0}, "micro_steps=0: expected a whole number"),
        ({"min_samples": 1.5}, "min_samples=1.5: expected a whole number"),
        ({"lockstep": "no"}, "lockstep='no': expected True or False"),
        (
            {"most": [1, 2, 3]},
            r"have shapes \(\), \(3,\), \(\): expected a number, or one for each of 2 workers",
        ),
    ],
)
def test_impossible_room_raises(given: dict, words: str) -> None:
    with pytest.raises(PacelineError, match=words):
        deal(np.ones(5), CostModel(1.0), np.ones(2), room=Room(**given))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"costs": [1, 2, 3]}, "expected a paceline.samples.SampleCosts"),
        ({"workers": 0}, "workers=0: expected a whole number"),
        ({"batch": "x"}, "batch='x': expected a whole number"),
        ({"padded": "no"}, "padded='no': expected True or False"),
    ],
)
def test_impossible_learner_raises(given: dict, words: str) -> None:
    right = {"costs": SampleCosts.checked([1, 2, 3], 3), "workers": 2, "batch": 3}
    with pytest.raises(PacelineError, match=words):
        CostLearner(**(right | given))
