"""The course of a round as a state: rounds of several ranks in one process, without a model."""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.errors import PacelineError
from paceline.rounds import PiecePlan
from paceline.torch.elastic import recovery
from paceline.torch.elastic.recovery import Running
from paceline.torch.feed.pieces import planned_pieces
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.gradients.weighing import MEAN, Weighing
from paceline.torch.plan import Claim, Division, Piece, RoundPlan, claimed
from paceline.torch.round import (
    AGAIN,
    ALONE,
    BETWEEN,
    COMMIT,
    COMPLETE,
    DRAWN,
    DUE,
    END,
    KEEP,
    NEXT,
    RAN,
    REFUSED,
    STEP,
    WEIGHED,
    RoundState,
)
from support.often import times

GUARANTEES = (
    "In any order of events, each sample of a round counts once and the weights sum to one.",
    "Members that are lost at any event leave each sample of the round counted once.",
)


def piece(samples: int = 4, first: bool = True, last: bool = True, step: int = 7) -> Piece:
    return Piece(RoundPlan(step, np.array([samples]), samples), samples, first, last)


def slots(round: RoundState) -> dict[str, Any]:
    found = {name: getattr(round, name) for name in RoundState.__slots__}
    return found | {"taken": list(round.taken)}


def drawn(**options: Any) -> RoundState:
    round = RoundState(**options)
    round.drawn(piece())
    return round


def weighed(**options: Any) -> RoundState:
    round = drawn(**options)
    assert round.weighed()
    return round


def counted() -> RoundState:
    round = drawn()
    assert round.weighed(3.0)
    assert not round.weighed(3.0)
    return round


def ended(**options: Any) -> RoundState:
    round = weighed(**options)
    round.ended()
    return round


def over() -> RoundState:
    round = ended()
    round.stepped()
    return round


def between_pieces() -> RoundState:
    round = RoundState()
    round.drawn(piece(last=False))
    round.weighed()
    assert round.ended()[0] is KEEP
    return round


def undivided() -> RoundState:
    """Under the hook, a last pass whose gradient is still to be divided by a count."""
    round = drawn()
    round.began()
    round.gradients_ready()
    round.noticed_end(counted=True)
    return round


def missing_rows() -> RoundState:
    round = RoundState()
    round.drawn(piece(), rows=3)
    return round


@pytest.mark.parametrize(
    ("round", "event", "rule_"),
    [
        (RoundState(), lambda r: r.passes(), "backward outside"),
        (over(), lambda r: r.passes(), "backward after"),
        (ended(), lambda r: r.passes(), "backward twice"),
        (between_pieces(), lambda r: r.passes(), "backward twice"),
        (drawn(), lambda r: r.ended(), "not weighed"),
        (drawn(), lambda r: r.goes_on(), "left out"),
        (weighed(), lambda r: r.goes_on(), "left out"),
        (weighed(), lambda r: r.weighed(3.0), "other count"),
        (counted(), lambda r: r.weighed(), "other count"),
        (counted(), lambda r: r.weighed(4.0), "other count"),
        (ended(own=ALONE), lambda r: r.goes_on(), "no own step"),
        (undivided(), lambda r: r.goes_on(), "undivided"),
        (undivided(), lambda r: r.steps(False, lambda: False), "undivided"),
        (drawn(), lambda r: r.steps(False, lambda: True), "foreign backward"),
        (drawn(), lambda r: r.steps(False, lambda: False), "step within"),
        (between_pieces(), lambda r: r.steps(False, lambda: True), "step within"),
        (drawn(own=ALONE), lambda r: r.steps_alone(), "own step early"),
        (RoundState(own=ALONE), lambda r: r.steps_alone(), "own step twice"),
        (missing_rows(), lambda r: r.began(), "rows"),
        (drawn(), lambda r: r.stepped_piece(), "loss_now"),
        (drawn(), lambda r: r.checkpoint(), "checkpoint"),
    ],
)
def test_an_event_that_the_phase_does_not_allow_raises_and_changes_nothing(
    round: RoundState, event: Any, rule_: str
) -> None:
    before = slots(round)
    words = REFUSED[rule_].partition("{")[0] or REFUSED[rule_].partition("}")[2].partition("{")[0]
    with pytest.raises(PacelineError) as refused:
        event(round)
    assert words in str(refused.value)
    assert "{" not in str(refused.value)
    assert slots(round) == before


def test_an_optimizer_steps_once_for_a_round() -> None:
    round, one, other = ended(), object(), object()
    round.once([one, other])
    round.took([one])
    for again in ([one], [other, one], [other, other]):
        with pytest.raises(PacelineError, match="stepped twice for one round"):
            round.once(again)
    round.stepped()
    round.once([other])  # the second model's, after the round's step
    round.drawn(piece(step=8))
    round.once([one])


def test_a_closure_may_step_before_its_backward_pass() -> None:
    drawn().steps(True, lambda: True)


def test_a_round_that_was_left_leaves_nothing_behind() -> None:
    round = between_pieces()
    assert round.left_behind is not None
    assert round.left_behind.done
    assert round.left() is not None
    round.forget()
    for name, value in slots(RoundState()).items():
        assert name in {"ran", "ready", "rows", "asked"} or getattr(round, name) == value, name


@pytest.mark.parametrize(
    ("options", "last", "instruction", "phase"),
    [
        ({}, True, STEP, COMPLETE),
        ({}, False, KEEP, RAN),
        ({"own": COMMIT}, True, COMMIT, RAN),
        ({"own": COMMIT}, False, COMMIT, RAN),
        ({"own": ALONE}, True, ALONE, DUE),
        ({"own": ALONE}, False, ALONE, DUE),
    ],
)
def test_a_backward_pass_ends_with_an_instruction(
    options: dict[str, Any], last: bool, instruction: str, phase: int
) -> None:
    round = RoundState(**options)
    round.drawn(piece(last=last))
    round.weighed()
    assert round.ended()[0] is instruction
    assert round.phase == phase


def test_the_passes_of_a_micro_step_that_was_cut_are_one_micro_step() -> None:
    round = drawn()
    assert not round.cut(3, first=True, more=True).last
    round.weighed()
    assert not round.gradients_ready()
    assert round.ended()[0] is AGAIN
    assert round.cut(1, first=False, more=False).last
    round.weighed()
    assert round.gradients_ready()
    assert not round.gradients_ready(), "only once in a round"
    assert round.ended()[0] is STEP
    assert round.running.samples == 4


def test_a_commit_that_fails_leaves_the_round_open() -> None:
    round = ended(own=COMMIT)
    assert not round.committed(False).last
    assert round.goes_on() is NEXT
    round.drawn(piece(samples=2, first=False, last=False))
    round.weighed()
    assert round.ended()[0] is COMMIT
    assert round.committed(True).last
    assert round.goes_on() is END
    assert round.stepped().step == 7


def hooked(last: bool = True) -> RoundState:
    """Under the hook, a pass of a piece that has begun."""
    round = RoundState()
    round.drawn(piece(last=last))
    round.began()
    return round


def test_questions_between_rounds_have_no_piece() -> None:
    for round in (RoundState(), over()):
        for question in (lambda r: r.running, lambda r: r.entire, lambda r: r.ended(), lambda r: r.stepped()):
            with pytest.raises(PacelineError, match="no round is running"):
                question(round)
        assert (round.computing, round.unstepped, round.left_behind, round.more) == (None, None, None, False)
        assert (round.sends, round.began(), round.noticed_end(False)) == (False, False, None)
        assert (round.goes_on(), round.gradients_ready()) == ("", None)
        assert not round.weighed()
        round.checkpoint()
    assert (RoundState().newest, RoundState().samples(True)) == (None, None)
    assert (over().newest, over().samples(True), over().samples(False)) == (piece(), 4, 4)
    assert over().stepped_piece() == piece()
    assert (RoundState().asks(), over().asks()) == (False, True)


def test_questions_within_a_round_follow_its_phase() -> None:
    round = drawn()
    assert (round.running, round.entire, round.newest) == (piece(),) * 3
    assert (round.computing, round.unstepped, round.sends) == (7, 7, False)
    assert round.left_behind == (piece(), False)
    round.weighed()
    assert (round.sends, round.left_behind) == (True, (piece(), False))
    assert round.gradients_ready() == piece()
    assert (round.computing, round.unstepped) == (None, 7)
    round.ended()
    assert (round.unstepped, round.left_behind) == (None, (piece(), True))
    assert round.stepped_piece() == piece()
    early = weighed()
    early.took([object()])
    assert early.unstepped is None


def test_only_the_last_pass_of_a_round_sends_and_only_once_it_is_weighed_or_prepared() -> None:
    round = drawn()
    round.prepared()
    assert round.sends
    round.drawn(piece(first=False, last=False))
    assert not round.sends
    round.weighed()
    assert not round.sends
    assert between_pieces().gradients_ready() is None
    assert between_pieces().computing == 7


def test_samples_of_a_rank_are_known_with_its_round() -> None:
    round = RoundState()
    round.drawn(piece(4, last=False))
    assert (round.samples(True), round.samples(False)) == (4, None)
    round.weighed()
    round.ended()
    assert round.samples(False) is None
    round.drawn(piece(2, first=False))
    round.weighed()
    assert (round.samples(True), round.samples(False)) == (2, None)
    round.ended()
    assert (round.samples(True), round.samples(False)) == (2, 6)
    round.stepped()
    assert (round.samples(True), round.samples(False)) == (2, 6)
    round.drawn(piece(3, step=8))
    assert (round.ran, round.ready, round.taken) == (3, False, [])
    cut = drawn()
    cut.cut(3, first=True, more=True)
    assert cut.samples(True) == 4  # of the micro-step


def test_loop_that_asks_learns_whether_its_samples_count() -> None:
    round = drawn()
    assert (round.asked, round.asks(), round.asked) == (False, True, True)
    empty = RoundState()
    empty.drawn(piece(0), asked=True)
    assert (empty.asked, empty.asks()) == (True, False)


def test_cut_pass_has_the_ends_of_its_micro_step() -> None:
    round = RoundState()
    round.drawn(piece(5, first=True, last=True), rows=3)
    one = round.cut(2, first=True, more=True)
    assert (one.samples, one.first, one.last, round.more) == (2, True, False, True)
    assert (round.rows, round.phase, round.entire.samples) == (None, DRAWN, 5)
    two = round.cut(3, first=False, more=False)
    assert (two.samples, two.first, two.last, round.more) == (3, False, True, False)
    round.drawn(piece(5, first=False, last=False))
    middle = round.cut(5, first=True, more=False)
    assert (middle.first, middle.last) == (False, False)


def test_pass_under_the_hook_is_noticed_once_and_ends_with_its_gradient() -> None:
    round = hooked()
    assert not round.began()
    assert round.noticed_end(counted=False) == piece()
    assert round.phase == RAN  # its last gradient is not there
    round.gradients_ready()
    round.noticed_end(counted=True)
    assert round.phase == RAN
    round.noticed_end(counted=False)
    assert round.phase == COMPLETE
    early = hooked(last=False)
    early.ready = True
    early.noticed_end(counted=False)
    assert early.phase == RAN
    assert hooked().ended()[0] is STEP  # it needs no weight of the loss
    weighed_ = missing_rows()
    weighed_.weighed()
    assert weighed_.began()  # the loss was weighed by hand: its rows are the loop's business


def test_gradients_of_the_next_pass_are_noticed_again() -> None:
    round = hooked(last=False)
    round.ended()
    round.drawn(piece(first=False))
    assert round.began()


def test_loop_that_goes_on_after_nothing_ran_or_nothing_divided_raises() -> None:
    round = drawn()
    round.phase = RAN
    with pytest.raises(PacelineError, match="round 7: the loop went on without a backward pass"):
        round.goes_on()
    assert ended().goes_on() is END
    assert between_pieces().goes_on() is NEXT
    with pytest.raises(PacelineError, match=r"the loop went on without pace\.backward"):
        drawn().goes_on()
    with pytest.raises(PacelineError, match=r"the loop went on without accelerator\.backward"):
        drawn(pass_name="accelerator.backward(loss)").goes_on()


@pytest.mark.parametrize(
    ("last", "ready", "phase", "foreign", "refused"),
    [
        (True, True, RAN, False, "is not divided by the count"),
        (True, False, RAN, True, "was called within round 7"),
        (True, True, DRAWN, False, "after a backward pass that is not Paceline's"),
        (True, True, WEIGHED, False, r"after pace.weighted\(loss\).backward\(\) alone"),
        (True, False, DRAWN, True, "after a backward pass that is not Paceline's"),
        (True, False, WEIGHED, True, "was called within round 7"),
        (False, True, DRAWN, True, "was called within round 7"),
        (False, True, RAN, True, "was called within round 7"),
    ],
)
def test_step_before_a_round_is_complete_says_what_was_wrong(
    last: bool, ready: bool, phase: int, foreign: bool, refused: str
) -> None:
    round = RoundState()
    round.drawn(piece(last=last))
    round.ready, round.phase = ready, phase
    with pytest.raises(PacelineError, match=refused):
        round.steps(False, lambda: foreign)


def test_steps_between_rounds_and_after_complete_ones_are_allowed() -> None:
    for round in (RoundState(), over(), ended()):
        round.steps(False, lambda: pytest.fail("asked"))


def test_optimizers_that_stepped_elsewhere_are_known_with_the_step() -> None:
    round, one = ended(), object()
    assert round.stepped([one]) == piece()
    with pytest.raises(PacelineError, match="stepped twice"):
        round.once([one])
    round.forget()
    round.once([one])


def test_own_step_follows_each_pass_of_local_steps() -> None:
    round = ended(own=ALONE)
    round.took([object()])
    assert round.steps_alone() == piece()
    assert (round.phase, round.taken) == (RAN, [])
    with pytest.raises(PacelineError, match="called twice for one batch"):
        round.steps_alone()
    with pytest.raises(PacelineError, match=r"before pace\.backward"):
        weighed(own=ALONE).steps_alone()


def test_mean_loss_is_that_of_a_round_that_is_complete_on_all_ranks() -> None:
    committed = ended(own=COMMIT)
    committed.committed(True)
    for round in (RoundState(), weighed(), committed, between_pieces()):
        with pytest.raises(PacelineError, match="while no round is complete"):
            round.stepped_piece()


def test_commit_completes_the_round_or_leaves_its_gradients_to_come() -> None:
    round = ended(own=COMMIT)
    assert round.committed(True) == piece()
    assert (round.phase, round.ready) == (COMPLETE, True)
    failed = ended(own=COMMIT)
    assert failed.committed(False) == piece(last=False)
    assert (failed.phase, failed.ready, failed.entire) == (RAN, False, piece(last=False))
    with pytest.raises(PacelineError, match="no round is running"):
        RoundState().committed(True)


def test_message_names_rows_and_planned_samples() -> None:
    with pytest.raises(PacelineError, match="round 7: the batch has 3 rows; expected the 4 planned samples"):
        missing_rows().began()


class Ranks(RuleBasedStateMachine):
    """Some ranks whose rounds are planned, claimed, cut, and left at any event. Each sample of a round that is over
    counts once, and the weights of its gradients sum to one."""

    @initialize(ranks=st.integers(1, 4), micro_batch=st.none() | st.integers(1, 5), filled=st.booleans())
    def begin(self, ranks: int, micro_batch: int | None, filled: bool) -> None:
        self.ranks = [RoundState() for _ in range(ranks)]
        self.terms: Any = SimpleNamespace(
            min_samples=1, merge=None, micro_batch=micro_batch, quantum=1, micro_steps=lambda loads: None
        )
        self.filled, self.step, self.first = filled, 0, 0
        self.weighing = Weighing([], torch.device("cpu"), Reducer())
        self.plan: RoundPlan | None = None

    @precondition(lambda self: self.plan is None)
    @rule(data=st.data())
    def plan_round(self, data: st.DataObject) -> None:
        many = len(self.ranks)
        loads = np.array(data.draw(st.lists(st.integers(0, 9), min_size=many, max_size=many)))
        loads[0] += not loads.sum()
        own = np.array([data.draw(st.integers(0, load)) for load in loads])
        kept = np.array([data.draw(st.integers(0, int(one))) for one in own])
        pool, ones = int((loads - own).sum()), np.ones(many)
        division = None
        if pool:
            by = PiecePlan(ones / many, ones / many, ones / many, least=ones, speeds=ones)
            division = Division(own - kept, kept, self.first + int(own.sum()), pool, by)
        self.plan = RoundPlan(self.step, loads, int(loads.sum()), division)
        self.claimed_so_far = 0
        indices = np.arange(self.first + self.plan.batch)
        self.todo = [
            deque(
                piece
                for _, piece in planned_pieces(self.terms, rank, self.plan, self.first, indices, self.filled)
            )
            for rank in range(many)
        ]
        self.counted: Counter[int] = Counter()
        self.weights = 0.0

    def claim(self, division: Division, data: st.DataObject) -> Claim | None:
        wanted = data.draw(st.integers(1, 5))
        start, self.claimed_so_far = self.claimed_so_far, self.claimed_so_far + wanted
        if start >= division.pool:
            return None
        return claimed(division, start, min(wanted, division.pool - start), 0, 5)

    @precondition(lambda self: self.plan is not None)
    @rule(data=st.data())
    def micro_step(self, data: st.DataObject) -> None:
        rank = data.draw(st.sampled_from(range(len(self.ranks))))
        round, todo = self.ranks[rank], self.todo[rank]
        if not todo or round.phase not in (BETWEEN, RAN):
            return
        following = todo[0]
        if following.last and following.division is not None:
            claim = self.claim(following.division, data)
            if claim is not None:
                todo.appendleft(following._replace(samples=sum(claim.sizes), last=False, start=claim.start))
        following = todo.popleft()
        if round.phase == RAN:
            assert round.goes_on() is NEXT
        following = following._replace(first=round.piece is None)
        round.drawn(following)
        parts = [following]
        if following.samples > 1 and data.draw(st.booleans()):
            cut = data.draw(st.integers(1, following.samples - 1))
            parts = [round.cut(cut, True, True)]
        self.run(round, parts[0], following.start)
        if round.more:
            rest = following.samples - parts[0].samples
            assert not parts[0].last
            if data.draw(st.booleans()):  # the second pass is tried twice, as after one that did not fit
                round.cut(rest, False, False)
            self.run(round, round.cut(rest, False, False), following.start + parts[0].samples)

    def run(self, round: RoundState, part: Piece, start: int) -> None:
        round.passes()
        assert round.running is part
        assert round.weighed()
        assert not round.weighed()
        self.weights += self.weighing.weigh(part, part.samples, None, False, MEAN)
        self.counted.update(range(start, start + part.samples))
        more = round.more
        do, piece = round.ended()
        assert piece is (part if more else round.entire)
        assert do is (AGAIN if more else STEP if part.last else KEEP)
        assert (round.phase == COMPLETE) is (do is STEP)

    @precondition(lambda self: self.plan is not None and all(each.phase == COMPLETE for each in self.ranks))
    @rule()
    def steps(self) -> None:
        assert self.plan is not None
        assert self.counted == Counter(range(self.first, self.first + self.plan.batch))
        assert self.weights == pytest.approx(1.0, abs=1e-12)
        for round in self.ranks:
            assert round.goes_on() is END
            assert round.stepped().step == self.step
        self.first, self.step, self.plan = self.first + self.plan.batch, self.step + 1, None

    @precondition(lambda self: self.plan is not None)
    @rule()
    def leave(self) -> None:
        for round in self.ranks:
            round.left()
            assert round.phase == BETWEEN
        self.plan = None

    @invariant()
    def phases_agree_with_pieces(self) -> None:
        for round in getattr(self, "ranks", ()):
            assert (round.phase == BETWEEN) is (round.piece is None)
            assert round.phase in (BETWEEN, DRAWN, WEIGHED, RAN, COMPLETE)


class Members(RuleBasedStateMachine):
    """Members of an elastic run, of which any may be lost at any event. The survivors run what is missing of the
    round, and each sample counts once in the gradient that they commit."""

    @initialize(ranks=st.integers(2, 5))
    def begin(self, ranks: int) -> None:
        self.rounds = {place: RoundState(own=COMMIT) for place in range(ranks)}
        self.states = {place: Running() for place in range(ranks)}
        self.todo: dict[int, deque[Piece]] = {}
        self.first, self.step, self.size = 0, 0, 0
        self.broken = False

    @property
    def idle(self) -> bool:
        return not self.size

    @precondition(lambda self: self.idle)
    @rule(data=st.data(), size=st.integers(1, 30))
    def plan_round(self, data: st.DataObject, size: int) -> None:
        places = [*self.rounds]
        cuts = sorted(
            data.draw(st.lists(st.integers(0, size), min_size=len(places) - 1, max_size=len(places) - 1))
        )
        loads = np.diff([0, *cuts, size])
        plan, at = RoundPlan(self.step, loads, size), self.first
        self.plan, self.size, self.parts, self.taken = plan, size, list[tuple[int, int]](), 0
        for place, load in zip(places, loads.tolist(), strict=True):
            half = load // 2
            self.todo[place] = deque(
                [
                    Piece(plan, half, True, False, start=at),
                    Piece(plan, load - half, False, True, start=at + half),
                ]
            )
            at += load
            self.states[place].begin(self.step, self.first, size)
            self.states[place].within = True
            self.states[place].among = tuple(places)

    @precondition(lambda self: not self.idle)
    @rule(data=st.data())
    def micro_step(self, data: st.DataObject) -> None:
        able = [place for place in self.rounds if self.todo[place]]
        if not able:
            return
        place = data.draw(st.sampled_from(able))
        round, piece = self.rounds[place], self.todo[place].popleft()
        round.drawn(piece._replace(first=round.piece is None))
        round.weighed()
        assert round.ended()[0] is COMMIT
        if piece.samples:
            self.states[place].ran.append((piece.start, piece.samples))
        if not piece.last:
            round.committed(False)

    @precondition(lambda self: len(self.rounds) > 1 and not self.idle)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from([*self.rounds]))
        del self.rounds[place], self.states[place], self.todo[place]
        self.broken = True

    @precondition(lambda self: not self.idle and not any(self.todo[place] for place in self.rounds))
    @rule()
    def sum(self) -> None:
        """All members have come to the sum: it fails if one was lost, and they agree on what is missing."""
        if not self.broken:
            self.commit()
            return
        self.broken = False
        words = [state.word() for state in self.states.values()]
        for place, state in self.states.items():
            state.agree(words, len(self.rounds), 8)
            self.rounds[place].committed(False)
        found = {tuple(state.missing.spans) for state in self.states.values() if state.missing is not None}
        assert len(found) == 1, "all members agree"
        some = next(iter(self.states.values())).missing
        assert some is not None
        parts = recovery.parts(some.spans, some.members, some.fits)
        places = [*self.rounds]
        for number, (start, size) in enumerate(parts):  # each part is claimed by one member
            self.todo[places[number % len(places)]].append(Piece(self.plan, size, False, False, start=start))

    def commit(self) -> None:
        counted: Counter[int] = Counter()
        for state in self.states.values():
            for start, size in state.ran:
                counted.update(range(start, start + size))
        assert counted == Counter(range(self.first, self.first + self.size))
        for place, round in self.rounds.items():
            assert round.committed(True).last
            assert round.goes_on() is END
            assert round.stepped().step == self.step
            self.states[place].over()
        self.first, self.step, self.size = self.first + self.size, self.step + 1, 0


TestRanks = Ranks.TestCase
TestMembers = Members.TestCase
TestRanks.settings = TestMembers.settings = settings(
    max_examples=times(60), stateful_step_count=60, deadline=None
)
