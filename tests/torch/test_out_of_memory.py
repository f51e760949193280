"""A pass that runs out of memory is halved and run again, or ends every rank with what to do."""

from __future__ import annotations

import math
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.samples import CostModel
from paceline.torch import Pace, memory_limits
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from paceline.torch.gradients.counts import Counts
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.round import RoundState
from support.gauge import Fake
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.small_net import CLASSES, FEATURES, Samples, difference


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
            True,
        ),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_memory_errors_are_recognized(error: BaseException, is_memory: bool) -> None:
    assert memory_limits.ran_out(error) is is_memory


def parts(
    monkeypatch: pytest.MonkeyPatch, rounds: list[int], fits: int, min_samples: int, sums: bool = False
) -> list[list[int]]:
    """The sizes of the passes that succeed in rounds of so many samples, where one of more than ``fits`` does not.

    The stand-in says that half as many more fit, so that passes fail."""
    gauge = Fake(100.0, 10.0, 100.0 + 15.0 * fits)
    monkeypatch.setattr(memory_limits, "gauges", lambda device: [gauge])
    passes: Any = SimpleNamespace(
        device=torch.device("cpu"),
        gradients=SimpleNamespace(sums=sums),
        cuts=lambda batch: True,
        part=lambda *_, **__: None,
        take_back=lambda: None,
        droppable=True,
    )
    round = RoundState()
    terms: Any = SimpleNamespace(quantum=1, min_samples=min_samples, fixed_micro_steps=None)
    limit = memory_limits.MemoryLimit(round, passes, terms, lambda batch, first, last: last - first)

    def one(size: int) -> int:
        gauge.run(size if size <= fits else math.inf)
        return size

    sizes = []
    for samples in rounds:
        round.drawn(Piece(RoundPlan(0, np.array([samples]), samples), samples, True, True))
        sizes.append(list(limit.run(samples, one)))
    return sizes


@guarantee(
    "Passes that are cut for lack of memory suffice for batch norm and are no larger than one that succeeded."
)
@given(st.lists(st.integers(2, 60), min_size=1, max_size=8), st.integers(3, 30))
def test_every_part_of_a_batch_suffices_for_batch_norm(rounds: list[int], fits: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        sizes = parts(monkeypatch, rounds, fits, 2)
    assert [sum(each) for each in sizes] == rounds
    assert min(map(min, sizes)) >= 2
    assert max(map(max, sizes)) <= fits


@guarantee(
    "Passes that are cut for lack of memory suffice for batch norm and are no larger than one that succeeded."
)
def test_three_samples_are_not_cut_for_batch_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two parts would leave one sample by itself, and a third try would not fit either."""
    with pytest.raises(PacelineError, match="ran out of memory in round 0 with 3 samples at once"):
        parts(monkeypatch, [3], 2, 2)


def test_last_pass_as_large_as_one_that_succeeded_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parts(monkeypatch, [4, 4, 6, 9], 30, 1, sums=True) == [[1, 2, 1], [2, 2], [4, 2], [8, 1]]


def test_failed_amount_limits_the_next_passes_to_seven_eighths_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 1, 2, 4 and 8 samples; 16 do not fit, so the rest runs in halves of it, and later rounds in 14."""
    monkeypatch.setattr(memory_limits, "LOOK_SECONDS", 0.0)
    tried: list[float] = []
    monkeypatch.setattr(memory_limits.MemoryLimit, "_drop", noting(memory_limits.MemoryLimit._drop, tried))
    sizes = parts(monkeypatch, [55] + [28] * 29, 15, 1)
    assert sizes[0] == [1, 2, 4, 8, 8, 8, 8, 8, 8]
    assert sizes[1:] == [[14, 14]] * 29
    assert tried == [16.0]
    tried.clear()
    parts(monkeypatch, [55] + [28] * 31, 15, 1)  # after 64 passes more is tried again
    assert len(tried) == 2


def noting(drop: Any, tried: list[float]) -> Any:
    """The method ``drop``, which also notes the amounts that were tried; half of each is proven by it, no more."""

    def noted(limit: Any, amount: float) -> None:
        tried.append(amount)
        before = limit._proven
        drop(limit, amount)
        assert limit._proven == min(before, amount / 2)

    return noted


LENGTHS = st.lists(st.integers(1, 12), min_size=2, max_size=30)


@guarantee(
    "Passes that are cut for lack of memory suffice for batch norm and are no larger than one that succeeded."
)
@given(st.lists(LENGTHS, min_size=1, max_size=6), st.booleans(), st.integers(12, 60))
def test_last_pass_takes_no_more_than_one_that_went_through(
    rounds: list[list[int]], padded: bool, fits: int
) -> None:
    """Passes hold memory in proportion to their lengths, and the last pass of a batch also sums the gradients."""
    gauge = Fake(100.0, 1.0, 100.0 + 1.5 * fits)
    ran: list[tuple[float, bool]] = []  # amounts of the passes that went through, and whether they were last
    last = True
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(memory_limits, "gauges", lambda device: [gauge])
        passes: Any = SimpleNamespace(
            device=torch.device("cpu"), gradients=SimpleNamespace(sums=True), cuts=lambda batch: True,
            take_back=lambda: None, droppable=True,
        )  # fmt: skip

        def part(samples: int, first: bool, more: bool) -> None:
            nonlocal last
            last = not more

        passes.part = part
        round = RoundState()
        terms: Any = SimpleNamespace(quantum=1, min_samples=1, fixed_micro_steps=None)
        limit = memory_limits.MemoryLimit(round, passes, terms, lambda batch, first, end: batch[first:end])

        def one(batch: list[int]) -> list[int]:
            amount = float(len(batch) * max(batch) if padded else sum(batch))
            gauge.run(amount if amount <= fits else math.inf)
            ran.append((amount, last))
            return batch

        for lengths in rounds:
            last, model = True, CostModel(1.0, padded=padded)
            deal: Any = SimpleNamespace(lengths=np.array(lengths, float), model=model)
            plan = RoundPlan(0, np.array([len(lengths)]), len(lengths), None, deal)
            total = float(len(lengths) * max(lengths) if padded else sum(lengths))
            round.drawn(Piece(plan, len(lengths), True, True, parts=np.array([total, 0.0, 1.0]), start=0))
            done = list(limit.run(lengths, one))
            assert sorted(chain(*done)) == sorted(lengths), "each sample runs once"
    most = 0.0
    for amount, summed in ran:
        assert not summed or amount <= most
        most = max(most, amount)


TWO: dict[str, Any] = {"fits": [9, 4], "where": "backward"}


def made(norm: bool) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(FEATURES, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def running_out(
    rank: int,
    ranks: int,
    fits: list[int],
    where: str,
    counts: bool = False,
    norm: bool = False,
    policy: str = "level",
    **options: Any,
) -> dict[str, Any]:
    """Train with passes that run out of a stand-in's memory, in the forward pass or half-way through the backward
    pass, or in that of the second of two losses. fits: samples that it has room for on each rank."""
    room = fits[rank]
    gauge = Fake(100.0, 10.0, 100.0 + 10.0 * room * 1.2)  # what is known says a little more than what fits
    memory_limits.gauges = lambda device: [gauge]  # type: ignore[assignment]
    inner, size, outs = made(norm), 0, 0

    def check(*_: Any) -> None:
        nonlocal outs
        outs += size > room
        gauge.run(size if size <= room else math.inf)

    def forward(module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
        if where == "forward":
            check()
        elif out.requires_grad:
            out.register_hook(check)  # when the last layer has its gradient, and the first has none

    inner[-4].register_forward_hook(forward)  # type: ignore[arg-type]
    model = DistributedDataParallel(inner) if ranks > 1 else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    told: list[Any] = []
    pace = Pace(model, 48, policy, limits="memory", loop="round", callbacks=[OnRound(told.append)], **options)
    loader = pace.loader(Samples(96), seed=1)
    counted: list[float] = []
    factor = Counts.factor

    def corrected(own: Counts, *given: int) -> Any:
        counted.append(own._own)  # which only a device sums
        return factor(own, *given)

    Counts.factor = corrected  # type: ignore[method-assign]

    def loss_at(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> Any:
        nonlocal size
        if where == "second":
            size = 0
            half = nn.functional.cross_entropy(model(x), y, reduction="sum") / len(x) / 2
            pace.weighted(half).backward()
        size = len(x)
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        weights = float((y + 1).sum())  # something other than samples
        return (loss / weights, weights) if counts else loss / size / (2 if where == "second" else 1)

    for _ in range(3):
        for batch in loader:
            pace.round(batch, loss_at)
            pace.step(optimizer)
    pace.host.flush()
    found = {
        "parameters": [p.tolist() for p in model.parameters()],
        "outs": outs,
        "losses": [result.loss for result in told],
        "counted": counted,
        "ran_out": [result.ran_out.tolist() for result in told if result.ran_out is not None],
    }
    pace.close()
    return found


def one_process(counts: bool) -> tuple[list[Any], list[float], list[float]]:
    """The same model in one process, and the losses and the counts of its rounds."""
    model = made(False)
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), Samples(96)
    losses, counted = list[float](), list[float]()
    for epoch in range(3):
        order = Order(96, 1).epoch(epoch)
        for at in (0, 48):
            x, y = data.x[order[at : at + 48]], data.y[order[at : at + 48]]
            many = float((y + 1).sum()) if counts else 48
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / many
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            counted.append(many)
    return [p.detach() for p in model.parameters()], losses, counted


@pytest.mark.processes
@guarantee("A pass that runs out of memory is halved and run again, with the model of one process.")
@pytest.mark.parametrize(
    "options",
    [
        TWO,
        TWO | {"where": "forward"},
        TWO | {"where": "second"},
        TWO | {"counts": True},
        TWO | {"policy": "factoring:portion=0.3", "counts": True},
        TWO | {"micro_batch": 12, "where": "forward"},
    ],
    ids=["backward", "forward", "second of two losses", "counts", "moving", "with a micro-batch"],
)
def test_pass_that_runs_out_of_memory_is_halved(options: dict[str, Any]) -> None:
    found = run_ranks(2, partial(running_out, **options))
    parameters, losses, counted = one_process(options.get("counts", False))
    for rank in found:
        assert difference(rank["parameters"], parameters) < 1e-12
        assert rank["losses"] == pytest.approx(losses, rel=1e-12)
    if options.get("counts"):
        assert np.sum([rank["counted"] for rank in found], axis=0).tolist() == counted
    assert sum(rank["outs"] for rank in found) > 0
    assert any(found[0]["ran_out"])
    assert found[0]["ran_out"] == found[1]["ran_out"]


@pytest.mark.processes
def test_last_pass_of_a_single_rank_may_run_out() -> None:
    (found,) = run_ranks(1, partial(running_out, fits=[9], where="backward"))
    assert found["outs"] > 0
    assert difference(found["parameters"], one_process(False)[0]) < 1e-12


@pytest.mark.processes
@guarantee("A pass that runs out of memory is halved and run again, with the model of one process.")
def test_failed_forward_pass_sends_buffers_once() -> None:
    one, other = run_ranks(2, partial(running_out, fits=[9, 4], where="forward", norm=True))
    assert one["outs"] + other["outs"] > 0
    assert one["parameters"] == other["parameters"]


def out_behind_its_forward_pass(rank: int, ranks: int) -> str:
    """The sentence with which this rank ends if rank 1 has no memory left for the loss of a round's last pass."""
    model = DistributedDataParallel(nn.Linear(FEATURES, CLASSES).double())
    pace = Pace(model, 8, "equal", limits="memory", loop="round")  # never a load of one sample

    def loss_at(x: torch.Tensor, y: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return fail(rank if pace.rounds == 1 and pace.host.last else 0, out, y)

    try:
        with pace:
            for batch in pace.loader(Samples(32)):
                pace.round(batch, loss_at)
                pace.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except (RuntimeError, PacelineError) as error:
        return str(error)
    return ""


def fail(rank: int, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if rank == 1:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    return nn.functional.cross_entropy(out, y)


@pytest.mark.processes
@guarantee(
    "A rank without memory for its samples ends every rank with an error: which rank, how many samples and "
    "bytes, what to do."
)
def test_last_pass_that_runs_out_after_its_forward_pass_raises() -> None:
    """DDP would sum the gradients of its first part over the ranks, and the others would wait for the rest."""
    other, own = run_ranks(2, out_behind_its_forward_pass)
    assert "rank 1 ran out of memory in round 1" in own
    assert "other ranks wait for its gradients" in own
    assert "rank 1 ran out of memory in round 1" in other


def too_small(rank: int, ranks: int, loop: str) -> str:
    """The sentence of a rank whose part does not fit, or of one that waits for it."""
    model = DistributedDataParallel(nn.Linear(FEATURES, CLASSES).double())
    pace = Pace(model, 8, "level", limits="memory", loop=loop)
    try:
        with pace:
            for batch in pace.loader(Samples(16)):
                if loop == "round":
                    pace.round(batch, lambda x, y, _: fail(rank, model(x), y))
                else:
                    pace.backward(fail(rank, model(batch[0]), batch[1]))
                pace.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except (RuntimeError, PacelineError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


@pytest.mark.processes
@guarantee(
    "A rank without memory for its samples ends every rank with an error: "
    "which rank, how many samples and bytes, what to do."
)
@pytest.mark.parametrize("loop", ["round", "whole"])
def test_too_little_memory_raises_on_every_rank(loop: str) -> None:
    other, own = run_ranks(2, too_small, loop)
    many = "1 sample at once" if loop == "round" else "4 samples at once"
    for said in (own, other):
        assert f"rank 1 ran out of memory in round 0 with {many}" in said
        assert ("take a smaller model" if loop == "round" else "a smaller global_batch") in said
    assert "rank 0 cannot continue without it" in other
