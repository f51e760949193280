"""A loop that is left within a round, loaders that take turns, and what a loader promises of its batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from paceline.errors import PacelineError
from paceline.torch import Pace, RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.small_net import Samples, fresh, optimizer_of, reference

LOSS = nn.CrossEntropyLoss()


def paced(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Pace]:
    model = fresh(torch.float64)
    return model, optimizer_of(model), Pace(model, 16, "equal", **options)


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
@pytest.mark.parametrize("at", ["drawn", "forward", "backward"])
@pytest.mark.parametrize("micro_step", range(1, 12))
def test_after_a_loop_that_was_left_the_next_begins_a_fresh_round(micro_step: int, at: str) -> None:
    """Left at any micro-step of the first epoch (most rounds take two), it trains as if that round had not begun."""
    model, optimizer, pace = paced(loop="pieces", micro_batch=8)
    loader, used = pace.loader(Samples(83), seed=5), []
    for micro_steps, (x, y, _) in enumerate(loader, 1):
        if micro_steps == micro_step and at == "drawn":
            break
        loss = LOSS(model(x), y)
        if micro_steps == micro_step and at == "forward":
            break
        pace.backward(loss)
        if micro_steps == micro_step and at == "backward":
            break
        pace.step(optimizer)
    done = pace.rounds
    assert done == (micro_step - 1) // 2
    for x, y, index in loader:
        used += index.tolist()
        pace.backward(LOSS(model(x), y))
        pace.step(optimizer)
    pace.host.detach()
    assert sorted(used) == list(range(83)), "the next loop runs a whole epoch"
    assert pace.rounds == done + 6
    expected = _left_and_gone_on(done)
    for ours, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-14)


def _left_and_gone_on(done: int) -> list[torch.Tensor]:
    """One process that took so many whole batches of epoch 0, and then the epoch after it (the same where none)."""
    model, data = fresh(torch.float64), Samples(83)
    optimizer, order = optimizer_of(model), Order(83, 5)
    first = [torch.from_numpy(order.epoch(0))[k * 16 : (k + 1) * 16] for k in range(done)]
    for chosen in (*first, *torch.from_numpy(order.epoch(1 if done else 0)).split(16)):
        LOSS(model(data.x[chosen]), data.y[chosen]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


@guarantee(
    "Loaders may take turns, and `next(iter(loader))` changes nothing; a loader within another one raises."
)
def test_a_first_batch_may_be_looked_at() -> None:
    model, optimizer, pace = paced()
    loader = pace.loader(Samples(83), seed=5)
    assert len(next(iter(loader))[0]) == 16
    micro_steps = 0
    for x, y, _ in loader:
        micro_steps += 1
        pace.backward(LOSS(model(x), y))
        pace.step(optimizer)
    pace.host.detach()
    assert micro_steps == len(loader) == 6
    for ours, theirs in zip(model.parameters(), reference(83, 16, 6, torch.float64), strict=True):
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-12, atol=1e-14)


@guarantee(
    "Loaders may take turns, and `next(iter(loader))` changes nothing; a loader within another one raises."
)
def test_loaders_of_unlike_length_take_turns() -> None:
    model, optimizer, pace = paced()
    loaders = [pace.loader(Samples(count), seed=5) for count in (83, 40, 7)]
    for which in (0, 1, 2, 1, 0):
        used = []
        for x, y, index in loaders[which]:
            used += index.tolist()
            pace.backward(LOSS(model(x), y))
            pace.step(optimizer)
        assert sorted(used) == list(range((83, 40, 7)[which]))
    assert pace.epoch == 5
    pace.host.detach()


@guarantee(
    "Loaders may take turns, and `next(iter(loader))` changes nothing; a loader within another one raises."
)
def test_loaders_within_each_other_are_refused() -> None:
    model, optimizer, pace = paced()
    one, other = pace.loader(Samples(83)), pace.loader(Samples(83))

    def both() -> None:
        for (x, y, _), _ in zip(one, other, strict=True):
            pace.backward(LOSS(model(x), y))
            pace.step(optimizer)

    with pytest.raises(PacelineError, match="another loop over a loader"):
        both()
    pace.host.detach()


@guarantee(
    "A resumed run continues with the same plans and samples; a state that does not fit raises and changes "
    "nothing."
)
def test_a_checkpoint_goes_on_with_the_loader_that_it_was_made_in() -> None:
    model, optimizer, pace = paced()
    pace.loader(Samples(40))
    for x, y, _ in pace.loader(Samples(83)):
        pace.backward(LOSS(model(x), y))
        if pace.step(optimizer) and pace.rounds == 2:
            break
    state = pace.state_dict()
    pace.host.detach()
    _, _, again = paced()
    first, second = again.loader(Samples(40)), again.loader(Samples(83))
    again.load_state_dict(state)
    with pytest.raises(PacelineError, match=r"expected loader 1 \(83 samples\), in whose epoch"):
        next(iter(first))
    again.load_state_dict(state)
    assert len(second) == 4
    again.host.detach()


def begun(seed: int, shuffle: bool) -> dict[str, Any]:
    """The state after two of an epoch's six rounds."""
    model, optimizer, pace = paced()
    for x, y, _ in pace.loader(Samples(83), seed=seed, shuffle=shuffle):
        pace.backward(LOSS(model(x), y))
        if pace.step(optimizer) and pace.rounds == 2:
            break
    state = pace.state_dict()
    pace.host.detach()
    return state


def go_on(state: dict[str, Any], kind: str, **order: Any) -> None:
    """Draw the next batch after this state was loaded."""
    _, _, again = paced()
    data = Samples(83)
    own = kind == "batch_sampler"
    loader: Any = (
        DataLoader(data, batch_sampler=again.batch_sampler(data, **order))
        if own
        else again.loader(data, **order)
    )
    again.load_state_dict(state)
    try:
        next(iter(loader))
    finally:
        again.host.detach()


@guarantee(
    "A resumed run continues with the same plans and samples; a state that does not fit raises and changes "
    "nothing."
)
@pytest.mark.parametrize("kind", ["loader", "batch_sampler"])
@pytest.mark.parametrize(
    ("order", "words"),
    [
        ({"seed": 6}, r"with seed=6, shuffle=True; expected seed=5, shuffle=True, in whose order"),
        (
            {"seed": 5, "shuffle": False},
            r"with seed=5, shuffle=False; expected seed=5, shuffle=True, in whose",
        ),
    ],
)
def test_an_epoch_that_continues_in_another_order_raises(
    kind: str, order: dict[str, Any], words: str
) -> None:
    with pytest.raises(PacelineError, match=words):
        go_on(begun(5, True), kind, **order)


def test_an_epoch_continues_if_its_order_is_the_same_or_unknown() -> None:
    go_on(begun(5, True), "loader", seed=5)
    go_on(begun(5, False), "batch_sampler", seed=6, shuffle=False)  # no seed decides that order
    older = begun(5, True)
    del older["seed"], older["shuffle"]
    go_on(older, "loader", seed=6)


@guarantee("With `quantum=m`, every batch is a multiple of m, or the data set is refused.")
@settings(max_examples=40)
@given(
    quantum=st.integers(2, 6), units=st.integers(2, 12), rounds=st.integers(1, 4), rest=st.integers(0, 11),
    micro=st.integers(1, 5), loop=st.sampled_from(["whole", "pieces"]), norm=st.booleans(),
)  # fmt: skip
def test_every_batch_is_a_multiple_of_quantum(
    quantum: int, units: int, rounds: int, rest: int, micro: int, loop: str, norm: bool
) -> None:
    model: nn.Module = fresh(torch.float64)
    if norm:
        model = nn.Sequential(model, nn.BatchNorm1d(3).double())
    batch, count = quantum * units, quantum * (units * rounds + rest % units)
    limit = {} if loop == "whole" else {"micro_batch": max(3, micro * quantum)}
    with Pace(model, batch, "level", loop=loop, quantum=quantum, **limit) as pace:
        for x, y, _ in pace.loader(Samples(count)):
            assert len(x) % quantum == 0
            assert len(x) > 0
            pace.backward(LOSS(model(x), y))
            pace.step(torch.optim.SGD(model.parameters(), lr=0.1))


@guarantee(
    "Each option of `DataLoader` (PyTorch 2.6 to 2.15) is passed on with the model of one process, or raises."
)
def test_what_a_loader_is_asked() -> None:
    _, _, pace = paced(quantum=4)
    for options, words in (
        ({"batch_size": 8}, "global_batch=8"),
        ({"sampler": [1]}, "sampler= is what Paceline replaces"),
        ({}, "3 samples, which is no multiple of quantum=4"),
    ):
        with pytest.raises(PacelineError, match=words):
            pace.loader(Samples(83), **options)
    with pytest.raises(PacelineError, match="drop_last=True leaves nothing"):
        pace.loader(Samples(8), drop_last=True)
    loader = pace.loader(Samples(83), drop_last=True)
    assert len(loader) == 5
    loader.sampler.set_epoch(3)
    assert pace.epoch == 3
    pace.host.detach()


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
@pytest.mark.parametrize("asked", [[0, 0, 0, 1, 1], [2, 2, 0, 1, 0], [0, 1, 1, 0, 0]])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_a_loop_that_is_left_is_given_the_epoch_that_it_asks_for(asked: list[int], rounds: int) -> None:
    """However many rounds of an epoch were done before, it begins with that epoch's first samples."""
    model, optimizer, pace = paced()
    loader = pace.loader(Samples(83), seed=5)
    for epoch in asked:
        loader.set_epoch(epoch)
        for micro_step, (x, y, index) in enumerate(loader):
            if micro_step == 0:
                assert (pace.epoch, index.tolist()) == (epoch, Order(83, 5).epoch(epoch)[:16].tolist())
            if micro_step == rounds:
                break
            pace.backward(LOSS(model(x), y))
            pace.step(optimizer)
    pace.host.detach()


def test_the_short_last_round_is_left_out() -> None:
    model, optimizer, pace = paced()
    used = []
    for x, y, index in pace.loader(Samples(83), seed=5, drop_last=True):
        assert len(x) == 16
        used += index.tolist()
        pace.backward(LOSS(model(x), y))
        pace.step(optimizer)
    pace.host.detach()
    assert len(set(used)) == len(used) == 80


def test_rounds_tell_what_people_log() -> None:
    results: list[RoundResult] = []
    model, optimizer, pace = paced(callbacks=[OnRound(results.append)])
    scheduler, losses = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), []
    for x, y, _ in pace.loader(Samples(83), seed=5):
        loss = LOSS(model(x), y)
        losses.append(loss.item())
        pace.backward(loss)
        pace.step(optimizer)
        scheduler.step()
    pace.host.flush()
    pace.host.detach()
    assert [result.learning_rate for result in results] == [0.1 * 0.5**k for k in range(6)]
    assert [result.batch for result in results] == [16, 16, 16, 16, 16, 3]
    assert [result.loss for result in results] == pytest.approx(losses, rel=1e-12)
    assert all(result.seconds > 0 for result in results)
    assert pace.loss == results[-1].loss


def test_what_a_round_is_handed() -> None:
    model, _, pace = paced(loop="round")

    def over(body: Callable[[Any], None]) -> None:
        for batch in pace.loader(Samples(83)):
            body(batch)

    def twice(batch: Any) -> None:
        for _ in range(2):
            pace.round(batch, lambda x, y, _: LOSS(model(x), y))

    with pytest.raises(PacelineError, match=r"pace\.round\(batch, function\)"):
        over(tuple)
    with pytest.raises(PacelineError, match=r"went on without pace\.round"):
        over(lambda batch: None)
    with pytest.raises(PacelineError, match="twice with one batch"):
        over(twice)
    pace.host.detach()


def test_forms_of_loop_that_do_not_go_together() -> None:
    model = fresh(torch.float64)
    for options, words in (
        ({"loop": "each"}, "expected one of 'whole', 'round', 'pieces'"),
        ({"micro_batch": 5}, "leave room for 5 samples on 1 ranks"),
        ({"policy": "factoring"}, "use loop='round'"),
        ({"policy": "factoring", "deterministic": True}, "use loop='round'"),
        ({"loop": "pieces", "quantum": 4, "micro_batch": 3}, "at least quantum=4"),
    ):
        with pytest.raises(PacelineError, match=words):
            Pace(model, 16, **options)


@pytest.mark.parametrize("call", ["sizes(0)", "sizes(-3)"])
def test_no_rounds_to_draw_for(call: str) -> None:
    _, _, pace = paced()
    with pytest.raises(PacelineError, match=r"rounds=.*: expected a whole number"):
        eval(f"pace.{call}", {"pace": pace})
    pace.host.detach()


def test_two_handles_of_one_model_one_after_the_other() -> None:
    model, optimizer, first = paced()
    for pace in (first, Pace(model, 16, "equal"), first):
        for x, y, _ in pace.loader(Samples(40), seed=5):
            pace.backward(LOSS(model(x), y))
            pace.step(optimizer)
        for size in pace.sizes(1):
            pace.backward(LOSS(model(torch.randn(size, 6, dtype=torch.float64)), torch.zeros(size).long()))
        assert pace.step(optimizer)
    assert first.rounds == 8


def test_a_step_of_ones_own_tells_no_learning_rate_of_another_round() -> None:
    results: list[RoundResult] = []
    model, optimizer, pace = paced(callbacks=[OnRound(results.append)])
    for x, y, _ in pace.loader(Samples(48), seed=5):
        pace.backward(LOSS(model(x), y))
        if pace.rounds == 0:
            pace.step(optimizer)
        else:
            optimizer.step()
            optimizer.zero_grad()
    pace.host.detach()
    assert results[0].learning_rate == 0.1
    assert all(result.learning_rate != result.learning_rate for result in results[1:])


@guarantee(
    "Every round is on record with its own loss and loads, also short rounds, which are reported in batches."
)
def test_the_last_round_of_a_loop_that_draws_its_own_samples_and_steps_itself_is_on_record() -> None:
    results: list[RoundResult] = []
    model, optimizer, pace = paced(callbacks=[OnRound(results.append)])
    for size in pace.sizes(5):
        x = torch.randn(size, 6, dtype=torch.float64)
        pace.backward(LOSS(model(x), torch.zeros(size).long()))
        optimizer.step()
        optimizer.zero_grad()
    pace.host.detach()
    assert [result.step for result in results] == list(range(5))
    assert pace.rounds == 5
