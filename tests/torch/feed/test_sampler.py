"""``pace.batch_sampler``: batches for a DataLoader of the program's own."""

from __future__ import annotations

import time
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.callbacks import Callback
from paceline.torch.feed.pieces import Order
from paceline.torch.liveness.shutdown import end_with_parent
from support.guarantees import guarantee
from support.often import some
from support.ranks import run_cases, run_ranks
from support.scripted import Script
from support.small_net import Samples, difference, fresh, optimizer_of, reference

CASES: dict[str, dict[str, Any]] = {
    "alone": {},
    "room": {"ahead": 3},
    "two workers": {"workers": 2, "ahead": 4},
    "one worker, three each": {"workers": 1, "ahead": 3, "prefetch_factor": 3},
    "persistent workers": {"workers": 1, "ahead": 2, "persistent_workers": True},
    "more room than needed": {"workers": 1, "ahead": 5},
    "hook, two workers": {"workers": 2, "ahead": 4, "weigh": "hook"},
    "own steps": {"own_step": True},
    "own steps, two workers": {"workers": 2, "ahead": 4, "own_step": True},
    "resumed": {"resumed": 4},
    "resumed, two workers": {"workers": 2, "ahead": 4, "resumed": 4},
    "resumed between epochs, two workers": {"workers": 2, "ahead": 4, "resumed": 6},
}
CASES = some(CASES, "hook, two workers", "own steps, two workers", "resumed, two workers")
LOSS = torch.nn.CrossEntropyLoss()

TWO = Script(((5, 2), (1, 6), (3, 3), (1, 9), (7, 0), (0, 1)))
COUNT, BATCH, STEPS = 83, 16, 14  # 6 rounds an epoch, the last one short; more than two epochs


class Epochs(Callback):
    """Notes the rounds and the ends of epochs."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_round(self, result: Any) -> None:
        self.told.append(result.step)

    def on_epoch(self, epoch: int) -> None:
        self.told.append(f"epoch {epoch}")


def loader_of(sampler: Any, data: Any, workers: int, **options: Any) -> DataLoader[Any]:
    start = {"worker_init_fn": end_with_parent, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(data, batch_sampler=sampler, num_workers=workers, **start, **options)


def compared(
    rank: int,
    ranks: int,
    workers: int = 0,
    ahead: int = 0,
    weigh: str = "loss",
    own_step: bool = False,
    policy: Any = TWO,
    resumed: int = 0,
    **loading: Any,
) -> dict[str, Any]:
    """The largest difference of a parameter from one process, the samples that this rank used in each round, the
    epochs that ``pace.epoch`` gave after each loop, and what the callbacks were told.

    own_step: the program steps its optimizer. resumed: a round after which a new Pace continues from the state."""
    model, data, told = fresh(torch.float64), Samples(COUNT), Epochs()
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    used: list[list[int]] = [[] for _ in range(STEPS)]
    epochs, saved, limits = list[Any](), list[int](), [(0, None)] * 2

    def made() -> tuple[Pace, Any]:
        pace = Pace(ddp, BATCH, policy, limits=limits, weigh=weigh, callbacks=[told])
        sampler = pace.batch_sampler(data, seed=5, ahead=ahead)
        return pace, loader_of(sampler, data, workers, **loading)

    pace, loader = made()
    while pace.rounds < STEPS:
        lasts = len(loader)
        for number, (x, y, index) in enumerate(loader, 1):
            if pace.counts:
                used[pace.rounds] += index.tolist()
            loss = loss_of(ddp(x), y)
            loss.backward() if weigh == "hook" else pace.backward(loss)
            if own_step:
                optimizer.step()
                optimizer.zero_grad()
            else:
                assert pace.step(optimizer)
                if pace.rounds in (STEPS, resumed):
                    break
            if own_step and number == lasts and pace.epoch == 2:
                break
        else:
            assert number == lasts
        epochs.append(pace.epoch)
        saved.append(pace.state_dict()["samples_done"] if not own_step or number == lasts else -1)
        if pace.rounds == resumed:
            state, resumed = pace.state_dict(), 0
            pace.host.detach()
            pace, loader = made()
            pace.load_state_dict(state)
        if own_step and pace.epoch > 1:
            break
    rounds = pace.rounds
    pace.host.detach()
    return {
        "difference": difference(model.parameters(), reference(COUNT, BATCH, rounds, torch.float64)),
        "used": used[:rounds],
        "epochs": epochs,
        "saved": saved,
        "told": told.told,
    }


@pytest.mark.processes
@guarantee(
    "`pace.batch_sampler` with your own DataLoader trains the model of one process within 1e-12, "
    "also with workers and after a resume."
)
def test_own_data_loaders_train_the_model_of_one_process() -> None:
    found = run_cases(2, compared, CASES)
    for name, ours in found.items():
        rounds = 12 if CASES[name].get("own_step") else STEPS
        assert len(ours[0]["used"]) == rounds, name
        for rank in ours:
            assert rank["difference"] < 1e-12, f"{name}: relative difference {rank['difference']:.1e}"
            assert rank["epochs"] == ours[0]["epochs"], name
            told = rank["told"]
            assert [each for each in told if isinstance(each, str)] == ["epoch 0", "epoch 1"], name
            assert told.index("epoch 0") > told.index(5), name
            assert told.index("epoch 0") < told.index(6), name
        for epoch in range(2):
            used = sorted(chain(*(each for rank in ours for each in rank["used"][6 * epoch :][:6])))
            assert used == list(range(COUNT)), name
        first = Order(COUNT, 5).epoch(0)
        for number_of_round in range(6):
            both = [*chain(*(rank["used"][number_of_round] for rank in ours))]
            assert both == first[number_of_round * BATCH :][:BATCH].tolist(), name
    by_name = {name: first for name, (first, _) in found.items()}
    assert by_name["alone"]["epochs"] == by_name["two workers"]["epochs"] == [1, 2, 2]
    assert by_name["alone"]["saved"] == by_name["two workers"]["saved"] == [0, 0, 2 * BATCH]
    assert by_name["resumed between epochs, two workers"]["saved"][0] == 0


def loads_after_slowing(rank: int, ranks: int, workers: int) -> list[list[int]]:
    """Under level, the loads of each round in which rank 1 takes three times as long for each sample."""
    ddp = DistributedDataParallel(fresh(torch.float32))
    optimizer, told, data = optimizer_of(ddp), list[list[int]](), Samples(16 * 40, torch.float32)

    class Loads(Callback):
        def on_round(self, result: Any) -> None:
            told.append(result.loads.tolist())

    with Pace(ddp, 16, "level", callbacks=[Loads()]) as pace:
        sampler = pace.batch_sampler(data, ahead=2 * workers)
        for x, y, _ in loader_of(sampler, data, workers):
            time.sleep((0.012 if rank else 0.004) * len(x))
            pace.backward(nn.functional.cross_entropy(ddp(x), y))
            pace.step(optimizer)
    return told


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 1])
def test_slow_rank_receives_less(workers: int) -> None:
    loads, _ = run_ranks(2, loads_after_slowing, workers)
    fast, slow = np.mean(loads[10:], axis=0)
    assert slow < 0.6 * fast


def trained(pace: Pace, loader: Any, model: Any, optimizer: Any) -> list[list[int]]:
    used = []
    for x, y, index in loader:
        used.append(index.tolist())
        pace.backward(LOSS(model(x), y))
        pace.step(optimizer)
    return used


def test_left_loop_continues_with_the_next_epoch() -> None:
    model, data = fresh(torch.float64), Samples(20)
    optimizer = optimizer_of(model)
    with Pace(model, 8) as pace:
        sampler = pace.batch_sampler(data, seed=5)
        loader = DataLoader(data, batch_sampler=sampler)
        assert len(loader) == 3
        for x, y, _ in loader:
            pace.backward(LOSS(model(x), y))
            pace.step(optimizer)
            break
        assert (pace.epoch, pace.rounds) == (0, 1)
        used = trained(pace, loader, model, optimizer)
        assert [*chain(*used)] == Order(20, 5).epoch(1).tolist()
        assert (pace.epoch, pace.rounds) == (2, 4)
        sampler.set_epoch(7)
        assert [*chain(*trained(pace, loader, model, optimizer))] == Order(20, 5).epoch(7).tolist()
        # A round that was begun and left counts for nothing.
        next(iter(loader))
        assert [*chain(*trained(pace, loader, model, optimizer))] == Order(20, 5).epoch(8).tolist()


def test_pace_loader_and_own_loader_take_turns() -> None:
    model, data = fresh(torch.float64), Samples(20)
    optimizer = optimizer_of(model)
    with Pace(model, 8) as pace:
        own = DataLoader(data, batch_sampler=pace.batch_sampler(data, seed=5))
        ours = pace.loader(data, seed=5)
        for number, loader in enumerate((own, ours, own, own, ours)):
            assert [*chain(*trained(pace, loader, model, optimizer))] == Order(20, 5).epoch(number).tolist()


def test_sampler_without_shuffle_draws_whole_rounds_in_order() -> None:
    model, data = fresh(torch.float64), Samples(20)
    with Pace(model, 8) as pace:
        sampler = pace.batch_sampler(data, shuffle=False, drop_last=True)
        assert len(sampler) == 2
        loader = DataLoader(data, batch_sampler=sampler)
        assert trained(pace, loader, model, optimizer_of(model)) == [[*range(8)], [*range(8, 16)]]


@guarantee(
    "A DataLoader that draws further ahead than `pace.batch_sampler(ahead=)` says, or out of order, raises with what "
    "to give."
)
def test_data_loader_that_draws_further_ahead_raises() -> None:
    data = Samples(64)
    with Pace(fresh(torch.float64), 8) as pace:
        for options, words in (
            ({"num_workers": 1, "prefetch_factor": 3}, r"draws 3 batches ahead .* expected ahead=3"),
            ({"num_workers": 1, "in_order": False}, "in_order=False gives batches in another order"),
        ):
            loader = DataLoader(data, batch_sampler=pace.batch_sampler(data), **options)  # type: ignore[arg-type]
            with pytest.raises(PacelineError, match=words):
                next(iter(loader))


def test_loop_without_backward_or_step_raises() -> None:
    data, model = Samples(64), fresh(torch.float64)
    with Pace(model, 8) as pace:
        batches = iter(DataLoader(data, batch_sampler=pace.batch_sampler(data)))
        next(batches)
        with pytest.raises(PacelineError, match=r"the loop went on without pace\.backward\(loss\)"):
            next(batches)
        batches = iter(DataLoader(data, batch_sampler=pace.batch_sampler(data)))
        x, y, _ = next(batches)
        pace.backward(LOSS(model(x), y))
        with pytest.raises(PacelineError, match="the loop went on without an optimizer step"):
            next(batches)


@pytest.mark.parametrize(
    ("made", "given", "words"),
    [
        ({"loop": "round"}, {}, r"batch_sampler\(\) with loop='round'"),
        ({"loop": "pieces"}, {}, "or pace.loader"),
        ({}, {"ahead": -1}, "ahead=-1: expected a whole number, 0 to"),
        ({}, {"seed": "x"}, "seed='x': expected a whole number"),
        ({}, {"shuffle": "no"}, "shuffle='no': expected True or False"),
        ({"quantum": 8}, {}, "which is no multiple of quantum=8"),
    ],
)
def test_unsupported_sampler_option_raises(made: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with Pace(fresh(torch.float64), 16, **made) as pace, pytest.raises(PacelineError, match=words):
        pace.batch_sampler(Samples(20), **given)


def test_stream_or_changed_data_set_raises() -> None:
    data = Samples(20)
    with Pace(fresh(torch.float64), 8) as pace:
        with pytest.raises(PacelineError, match="indexed items"):
            pace.batch_sampler(iter(data))
        loader = DataLoader(data, batch_sampler=pace.batch_sampler(data))
        data.x, data.y = data.x[:10], data.y[:10]
        with pytest.raises(PacelineError, match=r"has 10 samples, and had 20 when pace\.batch_sampler\(\)"):
            next(iter(loader))


class Gaps(Samples):
    """Every fifth sample cannot be read, so that each batch of 16 lacks 3 or 4."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index) if index % 5 else None


def readable(items: list[Any]) -> Any:
    return torch.utils.data.default_collate([one for one in items if one is not None])


@guarantee(
    "Losses with class weights, ignored targets or left-out samples are exact with `count=`; without it, "
    "Paceline raises or warns once."
)
@pytest.mark.parametrize("workers", [0, 1])
def test_collate_function_of_an_own_loader_that_leaves_out_samples_raises(workers: int) -> None:
    data, model = Gaps(64), fresh(torch.float64)
    with Pace(model, 16) as pace:
        sampler = pace.batch_sampler(data, shuffle=False, ahead=2 * workers)
        loader = loader_of(sampler, data, workers, collate_fn=readable)
        for x, y, _ in loader:
            with pytest.raises(
                PacelineError, match=r"the batch has 1\d rows; expected the 16 planned samples"
            ):
                pace.backward(LOSS(model(x), y))
            pace.backward(LOSS(model(x), y), count=len(x))
            pace.step(optimizer_of(model))
