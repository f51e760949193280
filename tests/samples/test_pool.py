"""A round in pieces by cost: what is run at once, claimed, and kept for the end, and pieces of equal cost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from paceline.samples import CostModel, InPieces, Room, in_pieces
from paceline.samples.cost import batch_parts

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
    floor = draw(st.sampled_from([1, 1, 2]))
    micro = draw(st.one_of(st.none(), st.integers(2 * floor - 1, 20)))
    budget = draw(st.one_of(st.just(np.inf), st.integers(40 * (2 * floor - 1), 200)))
    most = draw(st.one_of(st.none(), st.just(np.full(n, -(-2 * batch // n)))))
    room = Room(most=most, micro_batch=micro, budget=budget, floor=floor)
    return lengths, model, shares / shares.sum(), draw(st.sampled_from([0.0, 0.3, 0.6, 0.95])), least, room


def held(lengths: np.ndarray, model: CostModel, room: Room) -> None:
    """One micro-batch is within its limits."""
    assert len(lengths) >= room.floor
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
