"""Rounds in pieces: whatever workers do, each sample of a round is delivered once by one who is there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.pieces.rule import against_the_first, piece_cost
from paceline.pieces.sharing import SharedRound
from paceline.rounds import PiecePlan


def piece_plan(n=3, first=0.5, part=0.5, least=4.0, speeds=None):
    return PiecePlan(
        np.asarray(first), *np.full(2, part), np.full(n, least), np.asarray(speeds or [1000.0] * n, float)
    )


class Cluster:
    """Workers of given seconds per sample, on a clock; ``lose`` takes one away at a time."""

    def __init__(self, loads, paces, how, lose=()):
        self.sharing = SharedRound(how, np.full(len(loads), 1e-3))
        self.paces, self.queues, self.now = paces, {w: [] for w in range(len(loads))}, 0.0
        self.delivered, self.free, self.log = {w: [] for w in range(len(loads))}, {}, []
        starts = np.concatenate([[0], np.cumsum(loads)])
        for w in range(len(loads)):
            self.send(w, self.sharing.begin(w, np.arange(starts[w], starts[w + 1]), 0.0))
        self.lose = sorted(lose)

    def send(self, w, piece):
        if piece is not None:
            self.queues[w].append(("piece", piece))
            self.free.setdefault(w, self.now)

    def run(self):
        while not self.sharing.complete():
            ends = [
                (self.free[w] + (1e-3 + self.paces[w] * len(q[0][1]) if q[0][0] == "piece" else 0.0), w)
                for w, q in self.queues.items()
                if q
            ]
            at, w = min(ends)
            if self.lose and self.lose[0][0] <= at and len(self.queues) > 1:
                self.now, lost = self.lose.pop(0)
                if lost in self.queues:
                    del self.queues[lost], self.delivered[lost]
                    self.sharing.lose(lost)
            else:
                self.now = self.free[w] = at
                kind, samples = self.queues[w].pop(0)
                self.log.append((round(at, 6), w, kind, len(samples)))
                if kind == "piece":
                    self.sharing.reported(w, at)
                else:
                    self.sharing.delivered(w, samples, at)
                    self.delivered[w] += samples.tolist()
            for other in self.queues:
                if self.sharing.idle(other):
                    if not self.queues[other]:
                        self.free[other] = self.now
                    self.send(other, self.sharing.claim(other, self.now))
            for other, queue in self.queues.items():
                samples = self.sharing.to_deliver(other)
                if samples is not None:
                    queue.append(("deliver", samples))
        return self.sharing.end()


@given(
    st.lists(st.tuples(st.integers(1, 200), st.floats(1e-4, 1e-2)), min_size=2, max_size=5),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(0, 4)), max_size=3),
)
def test_each_sample_is_used_once_after_any_loss(workers, first, part, lose):
    loads, paces = zip(*workers, strict=True)
    cluster = Cluster(loads, paces, piece_plan(len(loads), first, part), lose)
    ran = cluster.run()
    everything = sorted(sample for samples in cluster.delivered.values() for sample in samples)
    assert everything == list(range(sum(loads)))
    for w, each in ran.items():
        assert sorted(each.taken) == sorted(cluster.delivered[w])
        assert sum(each.sizes) >= len(each.taken)
        assert len(each.sizes) == len(each.times)
    within = cluster.sharing.record(ran)
    assert 0 <= within.at_once <= 1
    assert [sum(sizes) for sizes in within.pieces] == [
        len(ran[w].taken) if w in ran else 0 for w in range(len(loads))
    ]


def test_exact_log_of_a_round():
    """40 of 80 samples each at once; then half of what is due, by the planned speeds until worker 1 has told that it
    is half as fast: then a third of all is due to it. Where less than its part of what is left seems due to worker 0,
    that part. Down to the least, which is half as large for who turns out to be half as fast."""
    cluster = Cluster([80, 80], [1e-3, 2e-3], piece_plan(2, least=8.0))
    cluster.run()
    assert [(w, samples) for _, w, kind, samples in cluster.log if kind == "piece"] == [
        (0, 40),
        (0, 20),  # (80 - 40) / 2
        (0, 15),  # 80 - 60 are due, a half of the 60 that are left is more: 30 / 2
        (1, 40),
        (0, 12),  # claimed before that: 45 / 4
        (1, 7),  # (160 / 3 - 40) / 2
        (0, 10),  # (320 / 3 - 87) / 2
        (1, 4),
        (0, 8),
        (1, 4),
    ]
    assert cluster.log[-2:] == [(0.114, 1, "piece", 4), (0.114, 1, "deliver", 55)]
    assert (0.111, 0, "deliver", 105) in cluster.log


def test_who_is_stuck_in_its_first_portion_leaves_the_rest_to_the_other():
    cluster = Cluster([80, 80], [1e-3, 4e-3], piece_plan(2, least=8.0))
    ran = cluster.run()
    assert ran[0].sizes == [40, 20, 15, 12, 9, 8, 8, 8]
    assert ran[1].sizes == [40]
    assert cluster.now == pytest.approx(0.161)  # its own 40; with 80 it would have been 0.321


def test_the_next_piece_is_claimed_before_the_one_before_ends():
    sharing = SharedRound(piece_plan(2), np.full(2, 1e-3))
    sharing.begin(0, np.arange(80), 0.0)
    sharing.begin(1, np.arange(80, 160), 0.0)
    assert sharing.expected(0) == pytest.approx(0.001 + 40 / 1000 - 0.003)
    assert sharing.claim(0, 0.039) is not None
    assert sharing.expected(0) is None
    assert sharing.awaited(0) == (0.0, 40 + 20)
    sharing.reported(0, 0.041)
    sharing.reported(0, 0.062)
    assert sharing.end()[0].times == pytest.approx([0.041, 0.021])


@given(st.floats(1e-3, 2e-2), st.floats(1e-4, 1e-2))
def test_the_cost_of_a_piece_is_found(cost, pace):
    found = 2e-3
    for _ in range(200):
        found = piece_cost([40, 8], [cost + 40 * pace, cost + 8 * pace], found)
    assert found == pytest.approx(cost, rel=0.11)
    assert piece_cost([40], [1.0], 0.005) == 0.005


def test_how_far_claims_strayed_from_the_first_piece():
    # 40 samples in 40 ms and a piece's 1 ms; then 30 expected in 30 ms took 45, the last one left out.
    expected, strayed, pace = against_the_first([40, 20, 10, 5], [0.041, 0.031, 0.016, 9.0], 0.001)
    assert expected == pytest.approx(0.030)
    assert strayed == pytest.approx(0.015)
    assert pace == pytest.approx(0.0015)
    assert against_the_first([40], [0.041], 0.001) == pytest.approx((0, 0, np.nan), nan_ok=True)
    assert against_the_first([40, 5], [0.041, 0.005], 0.001) == pytest.approx((0, 0, 0.0008))
    assert against_the_first([40, 0], [0.041, 0.001], 0.001) == pytest.approx((0, 0, np.nan), nan_ok=True)
    assert against_the_first([40, 5, 5], [0.0005, 0.005, 9.0], 0.001) == pytest.approx((0, 0, 0.0008))
    # A rank that was planned for nothing may have claimed one piece before its last, which is empty.
    assert against_the_first([3, 0], [0.041, 0.001], 0.001) == pytest.approx((0, 0, np.nan), nan_ok=True)


def test_work_and_record_of_a_round_by_hand():
    """Worker 0 runs the half of its 8 samples at once; worker 1 cannot halve its one, and claims."""
    sharing = SharedRound(piece_plan(3, least=2.0), np.array([1e-3, 2e-3, 3e-3]))
    assert sharing.begin(0, np.arange(8), 10.0).tolist() == [0, 1, 2, 3]
    # Half of the 9 samples are due to it, and a half of these are claimed: 2.25, rounded up.
    assert sharing.begin(1, np.arange(8, 9), 10.0).tolist() == [4, 5, 6]
    assert (sharing.left, sharing.workers()) == (2, [0, 1])
    sharing.reported(0, 10.005)  # as fast as planned: two are the least
    assert sharing.claim(0, 10.5).tolist() == [7, 8]
    sharing.reported(0, 10.525)
    for worker in (0, 1):
        sharing.delivered(worker, sharing.to_deliver(worker), 12.0)
    assert sharing.complete()
    ran = sharing.end()
    assert (ran[0].sizes, ran[1].sizes) == ([4, 2], [3])
    # Without the wait between the report and the claim.
    assert (ran[0].times, ran[1].times) == (pytest.approx([0.005, 0.025]), [2.0])
    # The smaller piece took longer, so a piece seems to cost more than 1 ms: a tenth is added.
    assert (ran[0].piece, ran[1].piece) == pytest.approx((1.1e-3, 2e-3))
    assert (ran[0].overhead, ran[1].overhead) == pytest.approx((1.1e-3, 0.0))
    record = sharing.record(ran)
    assert record.at_once == 4 / 9
    assert (record.pieces, record.piece_seconds) == ([[4, 2], [3], []], [[0.005, 0.025], [2.0], []])
    assert record.piece_cost == pytest.approx(1.55e-3)


def test_round_that_runs_all_at_once_has_no_claims():
    sharing = SharedRound(piece_plan(2, first=1.0), np.full(2, 1e-3))
    assert sharing.begin(0, np.arange(4), 0.0).tolist() == [0, 1, 2, 3]
    assert (sharing.left, sharing.claim(0, 0.0)) == (0, None)
    sharing.delivered(0, sharing.to_deliver(0), 1.0)
    ran = sharing.end()
    assert (ran[0].seconds, ran[0].overhead, sharing.record(ran).at_once) == (1.0, 0.0, 1.0)
    assert SharedRound(piece_plan(2), np.full(2, 1e-3)).complete()
    empty = SharedRound(piece_plan(2), np.full(2, 1e-3))
    assert empty.begin(1, np.arange(0), 0.0) is None
    assert empty.end()[1].overhead == 0.0
