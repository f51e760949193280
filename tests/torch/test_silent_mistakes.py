"""Losses that are no numbers, and loops that never step: training would go on, and learn nothing."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace, meter
from paceline.torch.callbacks import Callback, OnRound, StopOnNan
from paceline.torch.decisions import Finite, LoadResponseCheck
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.ranks import errors_of, run_ranks
from support.scripted import Script
from support.small_net import Samples, fresh, optimizer_of, replayed


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
def test_loop_without_a_step_raises(rounds: int) -> None:
    with pytest.raises(
        PacelineError, match=r"went on without an optimizer step; expected pace.step\(optimizer\)"
    ):
        train(rounds, lambda pace, optimizer: None)


class Heard(Callback):
    def __init__(self, heard: list[tuple[int, list[int]]]) -> None:
        self.heard = heard

    def on_nan(self, step: int, ranks: list[int]) -> None:
        self.heard.append((step, ranks))


@guarantee(
    "A loss that is NaN or infinite causes one warning with the round and the rank; with `StopOnNan` it "
    "raises on every rank."
)
def test_loss_that_is_not_finite_warns_or_raises() -> None:
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


def not_finite_in_round_2(rank: int, callbacks: list[Callback]) -> None:
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    pace = Pace(ddp, 12, "equal", callbacks=callbacks)
    try:
        for x, y, _ in pace.loader(Samples(12 * 4), seed=5):
            loss = loss_of(ddp(x), y)
            odd = float("nan") if rank == 1 and pace.rounds == 2 else 0.0
            pace.backward(loss + odd)  # whose gradient is a number all the same
            pace.step(optimizer)
    finally:
        pace.host.detach()


def no_number(rank: int, ranks: int) -> list[str]:
    """The loss of rank 1 is NaN in round 2, and finite again in round 3: what is warned of by default."""
    with pytest.raises(PacelineError, match=r"^the loss of rank 1 was not finite in round 2"):
        not_finite_in_round_2(rank, [StopOnNan()])
    heard: list[tuple[int, list[int]]] = []
    not_finite_in_round_2(rank, [Heard(heard)])
    assert heard == [(2, [1])]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        not_finite_in_round_2(rank, [])
    return [str(w.message) for w in caught if "not finite" in str(w.message)]


@pytest.mark.processes
def test_loss_that_is_not_finite_is_named_on_every_rank() -> None:
    (warned,), *others = run_ranks(3, no_number)
    assert warned.startswith("the loss of rank 1 was not finite in round 2")
    assert others == [[], []]


def own_schedules(rank: int, ranks: int, alike: bool) -> None:
    """A learning rate that falls with the samples, of this rank alone or (``alike``) of all ranks."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of, seen = torch.optim.SGD(ddp.parameters(), lr=0.1), nn.CrossEntropyLoss(), 0
    pace = Pace(ddp, 12, "equal", limits=[(None, 2)] + [(None, None)] * (ranks - 1))
    for x, y, _ in pace.loader(Samples(12 * 8), seed=5):
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)
        seen += 12 if alike else len(x)
        # unlike processors may round otherwise
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + seen) * (1 + 1e-12 * rank)


@guarantee(
    "Learning rates or optimizer options that differ between ranks by more than rounding raise on every rank "
    "at the next report."
)
@pytest.mark.processes
def test_learning_rates_by_own_samples_raise_on_all_ranks() -> None:
    """Ranks that have run 2, 5 and 5 samples, and those that count the samples of all."""
    words = "the learning rate of rank 1 is 0.0166667 in round 1 and that of rank 0 0.0333333; expected"
    assert [said[: len(words)] for said in errors_of(3, own_schedules, False)] == [words] * 3
    assert errors_of(3, own_schedules, True) == [""] * 3


def own_options(rank: int, ranks: int, name: str, group: int, by: Any) -> None:
    """Rank 1 changes one option of its optimizer from round 2 on."""
    net = fresh(torch.float64)
    ddp = DistributedDataParallel(net)
    groups = [{"params": net.first.parameters()}, {"params": net.second.parameters(), "lr": 1e-3}]
    optimizer, loss_of = torch.optim.AdamW(groups, weight_decay=1e-6), nn.CrossEntropyLoss()
    pace = Pace(ddp, 12, "equal")
    for x, y, _ in pace.loader(Samples(12 * 8), seed=5):
        options = optimizer.param_groups[group]
        if rank == 1 and pace.rounds == 2 and name:
            options[name] = by if not isinstance(by, float) else options[name] * by
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)


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
def test_optimizer_option_that_differs_between_ranks_raises(
    name: str, group: int, by: Any, words: str
) -> None:
    for said in errors_of(3, own_options, name, group, by):
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
def test_mean_over_weights_without_count_warns_once() -> None:
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
def test_seconds_that_do_not_follow_loads_warn_once() -> None:
    """Ranks that wait for each other unseen, and those whose seconds are equal since they are balanced."""
    rng, speeds = np.random.default_rng(0), np.array([1.0, 1.0, 4.0])

    def told(rounds: Any) -> list[str]:
        blind = LoadResponseCheck()
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
    first, second = (torch.from_numpy(Order(12 * 40, 5).epoch(epoch)).split(12) for epoch in (0, 1))
    return replayed([*first[:rounds], *second[:more]], Samples(12 * 40))


def same(found: list[Any], expected: list[torch.Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(np.allclose(ours, theirs.numpy(), rtol=1e-11, atol=1e-13) for ours, theirs in pairs)


class Left(Exception):
    """What a loop is left by."""


Told = tuple[list[Any], list[int], int, str]


def left_alone(rank: int, ranks: int, who: list[int], how: str, policy: str, at: int) -> Told:
    """The ranks ``who`` leave the loop in round ``at`` by a break or an exception, when it is complete but not
    stepped; all go on with another loop. The parameters then, the rounds that were told of, the rounds done, and the
    words of an error."""
    meter.LATE_SECONDS = 1.0
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of, told, words = optimizer_of(ddp), nn.CrossEntropyLoss(), list[int](), ""
    pace = Pace(ddp, 12, policy, callbacks=[OnRound(lambda result: told.append(result.step))])
    loader = pace.loader(Samples(12 * 40), seed=5)

    try:
        with pace:
            for epoch in range(2):
                with suppress(Left):
                    for x, y, _ in loader:
                        pace.backward(loss_of(ddp(x), y))
                        if epoch == 0 and pace.rounds == at and rank in who:
                            if how == "exception":
                                raise Left
                            break
                        pace.step(optimizer)
    except PacelineError as error:
        words = str(error)
    return [p.detach().numpy().copy() for p in ddp.parameters()], told, pace.rounds, words


@guarantee(
    "After a loop is left, the next `for` begins a fresh round with the same samples and without the old "
    "gradients."
)
@pytest.mark.processes
@pytest.mark.parametrize("how", ["break", "exception"])
@pytest.mark.parametrize(("policy", "at"), [("level", 2), ("level", 30), ("equal", 30), ("auto", 39)])
def test_round_that_all_ranks_leave_is_dropped(how: str, policy: str, at: int) -> None:
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
def test_round_that_one_rank_leaves_raises_before_a_step(who: int, policy: str, at: int) -> None:
    found = run_ranks(3, left_alone, [who], "break", policy, at)
    for rank, (parameters, _, done, words) in enumerate(found):
        assert words
        assert done == at + (rank != who)
        assert same(parameters, alone(done))
    assert any(f"round {at} was left on this rank" in words or "another plan" in words for *_, words in found)


def other_epochs(rank: int, ranks: int) -> None:
    """Rank 1 alone asks for another epoch."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    with Pace(ddp, 12, "equal") as pace:
        loader = pace.loader(Samples(12 * 40), seed=5)
        loader.set_epoch(rank % 2)
        for x, y, _ in loader:
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)


@guarantee(
    "Ranks that step differently, leave a round alone or are in different epochs raise on every rank, after "
    "at most 64 short rounds."
)
@pytest.mark.processes
def test_ranks_in_different_epochs_raise() -> None:
    for words in errors_of(3, other_epochs):
        assert "rank 1 is in another epoch than the other ranks" in words


def with_norms(rank: int, ranks: int) -> list[str]:
    """The error messages, or the number of rounds, of handles and loaders for a model with SyncBatchNorm; and the
    warning of an embedding that rescales its rows."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    ddp.module.norm = nn.SyncBatchNorm(3, affine=False)  # a layer that a CPU has, but cannot run

    def said(samples: int, drop_last: bool, own: bool, **options: Any) -> str:
        try:
            pace = Pace(ddp, 16, **options)
        except PacelineError as error:
            return str(error)
        try:
            loader = pace.batch_sampler if own else pace.loader
            return str(len(loader(Samples(samples), drop_last=drop_last)))  # type: ignore[operator]
        except PacelineError as error:
            return str(error)
        finally:
            pace.host.detach()

    def idle() -> str:
        pace = Pace(ddp, 16, Script(((1, 0),)))
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                next(iter(pace.sizes(1)))
            return str(heard[0].message)
        finally:
            pace.host.detach()

    def rescaled() -> str:
        embedding = nn.Sequential(nn.Embedding(4, 3, max_norm=0.5))
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            Pace(DistributedDataParallel(embedding), 16).host.detach()
        return " ".join(f"{each.filename}: {each.message}" for each in heard)

    return [
        said(83, False, False),
        said(83, False, True),
        said(83, True, False),
        said(84, False, False),
        said(80, False, True),
        said(81, False, False),  # a single sample joins the round before
        said(80, False, False, limits=[(2, None), (0, None)]),
        said(80, False, False, limits=[(2, None), (2, None)]),
        said(80, False, False, loop="round", micro_batch=4),
        idle(),
        rescaled(),
    ]


@guarantee(
    "SyncBatchNorm with limits, a short last round or passes that would leave a rank without work raises; an own "
    "policy that does so causes a warning."
)
@guarantee("An embedding with `max_norm`, which each rank rescales by itself, causes one warning.")
@pytest.mark.processes
def test_synced_batch_norm_that_would_count_filler_samples_raises_and_embedding_with_max_norm_warns() -> None:
    for short, own, dropped, enough, none, single, limits, allowed, passes, idle, rescaled in run_ranks(
        2, with_norms
    ):
        assert short.startswith("the last round of an epoch has 3 samples, too few for all ranks")
        assert own == short
        assert "drop_last=True" in short
        assert (dropped, enough, none, single, allowed) == ("5", "6", "5", "5", "5")
        assert limits == (
            "the model has SyncBatchNorm: it would count the filler samples of a rank without work; set "
            "limits=[(2, None)] * 2"
        )
        assert "micro_batch=4 lets ranks take different numbers of passes" in passes
        assert "runs filler samples, which SyncBatchNorm counts" in idle
        assert rescaled.startswith(
            f"{__file__}: Embedding(max_norm=0.5) rescales the rows that a rank reads on "
        )
