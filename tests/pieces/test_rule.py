"""One rule of claims: the torch engine, the server and the virtual clock play the same script with the same claims.

All speeds are powers of two and no piece costs anything beyond its samples, so that every time is exact.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from paceline.pieces import rule
from paceline.pieces.sharing import SharedRound
from paceline.rounds import PiecePlan
from paceline.simulate import pieces as clock
from paceline.torch.claims import Claims
from paceline.torch.counter import LocalCounter
from paceline.torch.plan import divide

GUARANTEES = (
    "A round in pieces has the same claims, sample for sample, in the "
    "PyTorch engine, the server and the virtual clock.",
)

Sequence = list[tuple[int, int]]  # (worker, samples) of each claim, in the order of time


class Script(NamedTuple):
    """A round: its plan, and how fast each worker really is. most: samples of a piece at most."""

    piece_plan: PiecePlan
    loads: np.ndarray
    speeds: np.ndarray
    unit: int = 1
    most: int | None = None


@st.composite
def scripts(draw, alone=False):
    """alone: without what the server's rounds have not: an end that is kept, units, limits, speeds nobody knows, and
    workers who begin with a claim."""
    expected = [2.0 ** draw(st.integers(0, 6))]
    for _ in range(draw(st.integers(1, 4))):  # shares of a power of two, so that the sum is one, too
        half = expected.pop(draw(st.integers(0, len(expected) - 1))) / 2
        expected += [half, half]
    n = len(expected)
    speeds = np.array(expected) * 2.0 ** np.array(draw(st.lists(st.integers(-3, 3), min_size=n, max_size=n)))
    at_once = draw(st.sampled_from([0.25, 0.5, 0.75] if alone else [0.0, 0.25, 0.5, 0.75, 1.0]))
    loads = draw(st.lists(st.integers(1, 60), min_size=n, max_size=n))
    least = [0] * n if alone else draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    known = alone or draw(st.booleans())
    unit = 1 if alone else draw(st.sampled_from([1, 1, 2, 4]))
    piece_plan = PiecePlan(
        np.array(at_once),
        np.array(draw(st.sampled_from([0.0, 0.25, 0.5, 1.0]))),
        np.array(draw(st.sampled_from([0.0, 0.5, 0.75, 0.97, 1.0]))),
        np.array(least, float),
        np.array(expected) * known,
    )
    most = None if alone else draw(st.none() | st.integers(1, 10).map(lambda units: units * unit))
    return Script(piece_plan, np.array(loads) * (4 if alone else 1), speeds, unit, most)


def in_time(speeds, first, claim) -> Sequence:
    """Whoever is through claims next, the first of them where several are, until nobody gets anything."""
    free, claims = {w: samples / speeds[w] for w, samples in enumerate(first)}, []
    while free:
        now, worker = min((at, w) for w, at in free.items())
        samples = claim(worker, now)
        if samples:
            claims.append((worker, samples))
            free[worker] = now + samples / speeds[worker]
        else:
            del free[worker]
    return claims


def by_torch(script: Script, kept: bool = True) -> Sequence:
    """The torch engine: each rank's own claims, on one counter."""
    n = len(script.loads)
    everything = np.full(n, script.loads.sum())
    largest = everything if script.most is None else np.full(n, script.most)
    division = divide(script.piece_plan, script.loads, 0, everything, largest, script.unit, 0)
    if division is None:
        return []
    if not kept:
        pool = division.pool + int(division.kept.sum())
        division = division._replace(kept=np.zeros_like(division.kept), start=0, pool=pool)
    ranks, counter = [], LocalCounter()
    for rank in range(n):
        claims = Claims(torch.device("cpu"), script.unit, script.most, int(everything[0]))
        claims._rank, claims._workers, claims._counter = rank, n, counter
        ranks.append(claims)
    done = division.first.copy()

    def claim(rank, now):
        ran, claims = int(done[rank]), ranks[rank]
        claims._sizes, claims._amounts = [ran], [ran]
        claims._began, claims._mark, claims._cost = 0.0, now, 0.0
        found = claims._claim(division)
        samples = 0 if found is None else sum(found.sizes)
        done[rank] += samples
        return samples

    try:
        return in_time(script.speeds, division.first, claim)
    finally:
        for claims in ranks:
            claims.close()


def by_server(script: Script) -> Sequence:
    """A server's round, whose pieces cost nothing."""
    shared = SharedRound(script.piece_plan, np.zeros(len(script.loads)))
    first = [len(shared.begin(w, np.arange(load), 0.0)) for w, load in enumerate(script.loads)]

    def claim(worker, now):
        shared.reported(worker, now)
        piece = shared.claim(worker, now)
        return 0 if piece is None else len(piece)

    return in_time(script.speeds, first, claim)


@contextmanager
def claims_of_the_clock():
    noted = []

    def noting(piece_plan, at, **known):
        samples = rule_claim(piece_plan, at, **known)
        if samples[0]:
            noted.append((int(at[1][0]), int(samples[0])))
        return samples

    rule_claim = rule.claim
    with mock.patch.object(rule, "claim", noting), mock.patch.object(clock, "CLAIM_SECONDS", 0.0):
        yield noted


def by_clock(script: Script) -> Sequence:
    """The virtual clock, with one realization."""
    one = PiecePlan(*(np.asarray(part)[None] for part in script.piece_plan))
    with claims_of_the_clock() as noted:
        played = clock.play(
            one, script.loads[None], 1 / script.speeds[None], np.zeros((1, len(script.loads))), 0.0,
            most=script.most or 2**62, unit=script.unit,
        )  # fmt: skip
    assert played.loads.sum() == script.loads.sum()
    return noted


def planned(at_once=0.5, before=0.5, after=0.5, least=(0.0,), speeds=(0.0,)):
    return PiecePlan(*(np.array(each, float) for each in (at_once, before, after, least, speeds)))


@pytest.mark.parametrize(
    ("plan", "options", "first", "kept"),
    [
        (planned(least=(2.0, 1.5)), {}, [5, 3], [2, 2]),
        (planned(least=(2.0, 2.0)), {"unit": 4}, [4, 0], [6, 7]),  # the pools hold 0 of 10 and 0 of 7
        (planned(at_once=0.9, least=(3.0, 0.0)), {"unit": 3}, [6, 6], [4, 1]),
        (planned(least=(9.0, 9.0)), {"most": 5}, [5, 2], [5, 5]),
        (planned(least=(9.0, 9.0)), {"most": 5, "unit": 2}, [4, 2], [4, 5]),
        (planned(at_once=0.0, least=(0.0, 20.0)), {}, [0, 0], [0, 7]),
        (planned(at_once=1.0, least=(2.0, 2.0)), {}, [10, 7], [0, 0]),
        (planned(at_once=0.99, least=(0.0, 0.0)), {}, [9, 6], [0, 0]),
    ],
)
def test_loads_of_ten_and_seven_are_divided_by_hand(plan, options, first, kept):
    found = rule.divide(plan, np.array([10, 7]), **options)
    assert [each.tolist() for each in found] == [first, kept]


def test_load_beyond_the_least_leaves_whole_units_to_claim():
    plan = planned(at_once=0.9, least=(2.0,))
    # Of 18, 4 are kept; 16 at once would leave less, so 12 run at once, and the 2 that make no unit are kept, too.
    assert [each.tolist() for each in rule.divide(plan, np.array([18]), 4)] == [[12], [6]]


@pytest.mark.parametrize(
    ("at_once", "first"), [(0.0, [0, 0, 0]), (0.5, [8, 0, 0]), (0.74, [8, 0, 0]), (1.0, [12, 0, 0])]
)
def test_grid_keeps_one_whole_cell(at_once, first):
    found = rule.divide_chunks(planned(at_once=at_once), np.array([18, 4, 3]), 4)
    assert [each.tolist() for each in found] == [first, [4, 4, 0]]


@pytest.mark.parametrize(
    ("plan", "known", "size"),
    [
        # Nothing is known: a quarter of 100 is due, without the 5 that are held.
        (planned(before=0.5), {}, 0.5 * 20),
        (planned(before=0.5), {"held": 15.0}, 0.5 * 20),  # less is due, so a quarter of the 80 that are left
        (planned(before=1.0), {"batch": 1000.0}, 20),  # guided self-scheduling looks only at what is left
        (planned(before=0.97), {"batch": 1000.0}, 0.97 * 245),
        (planned(before=0.5, after=0.25), {"reported": True}, 0.25 * 20),
        (planned(), {"speed": 30.0, "together": 60.0}, 0.5 * 45),
        (planned(), {"speed": 90.0, "together": 60.0}, 0.5 * 95),  # a part is one at most
        (planned(), {"speed": 0.25, "together": 0.5}, 0.5 * 45),
        (planned(before=0.0), {}, 1.0),  # one sample at least
        (planned(before=0.0, least=(6.0,)), {}, 6.0),
        (planned(before=0.0, least=(6.0,), speeds=(0.5,)), {"speed": 0.25}, 3.0),  # half as fast as expected
        (planned(before=0.0, least=(6.0,), speeds=(0.5,)), {"speed": 2.0}, 6.0),
        (planned(before=0.0, least=(6.0,), speeds=(0.5,)), {"speed": 0.01}, 1.0),
    ],
)
def test_size_of_a_piece_by_hand(plan, known, size):
    given_ = {"reported": False, "left": 80.0, "batch": 100.0, "held": 5.0, "workers": 4}
    given_ |= {"speed": 0.0, "together": 0.0} | known
    assert rule.portion(plan, 0, **given_) == pytest.approx(size, rel=1e-12)
    whole = rule.claim(plan, 0, **given_)
    assert whole == min(math.ceil(size), 80)
    assert rule.claim(plan, 0, most=4, **given_) == min(whole, 4)
    assert rule.claim(plan, 0, unit=4, **given_) == min(-(-whole // 4) * 4, 80)


def test_cost_of_a_piece_moves_by_a_tenth_and_stays_within_what_is_possible():
    def step(found, before):
        return rule.piece_cost([16, 8], [found + 16e-3, found + 8e-3], before)

    assert step(2e-3, 1e-3) == pytest.approx(1.1e-3)
    assert step(0.5e-3, 1e-3) == pytest.approx(1e-3 / 1.1)
    assert step(0.0, 5.1e-5) == 5e-5
    assert step(5.0, 0.95) == 1.0
    assert rule.piece_cost([15, 8], [1.0, 9.0], 1e-3) == 1e-3  # too similar to tell
    assert rule.piece_cost([8, 16, 16], [9.0, 1.0, 1.0], 1e-3) == pytest.approx(1.1e-3)
    assert rule.piece_cost([8], [9.0], 1e-3) == 1e-3


def test_pieces_quicker_than_their_cost_have_a_pace_of_zero():
    assert rule.against_the_first([40, 10, 5], [0.041, 0.0005, 9.0], 0.001) == pytest.approx(
        (0.01, 0.0105, 0.0)
    )
    assert rule.against_the_first([40, 10, 6, 5], [0.041, 0.005, 0.005, 9.0], 0.001)[2] == pytest.approx(
        0.0005
    )


pace = st.just(0.0) | st.floats(1e-9, 1e9)
part = st.sampled_from([0.0, 0.25, 0.5, 0.97, 1.0])


@given(
    st.tuples(part, part, pace, st.floats(1.0, 50.0)),
    st.fixed_dictionaries(
        {
            "reported": st.booleans(),
            "left": st.integers(0, 10**6),
            "batch": st.integers(1, 10**7),
            "held": st.integers(0, 10**7),
            "speed": pace,
            "together": pace,
            "workers": st.integers(1, 2000),
            "most": st.integers(0, 10**7),
            "unit": st.integers(1, 9),
        }
    ),
)
def test_a_worker_alone_claims_what_it_does_in_many_realizations(planned, known):
    before, after, expected, least = planned
    known["most"] -= known["most"] % known["unit"]
    piece_plan = PiecePlan(np.array(0.5), *map(np.array, (before, after, [least], [expected])))
    both = PiecePlan(*(np.stack([value, value]) for value in piece_plan))
    at = np.arange(2), np.zeros(2, np.int64)
    each = {
        name: value if name in ("workers", "most", "unit") else np.array([value, value])
        for name, value in known.items()
    }
    assert (rule.claim(both, at, **each) == rule.claim(piece_plan, 0, **known)).all()


@given(scripts(alone=True))
def test_all_engines_claim_alike(script):
    claims = by_clock(script)
    event(f"{min(len(claims), 10)} claims or more")
    assert by_server(script) == claims
    assert by_torch(script) == claims


@given(scripts())
def test_torch_and_the_clock_claim_alike_with_kept_ends_units_and_limits(script):
    assert by_torch(script) == by_clock(script)


@given(scripts(alone=True), st.lists(st.integers(1, 9), min_size=5, max_size=5))
def test_torch_and_the_server_claim_alike_down_to_the_smallest_piece(script, least):
    piece_plan = script.piece_plan._replace(least=np.array(least[: len(script.loads)], float))
    script = script._replace(piece_plan=piece_plan, loads=script.loads + 40)
    assert by_torch(script, kept=False) == by_server(script)
