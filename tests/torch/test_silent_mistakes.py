"""Losses that are no numbers, and loops that never step: training would go on, and learn nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.callbacks import StopOnNan
from paceline.torch.feed.pieces import Order
from paceline.torch.open_rounds import Blind, Finite
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.silent_jobs import Heard, left_alone, no_number, other_epochs, own_options, own_schedules
from support.torch_jobs import Samples, fresh, optimizer_of


def train(rounds: int, step: Callable[[Pace, torch.optim.Optimizer], object], **options: Any) -> Pace:
    """So many rounds of 8 samples in this process."""
    model = fresh(torch.float64)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    pace = Pace(model, 8, "equal", **options)
    for x, y, _ in pace.loader(Samples(8 * rounds), seed=5):
        pace.backward(loss_of(model(x), y))
        step(pace, optimizer)
    return pace


@guarantee("A loop that never steps the optimizer raises after the first round.")
@pytest.mark.parametrize("rounds", [1, 5])
def test_a_loop_that_never_steps_is_told_so(rounds: int) -> None:
    with pytest.raises(
        PacelineError, match=r"went on without an optimizer step; expected pace.step\(optimizer\)"
    ):
        train(rounds, lambda pace, optimizer: None)


@guarantee(
    "A loss that is NaN or infinite causes one warning with the round and the rank; with `StopOnNan` it "
    "raises on every rank."
)
def test_what_to_do_about_a_loss_that_is_no_number() -> None:
    told, losses = np.array([1.0, 1.0, 0.0]), np.array([2.5, np.inf, np.nan])
    finite = Finite([])
    with pytest.warns(RuntimeWarning, match=r"the loss of rank 1 was not finite in round 4 \(inf\)"):
        finite.check(4, losses, told)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finite.check(5, losses, told)  # once is enough
        Finite([StopOnNan()]).check(
            5, np.array([2.5, 1.0, np.nan]), told
        )  # who hands in no loss says nothing
    with pytest.raises(PacelineError, match="the loss of rank 1, 2 was not finite in round 6"):
        Finite([StopOnNan()]).check(6, losses, np.ones(3))
    heard: list[tuple[int, list[int]]] = []
    Finite([Heard(heard)]).check(7, losses, told)
    assert heard == [(7, [1])]


@pytest.mark.processes
def test_every_rank_hears_whose_loss_was_no_number_and_rank_0_warns_once() -> None:
    words = "the loss of rank 1 was not finite in round 2"
    for rank, (sentence, heard, warned) in enumerate(run_ranks(3, no_number)):
        assert sentence.startswith(words)
        assert heard == [(2, [1])], "it was finite again in round 3"
        assert [text[: len(words)] for text in warned] == [words] * (rank == 0)


@guarantee(
    "Learning rates or optimizer options that differ between ranks by more than rounding raise on every rank "
    "at the next report."
)
@pytest.mark.processes
def test_learning_rates_that_go_by_a_ranks_own_samples_are_told_on_all_ranks() -> None:
    """Ranks that have run 2, 5 and 5 samples, and those that count the samples of all."""
    words = "the learning rate of rank 1 is 0.0166667 in round 1 and that of rank 0 0.0333333; expected"
    assert [said[: len(words)] for said in run_ranks(3, own_schedules, False)] == [words] * 3
    assert run_ranks(3, own_schedules, True) == [""] * 3


@guarantee(
    "Learning rates or optimizer options that differ between ranks by more than rounding raise on every rank "
    "at the next report."
)
@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "group", "by", "words"),
    [
        ("weight_decay", 0, 1.001, "has other options in round"),
        ("weight_decay", 1, 1e3, "has other options in round"),
        ("eps", 1, 2.0, "has other options in round"),
        ("betas", 0, (0.9, 0.998), "has other options in round"),
        ("lr", 1, 1.01, "has other options in round"),
        ("maximize", 0, True, "has other options in round"),
        ("lr", 0, 1.01, "the learning rate of rank"),
        ("weight_decay", 0, 1 + 1e-12, ""),
    ],
)
def test_an_option_of_the_optimizer_that_differs_between_ranks_raises(
    name: str, group: int, by: Any, words: str
) -> None:
    for said in run_ranks(3, own_options, name, group, by):
        assert bool(said) == bool(words)
        assert words in said


def weighed(loss_of: Any, counts: Any, micro_batch: int | None) -> tuple[list[str], list[torch.Tensor]]:
    """What is warned of, and the parameters, after an epoch in one process in passes of at most so many samples.

    counts: what the loss is a mean over, if that is handed over."""
    model, data = fresh(torch.float64), Samples(96)
    optimizer = optimizer_of(model)

    def one(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> Any:
        loss = loss_of(model(x), y)
        return loss if counts is None else (loss, counts(y))

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with Pace(model, 24, "level", loop="round", micro_batch=micro_batch) as pace:
            for batch in pace.loader(data, seed=5):
                pace.round(batch, one)
                pace.step(optimizer)
    return [str(each.message) for each in heard], [p.detach() for p in model.parameters()]


@guarantee(
    "Losses with class weights, ignored targets or left-out samples are exact with `count=`; without it, "
    "Paceline raises or warns once."
)
def test_a_mean_over_class_weights_or_targets_that_are_not_ignored_is_told_of_once() -> None:
    """It counts as one over samples, unless what it is a mean over is handed over."""
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)
    plain, ignoring = nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=1)
    by_class, smooth = nn.CrossEntropyLoss(weight), nn.CrossEntropyLoss(weight, label_smoothing=0.1)
    for loss_of, counts in [
        (by_class, lambda y: weight[y].sum()),
        (ignoring, lambda y: (y != 1).sum()),
        (lambda out, y: 0.5 * smooth(out, y) / 2, lambda y: weight[y].sum()),
    ]:
        (told,), apart = weighed(loss_of, None, 5)
        assert told.startswith("round 0: the loss is a mean over ")
        assert " and counts as one over 5 samples" in told
        silent, whole = weighed(loss_of, None, None)
        assert silent == []
        assert not all(map(torch.allclose, apart, whole))
        silent, right = weighed(loss_of, counts, 5)
        assert silent == []
        assert all(
            float((ours - theirs).abs().max()) < 1e-12 for ours, theirs in zip(right, whole, strict=True)
        )
    assert weighed(plain, None, 5)[0] == []


@guarantee("Step times that do not follow the loads cause one warning: balancing gains nothing.")
def test_seconds_that_do_not_follow_loads_are_told_of_once() -> None:
    """Ranks that wait for each other unseen, and those whose seconds are equal since they are balanced."""
    rng, speeds = np.random.default_rng(0), np.array([1.0, 1.0, 4.0])

    def told(rounds: Any) -> list[str]:
        blind = Blind()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            for loads, seconds in rounds:
                blind.check(np.array(loads), seconds)
        return [str(each.message) for each in heard]

    def noise() -> np.ndarray:
        return 1 + 0.005 * rng.standard_normal(3)

    uneven = [(28, 20, 12) if number % 2 else (20, 20, 20) for number in range(200)]
    hidden = told((loads, 0.1 * noise()) for loads in uneven)
    assert len(hidden) == 1
    assert hidden[0].startswith(
        "rank 2 was given 20 to 33 % of the samples, and all ranks took the same seconds"
    )
    assert not told((loads, np.array(loads) * speeds * noise()) for loads in uneven)
    assert not told((loads, np.max(np.array(loads) * speeds) * noise()) for loads in uneven), (
        "rounds get shorter"
    )
    assert not told(((28, 28, 7), np.full(3, 28.0) * noise()) for _ in range(200)), "they are balanced"
    assert not told(((20, 20, 20), 0.1 * noise()) for _ in range(200)), "there was nothing to balance"
    slower = [((28, 28, 7), 28.0), ((30, 30, 4), 30.0)]
    assert not told((loads, np.full(3, took) * noise()) for loads, took in slower for _ in range(40))
    # two ranks change places, and the loads follow a round later
    changing = [(30, 20, 10)] * 40 + [(10, 20, 30)] * 40
    behind = [changing[-1], *changing[:-1]]
    assert not told(
        (loads, np.array(loads) / np.array(fast) * noise())
        for loads, fast in list(zip(behind, changing, strict=True)) * 4
    ), "they are balanced"
    few = [(64 - one, *(64,) * 14, 64 + one) for one in range(-20, 21)] * 4
    assert not told((loads, np.full(16, 0.1)) for loads in few), "a slow change of some among many"


def alone(rounds: int, more: int = 0) -> list[torch.Tensor]:
    """The parameters of one process after so many rounds of 12 samples of epoch 0, and so many of epoch 1."""
    model, data, loss_of = fresh(torch.float64), Samples(12 * 40), nn.CrossEntropyLoss()
    optimizer, order = optimizer_of(model), Order(len(data), 5)
    for epoch, many in ((0, rounds), (1, more)):
        for chosen in torch.from_numpy(order.epoch(epoch)).split(12)[:many]:
            loss_of(model(data.x[chosen]), data.y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def same(found: list[Any], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.allclose(ours, theirs.numpy(), rtol=1e-11, atol=1e-13) for ours, theirs in pairs)


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
@pytest.mark.processes
@pytest.mark.parametrize("how", ["break", "exception"])
@pytest.mark.parametrize(("policy", "at"), [("level", 2), ("level", 30), ("equal", 30), ("auto", 39)])
def test_a_complete_round_that_all_ranks_leave_before_its_step_is_dropped(
    how: str, policy: str, at: int
) -> None:
    """At the beginning each round is told of at once, later some time afterwards."""
    for parameters, told, done, words in run_ranks(3, left_alone, [0, 1, 2], how, policy, at):
        assert (words, done, told) == ("", at + 40, list(range(at + 40)))
        assert same(parameters, alone(at, 40))


@guarantee(
    "Ranks that step differently, leave a round alone or are in different epochs raise on every rank, after "
    "at most 64 short rounds."
)
@pytest.mark.processes
@pytest.mark.parametrize(("who", "policy", "at"), [(1, "level", 2), (0, "level", 30), (2, "equal", 39)])
def test_a_complete_round_that_one_rank_leaves_alone_ends_the_run_before_another_step(
    who: int, policy: str, at: int
) -> None:
    found = run_ranks(3, left_alone, [who], "break", policy, at)
    for rank, (parameters, _, done, words) in enumerate(found):
        assert words
        assert done == at + (rank != who)
        assert same(parameters, alone(done))
    assert any(f"round {at} was left on this rank" in words or "another plan" in words for *_, words in found)


@guarantee(
    "Ranks that step differently, leave a round alone or are in different epochs raise on every rank, after "
    "at most 64 short rounds."
)
@pytest.mark.processes
def test_ranks_that_are_not_in_one_epoch_are_named() -> None:
    for words in run_ranks(3, other_epochs):
        assert "rank 1 is in another epoch than the other ranks" in words
