"""A round in pieces by cost: what is run at once, claimed, and kept for the end, and pieces of equal cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from paceline.samples import CostModel, InPieces, Pool, Room, in_pieces, pool
from paceline.samples.cost import batch_parts
from paceline.samples.pool import sizes_of_micro_steps

GUARANTEES = (
    "Every sample is dealt once within all limits, with the same deal on every rank, in pieces, in the "
    "service and on the virtual clock.",
)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[np.ndarray, CostModel, np.ndarray, float, np.ndarray, Room]:
    batch, n = draw(st.integers(1, 80)), draw(st.integers(1, 5))
    lengths = np.array(draw(st.lists(st.integers(1, 40), min_size=batch, max_size=batch)), float)
    launch = draw(st.one_of(st.none(), st.floats(0, 5)))
    model = CostModel(0.05, draw(st.sampled_from([0.0, 0.002])), launch, draw(st.booleans()))
    shares = np.array(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n)), float)
    assume(shares.sum() > 0)
    least = np.array(draw(st.lists(st.floats(0, 4), min_size=n, max_size=n)))
    min_samples = draw(st.sampled_from([1, 1, 2]))
    micro = draw(st.one_of(st.none(), st.integers(2 * min_samples - 1, 20)))
    budget = draw(st.one_of(st.just(np.inf), st.integers(40 * (2 * min_samples - 1), 200)))
    most = draw(st.one_of(st.none(), st.just(np.full(n, -(-2 * batch // n)))))
    room = Room(most=most, micro_batch=micro, budget=budget, min_samples=min_samples)
    return lengths, model, shares / shares.sum(), draw(st.sampled_from([0.0, 0.3, 0.6, 0.95])), least, room


def held(lengths: np.ndarray, model: CostModel, room: Room) -> None:
    """One micro-batch is within its limits."""
    assert len(lengths) >= room.min_samples
    assert room.micro_batch is None or len(lengths) <= room.micro_batch
    tokens = len(lengths) * lengths.max() if model.padded else lengths.sum()
    assert tokens <= room.budget


@settings(max_examples=200, deadline=None)
@given(rounds(), st.lists(st.floats(0, 20), min_size=1, max_size=8))
def test_every_sample_is_run_once_within_all_limits(given: tuple, wanted: list[float]) -> None:
    lengths, model, shares, at_once, least, room = given
    found = in_pieces(lengths, model, shares, at_once, least, room)
    event("run as planned" if found is None else "in pieces")
    if found is None:
        return
    own, pool = found.own, found.pool
    assert sorted(own.order.tolist()) == list(range(len(lengths)))
    np.testing.assert_array_equal(lengths[own.order], own.lengths)
    np.testing.assert_array_equal(own.loads, found.first + found.kept)
    assert own.loads.sum() + len(pool.lengths) == len(lengths)
    assert len(pool.lengths) % room.min_samples == 0
    assert not found.kept[shares == 0].any()
    micro = len(lengths) if room.micro_batch is None else int(room.micro_batch)  # type: ignore[arg-type]
    for worker, sizes in enumerate(own.sizes):
        assert sizes.sum() == own.loads[worker]
        assert not found.kept[worker] or sizes[-1] == found.kept[worker]
        start = int(own.starts[worker])
        for size in sizes.tolist():
            held(own.lengths[start : start + size], model, room)
            start += size
    place, number = 0, 0
    while place < len(pool.lengths):  # claims of any cost, one after the other
        many = pool.samples(place, wanted[number % len(wanted)], len(lengths))
        at = place
        for size in pool.cuts(place, many, micro):
            held(pool.lengths[at : at + size], model, room)
            at += size
        assert at == place + many > place
        place, number = at, number + 1
    assert pool.left(place) == 0
    # The longest first: nothing that is claimed is longer than what was run at once, or shorter than what is kept.
    own_lengths = [own.lengths[own.starts[w] : own.starts[w + 1]] for w in range(len(shares))]
    first = np.concatenate([each[: found.first[w]] for w, each in enumerate(own_lengths)])
    kept = np.concatenate([each[found.first[w] :] for w, each in enumerate(own_lengths)])
    assert np.all(np.diff(pool.lengths) <= 0)
    assert not len(first) or first.min() >= pool.lengths.max()
    assert not len(kept) or kept.max() <= pool.lengths.min()


def of_lengths(padded: bool = False) -> InPieces:
    lengths = np.clip(np.round(np.random.default_rng(0).lognormal(5, 1, 256)), 16, 1024)
    model = CostModel(1 / lengths.mean(), 0.0, 0.1 if padded else None, padded)
    found = in_pieces(lengths, model, np.array([0.4, 0.4, 0.2]), 0.5, np.full(3, 2.0), Room())
    assert found is not None
    return found


def test_pieces_of_one_cost_are_within_a_sample_of_each_other() -> None:
    found = of_lengths()
    pool, place, costs, longest = found.pool, 0, [], []
    while place < len(pool.lengths):
        many = pool.samples(place, 6.0, 1000)
        costs.append(pool.model.of(pool.lengths[place : place + many]).sum())
        longest.append(pool.model.of(pool.lengths[place]))
        place += many
    assert len(costs) > 5
    for cost, one in zip(costs[:-1], longest, strict=False):
        assert abs(cost - 6.0) <= one / 2 + 1e-9
    counts = [pool.samples(0, 6.0, 1000), pool.samples(len(pool.lengths) - 60, 6.0, 1000)]
    assert counts[1] > 2 * counts[0], "equal counts would have done as well"


def test_what_is_run_at_once_is_in_proportion_to_the_shares() -> None:
    found = of_lengths()
    own = found.own
    costs = [own.model.of(own.lengths[own.starts[w] :][: found.first[w]]).sum() for w in range(3)]
    total = own.model.of(own.lengths).sum()
    np.testing.assert_allclose(costs, 0.5 * total * np.array([0.4, 0.4, 0.2]), atol=3.0)  # a sample
    assert found.whole == pytest.approx(total)
    assert np.all(found.kept_costs <= 2.0)


def test_padded_samples_are_claimed_in_the_best_cuts() -> None:
    pool = of_lengths(padded=True).pool
    sizes = pool.cuts(0, len(pool.lengths), 1000)
    assert len(sizes) > 2
    assert sum(sizes) == len(pool.lengths)
    alone = batch_parts(pool.lengths, np.array([len(pool.lengths)]), True)
    cut = batch_parts(pool.lengths, np.array(sizes), True)
    launch = float(pool.model.launch or 0)
    assert cut[0] * pool.model.linear + launch * len(sizes) < alone[0] * pool.model.linear + launch
    # What the rule reckons with is what these cuts cost, but for the place where one begins.
    assert pool.left(0) == pytest.approx(cut[0] * pool.model.linear, rel=0.05)


EQUAL = CostModel(1.0)  # a sample of length 1 costs 1


def kept(lengths: list[float], least: list[float], room: Room, padded: bool = False) -> list[int] | None:
    shares = np.full(len(least), 1 / len(least))
    model = CostModel(1.0, padded=padded)
    found = in_pieces(np.array(lengths), model, shares, 0.0, np.array(least), room)
    assert found is None or not found.first.any()
    return None if found is None else found.kept.tolist()


@pytest.mark.parametrize(
    ("lengths", "least", "room", "expected"),
    [
        ([1.0] * 12, [3.0, 2.0], Room(), [3, 2]),
        ([1.0] * 12, [2.5, 0.0], Room(), [2, 1]),  # at least a sample, even if it costs more
        ([1.0] * 12, [9.0, 3.0], Room(), [6, 3]),  # at most its share of the round
        ([1.0] * 12, [3.0, 3.0], Room(micro_batch=2), [2, 2]),
        ([1.0] * 12, [3.0, 3.0], Room(min_samples=2), [3, 3]),
        ([1.0] * 12, [1.0, 1.0], Room(min_samples=2), [2, 2]),
        ([4.0] * 12, [20.0, 20.0], Room(budget=8), [2, 2]),
        ([4.0] * 8 + [1.0] * 4, [20.0, 20.0], Room(budget=8), [5, 2]),
        ([4.0] * 2, [20.0], Room(budget=8), None),
        ([1.0] * 2, [1.0, 1.0], Room(), None),  # nothing is left to claim
    ],
)
def test_each_worker_keeps_the_shortest_samples_of_its_least_cost(
    lengths: list[float], least: list[float], room: Room, expected: list[int] | None
) -> None:
    assert kept(lengths, least, room) == expected or (
        expected == [6, 5] and kept(lengths, least, room) is None
    )


def test_padded_samples_that_a_worker_keeps_fit_into_one_micro_batch() -> None:
    assert kept([4.0] * 8 + [1.0] * 4, [30.0, 30.0], Room(budget=8), padded=True) == [4, 2]
    assert kept([4.0] * 8 + [1.0] * 4, [30.0, 30.0], Room(budget=20), padded=True) == [5, 4]


@pytest.mark.parametrize(("min_samples", "expected"), [(1, ([1], [1], 8)), (3, ([4], [3], 3))])
def test_samples_that_run_at_once_are_as_many_as_batch_norm_needs(min_samples: int, expected: tuple) -> None:
    found = in_pieces(np.ones(10), EQUAL, np.ones(1), 0.1, np.ones(1), Room(min_samples=min_samples))
    assert found is not None
    assert (found.first.tolist(), found.kept.tolist(), len(found.pool.lengths)) == expected


def test_worker_without_share_keeps_and_runs_nothing() -> None:
    found = in_pieces(np.ones(12), EQUAL, np.array([0.0, 1.0]), 0.5, np.ones(2), Room())
    assert found is not None
    assert found.first.tolist() == [0, 6]
    assert found.kept.tolist() == [0, 1]


def test_worker_that_runs_nothing_at_once_takes_part() -> None:
    found = in_pieces(np.ones(20), EQUAL, np.array([0.95, 0.05]), 0.1, np.ones(2), Room())
    assert found is not None
    assert found.first.tolist() == [2, 0]


@pytest.mark.parametrize(
    ("shares", "most", "pool"),
    [([0.5, 0.5], 4, 4), ([0.5, 0.5], 3, None), ([1, 0], [3, 5], 5), ([1, 0], [2, 6], None)],
)
def test_limits_leave_just_enough_room_for_the_pool(shares: list, most: int | list, pool: int | None) -> None:
    room = Room(most=np.broadcast_to(most, 2))
    found = in_pieces(np.ones(8), EQUAL, np.array(shares, float), 0.25, np.ones(2), room)
    assert (None if found is None else len(found.pool.lengths)) == pool


@pytest.mark.parametrize(
    ("cost", "place", "room", "min_samples", "samples"),
    [
        (3.0, 0, 9, 1, 3),
        (2.4, 0, 9, 1, 2),
        (2.5, 0, 9, 1, 3),  # of two equally near numbers the larger one
        (0.0, 4, 9, 1, 1),
        (99.0, 4, 99, 1, 8),
        (99.0, 4, 5, 1, 5),
        (99.0, 12, 5, 1, 0),
        (3.0, 0, 0, 1, 0),
        (3.0, 0, 9, 2, 4),
        (3.0, 0, 3, 2, 2),
        (3.0, 0, 1, 2, 0),
    ],
)
def test_claimed_samples_are_those_of_nearest_cost(
    cost: float, place: int, room: int, min_samples: int, samples: int
) -> None:
    pool = Pool(np.ones(12), np.arange(13.0), EQUAL, min_samples, np.inf)
    assert pool.samples(place, cost, room) == samples
    assert pool.left(place) == 12 - place
    assert pool.left(99) == 0


def test_micro_batches_are_the_fewest_within_the_limits() -> None:
    lengths = np.array([40.0, 30, 20, 10])
    plain, padded = CostModel(1.0), CostModel(1.0, padded=True)
    assert sizes_of_micro_steps(lengths, plain, 10, np.inf) == [4]
    assert sizes_of_micro_steps(lengths, plain, 1, np.inf) == [1, 1, 1, 1]
    assert sizes_of_micro_steps(lengths, plain, 3, np.inf) == [3, 1]
    assert sizes_of_micro_steps(lengths, plain, 3, np.inf, min_samples=2) == [2, 2]
    assert sizes_of_micro_steps(lengths, plain, 10, 70.0) == [2, 2]
    assert sizes_of_micro_steps(lengths, plain, 10, 69.0) == [1, 3]
    assert sizes_of_micro_steps(lengths, padded, 10, 80.0) == [2, 2]
    assert sizes_of_micro_steps(lengths, padded, 10, 79.0) == [1, 2, 1]
    assert sizes_of_micro_steps(lengths[:0], plain, 10, 70.0) == []


def test_unknown_launch_counts_as_a_quarter_of_a_workers_mean_cost() -> None:
    lengths = np.sort(np.random.default_rng(0).lognormal(3, 1, 60))[::-1]
    unknown = CostModel(0.1, padded=True)
    guess = CostModel(0.1, launch=0.25 * float(unknown.of(lengths).sum()) / 5, padded=True)
    found, expected = (pool._before(lengths, model, 5, 60, np.inf) for model in (unknown, guess))
    np.testing.assert_array_equal(found, expected)
    other = CostModel(0.1, launch=0.25 * float(unknown.of(lengths).sum()), padded=True)
    assert pool._before(lengths, other, 5, 60, np.inf)[-1] > expected[-1]  # fewer cuts pad more
