"""What a member decides if others are lost: missing samples, their parts, gradients, who is first."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError, WorkerError
from paceline.samples import CostModel, SampleCosts
from paceline.torch import ElasticPace
from paceline.torch.elastic import buckets, commit, group, recovery
from paceline.torch.elastic.buckets import Buckets
from paceline.torch.elastic.handover import Handover
from paceline.torch.elastic.link import LauncherLink
from paceline.torch.elastic.messages import MembershipEpoch, WorkerId
from paceline.torch.elastic.recovery import Rendezvous, Running
from paceline.torch.rows import layout
from support.guarantees import guarantee


def test_ran_and_missing_spans_are_every_sample_once() -> None:
    """Whatever was run, that and what is missing is every sample once, however it is cut."""
    chance = random.Random(4)
    for _ in range(300):
        first, size = chance.randrange(50), chance.randrange(1, 60)
        cuts = sorted(chance.sample(range(first, first + size + 1), k=min(size, chance.randrange(2, 8))))
        spans = [(a, b - a) for a, b in pairwise(cuts)]
        ran = [span for span in spans if chance.random() < 0.5]
        chance.shuffle(ran)
        most, whole = chance.choice([1, 3, 100]), recovery.missing(ran, first, size)
        rest = recovery.parts(whole, chance.randrange(1, 6), most)
        assert sorted(i for a, n in [*ran, *rest] for i in range(a, a + n)) == list(
            range(first, first + size)
        )
        assert all(0 < n <= most for _, n in rest)
        assert sorted(recovery.missing([*ran, *rest], first, size)) == []


@guarantee("Sums that fail and backward passes that are left keep gradients and parameters exact.")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("tells", [True, False])
def test_kept_gradient_is_not_written_over(
    to_none: bool, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a user keeps of a gradient is not written over by a later round, nor is one's own gradient by a sum that
    fails."""
    if not tells:
        monkeypatch.setattr(buckets, "storage_uses", lambda tensor: None)
    model = torch.nn.Linear(3, 2)
    held = Buckets(list(model.parameters()))
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def doubled(tensor: torch.Tensor) -> None:
        tensor.mul_(2)  # as if another rank had the same

    for number in range(1, 6):
        model.zero_grad(set_to_none=to_none)
        x = torch.full((1, 3), float(number))
        held.begin(doubled)
        model(x).sum().backward()
        own = model.weight.grad
        assert own is not None
        if number == 3:  # once more, after sums that have failed
            held.finish(doubled)
            assert own.eq(number).all()
            assert model.weight.grad is own
        held.finish(doubled)
        held.apply(held.used())
        assert model.weight.grad is not None
        assert model.weight.grad.eq(2 * number).all()
        assert model.bias.grad is not None
        assert model.bias.grad.eq(2).all()
        if to_none:
            row = model.weight.grad[0] if number % 2 else model.weight.grad
            kept.append((row, row.clone()))
    assert all(one.equal(was) for one, was in kept)
    held.close()


@guarantee(
    "A lost rank's samples run once, in parts of equal cost, also with claims, `count=` and loader processes."
)
@pytest.mark.parametrize("padded", [False, True])
def test_parts_of_missing_samples_cost_the_same(padded: bool) -> None:
    """Every sample once, within the limits of a micro-batch; two parts for each member, as equal as samples allow."""
    chance = np.random.default_rng(6)
    for _ in range(200):
        model = SampleCosts(chance.uniform(1, 40, 50)).model(0.3, padded=padded)
        sizes, members, min_samples = chance.integers(4, 40, 3).tolist(), int(chance.integers(1, 6)), 2
        spans = [(start, size) for start, size in zip((0, 60, 200), sizes, strict=True)]
        lengths = [chance.uniform(1, 40, size) for size in sizes]
        most, budget = int(chance.integers(3, 30)), float(chance.choice([120.0, np.inf]))
        cut = recovery.parts_by_cost(spans, lengths, model, members, most, budget, min_samples)
        assert [i for a, n in cut for i in range(a, a + n)] == [i for a, n in spans for i in range(a, a + n)]
        assert all(min_samples <= n <= most for _, n in cut)
        for start, n in cut:
            span = max(s for s, _ in spans if s <= start)
            own = lengths[[s for s, _ in spans].index(span)][start - span :][:n]
            assert (n * own.max() if padded else own.sum()) <= budget
    even = recovery.parts_by_cost([(0, 60)], [np.repeat([1.0, 5.0], 30)], CostModel(1.0), 3, 60, np.inf)
    costs = [sum(1 if at < 30 else 5 for at in range(start, start + size)) for start, size in even]
    assert len(even) == 6
    assert max(costs) - min(costs) <= 5


def test_parts_are_multiples_of_the_quantum_within_the_micro_batch() -> None:
    """In multiples of the quantum where the samples are; two samples at least where batch norm needs them."""
    for members in range(1, 6):
        for spans in ([(0, 16)], [(8, 24), (40, 8)], [(3, 40)]):
            cut = recovery.parts(spans, members, 16, unit=8)
            assert all(n % 8 == 0 and n <= 16 for _, n in cut)
            assert sum(n for _, n in cut) == sum(n for _, n in spans)
        for size in range(2, 30):
            sizes = [n for _, n in recovery.parts([(5, size)], members, 3, min_samples=2)]
            assert sum(sizes) == size
            assert set(sizes) <= {2, 3}
    assert recovery.parts([(0, 19)], 1, 8, unit=8) == [(0, 8), (8, 8), (16, 3)]  # the end of an epoch


@guarantee("A sample that is missing or counts twice in a round's gradient ends the run before the step.")
def test_a_sample_that_counts_twice_ends_the_run() -> None:
    row = np.zeros((), layout(False, by_itself=True))

    def told(ran: list[tuple[int, int]]) -> Any:
        mine = commit.write(Running(first=8, ran=ran), False, None, [True], row, 0, 2)
        return commit.read(mine.numpy(), 2, layout(False, by_itself=True), 6, 3)

    size = 3_000_001  # whose sum of squares no float holds
    halves = [[(8, 1_000_000)], [(1_000_008, 2_000_001)]]
    total = sum(
        commit.write(Running(first=8, ran=ran), False, None, [True], row, place, 2).numpy()
        for place, ran in enumerate(halves)
    )
    assert commit.read(total, 2, layout(False, by_itself=True), size, 3).present.all()
    total[2] += 1
    with pytest.raises(WorkerError, match="in its gradient"):
        commit.read(total, 2, layout(False, by_itself=True), size, 3)

    found = told([(8, 4), (12, 2)])
    assert found.present.tolist() == [True, False]
    for wrong in ([(8, 4)], [(8, 4), (11, 2)], [(8, 5), (8, 1)]):
        with pytest.raises(WorkerError, match="in its gradient"):
            told(wrong)


def test_members_that_cannot_reach_one_another_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each is told to use a network of its own; nobody tries for ever."""

    class Reached:
        ident = place = tries = 0

        def next(self, number: int) -> MembershipEpoch:
            return MembershipEpoch(number + 1, (WorkerId(0, 0), WorkerId(1, 1)), True)

        def meet(
            self, epoch: MembershipEpoch, word: dict[str, Any], running: str
        ) -> dict[int, dict[str, Any]]:
            assert running == "round 3"
            return {ident: {"has": True, "done": 3, "fits": 8} for ident in (0, 1)}

        def lost_since(self, number: int) -> bool:
            return number < 5  # then it begins to count

        def broken(self, number: int) -> None:
            self.tries += 1

        connections = signer = None

    monkeypatch.setattr(group, "connect", lambda *_: None)
    link = Reached()
    with pytest.raises(
        WorkerError, match="cannot reach one another, although all of them live; set GLOO_SOCKET_IFNAME"
    ):
        Rendezvous(link, None).enter({"done": 3})  # type: ignore[arg-type]
    assert link.tries == 5 + 19


def test_joiner_hands_on_the_record_of_the_last_round() -> None:
    """To one that missed it, as whoever ran it is lost meanwhile."""
    hands = [Handover(dict, lambda model: None, dict, lambda run: None) for _ in range(3)]
    hands[0].record = torch.arange(3.0, dtype=torch.float64)
    hands[1].take(hands[0].pack(), run=True)
    assert torch.equal(hands[2].take(hands[1].pack(), run=False), hands[0].record)


def test_one_of_all_that_leave_after_the_last_round_is_first() -> None:
    """Else nobody would judge the model, and all would wait for whoever does."""
    both = (WorkerId(0, 0), WorkerId(1, 1))

    def firsts(newest: tuple[WorkerId, ...]) -> list[bool]:
        found = []
        for worker in both:
            link = LauncherLink.__new__(LauncherLink)
            link.ident, link._epoch = worker.ident, MembershipEpoch(2, both, False)
            link.known = MembershipEpoch(3, newest, False)
            found.append(link.first)
        return found

    assert firsts(both) == [True, False]
    assert firsts(both[1:]) == [False, True]  # the first is lost
    assert firsts((WorkerId(2, 0), both[1])) == [False, True]  # and another has come, which has no model yet
    assert firsts(()) == [True, False]


def test_optimizer_within_a_registered_wrapper_is_handed_over() -> None:
    class Lookahead:
        def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
            self.base, self.others = optimizers[0], optimizers[1:]
            self.param_groups = self.base.param_groups

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state: dict[str, object]) -> None: ...

    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1) for _ in range(5)]
    given = Handover(dict, lambda state: None, dict, lambda state: None)
    scheduler = torch.optim.lr_scheduler.StepLR(
        optimizers[3], 2
    )  # its state has no momentum of the optimizer
    given.register([scheduler, optimizers[0], Lookahead(*optimizers[1:3])])
    assert [given.holds(each) for each in optimizers] == [True, True, True, False, False]


def test_things_registered_in_another_order_raise_with_both_orders() -> None:
    def handover(*kinds: type[torch.optim.Optimizer]) -> Handover:
        given = Handover(dict, lambda state: None, dict, lambda state: None)
        given.register([kind([torch.nn.Parameter(torch.ones(1))], lr=0.1) for kind in kinds])
        return given

    packed = handover(torch.optim.SGD, torch.optim.Adam).pack()
    handover(torch.optim.SGD, torch.optim.Adam).take(packed, run=True)
    said = r"was given Adam, SGD on this rank, and SGD, Adam on the rank that hands over; expected the same on every"
    with pytest.raises(PacelineError, match=said):
        handover(torch.optim.Adam, torch.optim.SGD).take(packed, run=True)


def test_rank_that_received_a_step_from_the_others_is_no_chief_until_its_next_round() -> None:
    member = SimpleNamespace(chief=True, late=False)
    pace: Any = SimpleNamespace(_member=member)
    chief: Any = ElasticPace.chief.fget  # type: ignore[attr-defined]
    assert chief(pace)
    member.late = True
    assert not chief(pace)
