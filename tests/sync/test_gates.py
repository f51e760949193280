"""Exact event logs: what each gate has its engine do, arrival by arrival."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline import sync
from paceline.errors import PacelineError
from paceline.sync import Apply, Drop, Gradient, Interrupt, Release
from paceline.sync.protocol import GONE, replaced, weight_of


def play(gate, *events, quorum=None):
    """The effects of init and of each event: a worker's number (arrival), or ("leave" | "join", worker)."""
    effects, state = gate.init()
    log = [effects]
    if quorum is not None:
        more, state = gate.expect(state, quorum, 0.0)
        assert more == ()
    for now, event in enumerate(events):
        name, worker = event if isinstance(event, tuple) else ("arrive", event)
        effects, state = getattr(gate, name)(state, worker, float(now))
        log.append(effects)
    return log


def g(worker, version, weight=1.0):
    return Gradient(worker, version, weight)


@pytest.mark.parametrize("text", ["bsp", "ssp", "lsp:2", "asp"])
def test_run_begins_with_all_workers_at_version_zero(text):
    effects, state = sync.create(text, 3).init()
    assert effects == (Release((0, 1, 2), 0, 0),)
    assert (state.version, state.assigned) == (0, (0, 0, 0))
    assert getattr(state, "clocks", (0, 0, 0)) == (0, 0, 0)


def test_ssp_worker_that_joins_when_nobody_is_there_has_finished_nothing():
    gate = sync.create("ssp:1", 2)
    _, state = gate.init()
    for event, worker in (("arrive", 0), ("leave", 0), ("leave", 1), ("join", 0)):
        effects, state = getattr(gate, event)(state, worker, 0.0)
    assert state.clocks == (0, 0)
    assert effects == (Release((0,), 1, 1),)


def test_ssp_worker_that_joins_again_is_as_far_as_the_slowest_of_the_others():
    gate = sync.create("ssp:1", 3)
    _, state = gate.init()
    for event, worker in (("arrive", 2), ("leave", 2), *[("arrive", 0), ("arrive", 1)] * 3, ("join", 2)):
        _, state = getattr(gate, event)(state, worker, 0.0)
    assert state.clocks == (3, 3, 3)


def test_bsp_waits_for_all_workers():
    assert play(sync.create("bsp", 3), 1, 0, 2, 2) == [
        (Release((0, 1, 2), 0, 0),),
        (),
        (),
        (Apply((g(1, 0), g(0, 0), g(2, 0))), Release((0, 1, 2), 1, 1)),
        (),
    ]


def test_push_wait_lets_late_workers_finish_and_drops_what_they_bring():
    """DBW, section 2."""
    assert play(sync.create("bsp", 3), 1, 0, 2, 0, 1, quorum=2)[1:] == [
        (),
        (Apply((g(1, 0), g(0, 0))), Release((0, 1), 1, 1)),
        (Drop(g(2, 0)), Release((2,), 1, 1)),
        (),
        (Apply((g(0, 1), g(1, 1))), Release((0, 1), 2, 2)),
    ]


def test_late_gradients_may_enter_the_next_update_weighted_by_staleness():
    log = play(sync.create("bsp:late=use", 3), 1, 0, 2, 0, 1, quorum=2)
    assert log[3] == (Release((2,), 1, 1),)
    assert log[5][0] == Apply((g(0, 1), g(1, 1), g(2, 0, 0.5)))


def test_push_interrupt_starts_all_workers_at_once():
    """DBW, section 2."""
    assert play(sync.create("bsp", 3, "push-interrupt"), 1, 0, 2, 0, quorum=2)[2:] == [
        (Apply((g(1, 0), g(0, 0))), Interrupt((2,)), Release((0, 1, 2), 1, 1)),
        (),
        (Apply((g(2, 1), g(0, 1))), Interrupt((1,)), Release((0, 1, 2), 2, 2)),
    ]


def test_pull_hands_out_old_tokens_first():
    """DBW, section 2."""
    assert play(sync.create("bsp", 3, "pull"), 1, 0, 0, 0, 2, 1, quorum=2) == [
        (Release((0, 1, 2), 0, 0),),
        (),
        # Two of the three tokens of version 1 go to the idle workers.
        (Apply((g(1, 0), g(0, 0))), Release((0, 1), 1, 1)),
        # Worker 0 takes the third: it may deliver twice.
        (Release((0,), 1, 1),),
        (Apply((g(0, 1), g(0, 1))), Release((0,), 2, 2)),
        (Drop(g(2, 0)), Release((2,), 2, 2)),
        (Drop(g(1, 1)), Release((1,), 2, 2)),
    ]


def test_asp_applies_each_gradient_alone():
    """LB-BSP, baseline BSP, baseline ASP, baseline SSP, baseline DynSSP."""
    assert play(sync.create("asp:stale=inverse", 2), 1, 1, 0)[1:] == [
        (Apply((g(1, 0),), "batch"), Release((1,), 1, 1)),
        (Apply((g(1, 1),), "batch"), Release((1,), 2, 2)),
        (Apply((g(0, 0, 1 / 3),), "batch"), Release((0,), 3, 3)),
    ]


def test_ssp_stops_who_is_s_clocks_ahead():
    assert play(sync.create("ssp:1", 2), 1, 1, 0, 0)[1:] == [
        (Apply((g(1, 0),), "batch"), Release((1,), 1, 1)),
        (),  # worker 1 has finished 2, worker 0 none
        (Apply((g(1, 1), g(0, 0)), "batch"), Release((0, 1), 2, 2)),
        (Apply((g(0, 2),), "batch"), Release((0,), 3, 3)),
    ]


def test_lsp_groups_and_then_waits_for_all():
    assert play(sync.create("lsp:2:1", 3), 0, 1, 0, 1, 2, 2)[1:] == [
        (),
        (Apply((g(0, 0), g(1, 0)), "batch"), Release((0, 1), 1, 1)),
        (),
        (),  # two of three, but now everybody is waited for
        (Apply((g(0, 1), g(1, 1), g(2, 0)), "batch"), Release((0, 1, 2), 2, 2)),
        (),
    ]


@pytest.mark.parametrize("text", ["bsp", "ssp:0", "lsp:2:3"])
def test_no_worker_waits_for_a_dead_one(text):
    log = play(sync.create(text, 2), 0, ("leave", 1), 0)
    assert [type(e) for e in log[2]] == [Apply, Release]
    assert log[2][1] == Release((0,), 1, 1)
    assert log[3][-1] == Release((0,), 2, 2)


def test_what_a_dead_worker_had_delivered_counts():
    log = play(sync.create("bsp", 3), 0, ("leave", 0), 1, 2)
    assert log[4] == (Apply((g(0, 0), g(1, 0), g(2, 0))), Release((1, 2), 1, 1))


def test_a_joiner_gets_the_newest_parameters():
    for text in ("bsp", "asp", "ssp:3", "lsp:1:0"):
        log = play(sync.create(text, 2), 0, ("leave", 1), ("join", 2))
        version = max(e.version for effects in log[:3] for e in effects if isinstance(e, Release))
        assert log[3][-1] == Release((2,), version, version)


def test_pull_updates_once_all_tokens_are_used_and_nobody_can_bring_more():
    gate = sync.create("bsp", 2, "pull")
    _, state = gate.init()
    _, state = gate.expect(state, 1, 0.0)
    effects, state = gate.arrive(state, 0, 0.0)
    assert effects == (Apply((g(0, 0),)), Release((0,), 1, 1))
    effects, state = gate.join(state, 2, 0.0)
    assert effects == (Release((2,), 1, 1),)  # the second token of version 1, the last
    _, state = gate.expect(state, 3, 0.0)
    for worker in (0, 2):
        effects, state = gate.arrive(state, worker, 0.0)
        assert effects == ()
    effects, state = gate.arrive(state, 1, 0.0)
    assert effects == (Drop(g(1, 0)), Apply((g(0, 1), g(2, 1))), Release((0, 1, 2), 2, 2))


def test_pull_keeps_a_token_for_who_comes_after_all_have_left():
    log = play(sync.create("bsp", 2, "pull"), 0, ("leave", 1), ("leave", 0), ("join", 0), 0, 0, quorum=2)
    assert log[2:] == [
        (Release((0,), 0, 0),),  # the token that worker 1 has left
        (Apply((g(0, 0),)),),
        (Release((0,), 1, 0),),  # the same token again: its gradient will be late
        (Drop(g(0, 0)), Release((0,), 1, 1)),
        (Apply((g(0, 1),)), Release((0,), 2, 2)),
    ]


def test_late_gradients_make_an_update_alone_if_nobody_else_can_come():
    log = play(sync.create("bsp:late=use", 2), 0, 1, ("leave", 1), ("leave", 0), quorum=1)
    assert log[1:] == [
        (Apply((g(0, 0),)), Release((0,), 1, 1)),
        (Release((1,), 1, 1),),
        (),
        (Apply((g(1, 0, 0.5),)),),
    ]


def test_interrupted_update_leaves_those_who_are_gone_alone():
    log = play(sync.create("bsp", 3, "push-interrupt"), ("leave", 2), 0, ("join", 2), quorum=1)
    assert log[2:] == [(Apply((g(0, 0),)), Interrupt((1,)), Release((0, 1), 1, 1)), (Release((2,), 1, 1),)]


def test_lsp_takes_half_of_the_workers_and_a_barrier_after_five():
    for workers, group in ((1, 1), (2, 1), (5, 2), (6, 3)):
        assert sync.create("lsp", workers).init()[1].group == group
    log = play(sync.create("lsp", 2), *[0] * 5, 0, 1, 0)
    assert [len(effects) for effects in log[1:]] == [2, 2, 2, 2, 2, 0, 2, 2]
    assert log[7][0] == Apply((g(0, 5), g(1, 0)), "batch")  # the sixth update waits for both


def test_ssp_is_ten_clocks_and_whole_gradients_by_default():
    log = play(sync.create("ssp", 2), *[0] * 11)
    assert [len(effects) for effects in log[1:]] == [2] * 10 + [0]
    assert log[3][0] == Apply((g(0, 2),), "batch")
    late = play(sync.create("ssp:stale=inverse", 2), 0, 0, 1)
    assert late[3][0] == Apply((g(1, 0, 1 / 3),), "batch")


def test_only_gates_that_wait_for_a_number_take_a_quorum():
    taking = {text: sync.create(text, 4).takes_quorum for text in ("bsp", "lsp", "asp", "ssp")}
    assert taking == {"bsp": True, "lsp": True, "asp": False, "ssp": False}
    gate = sync.create("ssp", 4)
    with pytest.raises(NotImplementedError):
        gate.expect(gate.init()[1], 2, 0.0)


def test_place_beyond_those_known_is_filled_with_workers_that_are_gone():
    assert replaced((3, 4), 1, 9) == (3, 9)
    assert replaced((3, 4), 4, 9) == (3, 4, GONE, GONE, 9)
    assert replaced((), 0, 9) == (9,)


def test_gradient_counts_whole_unless_staleness_divides_it():
    assert Gradient(0, 1).weight == 1.0
    assert Apply((g(0, 1),)).scale == "mean"
    assert [weight_of(staleness, "full") for staleness in (0, 3)] == [1.0, 1.0]
    assert [weight_of(staleness, "inverse") for staleness in (0, 1, 3)] == [1.0, 0.5, 0.25]


arrivals = st.lists(st.integers(0, 4), min_size=1, max_size=60)


def applied(gate, order):
    """Which gradients entered which update when the busy workers finish in this order."""
    effects, state = gate.init()
    busy, updates = set(effects[0].workers), []
    for pick in order:
        worker = sorted(busy)[pick % len(busy)]
        busy.remove(worker)
        effects, state = gate.arrive(state, worker, 0.0)
        for effect in effects:
            if isinstance(effect, Release):
                busy.update(effect.workers)
            elif isinstance(effect, Apply):
                updates.append(effect.gradients)
        assert busy, "a gate may not stop everybody"
    return updates


@settings(max_examples=40, deadline=None)
@given(arrivals)
def test_identities(order):
    """WLBS, section 3.1."""
    bsp = applied(sync.create("bsp", 5), order)
    assert applied(sync.create("lsp:5:2", 5), order) == bsp
    assert applied(sync.create("ssp:0", 5), order) == bsp
    assert applied(sync.create("lsp:1:0", 5), order) == applied(sync.create("asp", 5), order)
    assert applied(sync.create("ssp:1000", 5), order) == applied(sync.create("asp", 5), order)


@settings(max_examples=40, deadline=None)
@given(arrivals, st.integers(0, 3))
def test_ssp_never_lets_anybody_run_further_ahead(order, s):
    """LB-BSP, baseline BSP, baseline ASP, baseline SSP."""
    gate = sync.create(f"ssp:{s}", 5)
    effects, state = gate.init()
    for pick in order:
        busy = [worker for worker, assigned in enumerate(state.assigned) if assigned >= 0]
        effects, state = gate.arrive(state, busy[pick % len(busy)], 0.0)
        for effect in effects:
            if isinstance(effect, Release):
                assert max(state.clocks[w] for w in effect.workers) - min(state.clocks) <= s


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["arrive", "arrive", "leave", "join"]), st.integers(0, 99)), max_size=60
    )
)
@example(  # the last worker joins again at clock 0; the first is at clock 2 and must wait for it
    [("arrive", 0), ("arrive", 0), ("leave", 3), ("join", 0), ("leave", 1), ("leave", 1), ("arrive", 0)]
)
def test_ssp_worker_that_joins_has_the_clock_of_the_slowest(events):
    """LB-BSP, baseline SSP: whoever may run, by a plain model of clocks."""
    gate, s = sync.create("ssp:2", 4), 2
    _, state = gate.init()
    clocks, busy = dict.fromkeys(range(4), 0), set(range(4))  # of those present
    for name, pick in events:
        among = sorted({"arrive": busy, "leave": set(clocks), "join": set(range(4)) - set(clocks)}[name])
        if not among:
            continue
        worker = among[pick % len(among)]
        effects, state = getattr(gate, name)(state, worker, 0.0)
        busy.discard(worker)
        if name == "arrive":
            clocks[worker] += 1
        elif name == "leave":
            del clocks[worker]
        else:  # the slowest of the others; among nobody, from the start
            clocks[worker] = min(clocks.values(), default=0)
        released = {w for effect in effects if isinstance(effect, Release) for w in effect.workers}
        allowed = {w for w, clock in clocks.items() if w not in busy and clock <= min(clocks.values()) + s}
        assert released == allowed
        busy |= released


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("bspp", "push-wait", r"did you mean bsp\? Expected one of asp, bsp, lsp, ssp"),
        ("ssp:-1", "push-wait", "staleness=-1: expected a whole number, 0 to"),
        ("ssp:x", "push-wait", "staleness=x: expected a whole number"),
        ("lsp:9:5", "push-wait", "group=9: expected a whole number, 0 to 4"),
        ("lsp:2:-1", "push-wait", "barrier=-1"),
        ("lsp:1:2:3:4:5", "push-wait", "scale=3"),
        ("ssp:3", "push-interrupt", "exclude each other"),
        ("asp", "pull", "exclude each other"),
        ("asp:group=2", "push-wait", "gate 'asp' has no option 'group=2'"),
        ("asp:barrier=2", "push-wait", "gate 'asp' has no option 'barrier=2'"),
        ("asp:scale=mean", "push-wait", "gate 'asp' has no option 'scale=mean'"),
        ("bsp", "poll", "mode 'poll' is unknown"),
        ("bsp:late=use", "push-interrupt", "never arrives"),
    ],
)
def test_bad_input_raises_one_error(text, mode, says):
    with pytest.raises(PacelineError, match=says):
        sync.create(text, 4, mode)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(
        [("bsp", m) for m in sync.MODES]
        + [(t, "push-wait") for t in ("ssp:1", "lsp:2:1", "asp", "bsp:late=use")]
    ),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), max_size=60),
    st.integers(1, 5),
)
def test_some_worker_always_computes(which, events, quorum):
    gate = sync.create(*(which[0], 5, which[1]))
    _, state = gate.init()
    if gate.takes_quorum:
        _, state = gate.expect(state, quorum, 0.0)
    for kind, pick in events:
        busy = [w for w, assigned in enumerate(state.assigned) if assigned >= 0]
        gone = [w for w, assigned in enumerate(state.assigned) if assigned == -2]
        here = [w for w in range(5) if w not in gone]
        if kind == 0 and len(here) > 1:
            _, state = gate.leave(state, here[pick % len(here)], 0.0)
        elif kind == 1 and gone:
            _, state = gate.join(state, gone[pick % len(gone)], 0.0)
        else:
            _, state = gate.arrive(state, busy[pick % len(busy)], 0.0)
        assert any(assigned >= 0 for assigned in state.assigned)
