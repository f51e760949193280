"""Ranks that step by themselves between merges: late, slow, stuck or unlike ranks, and loops that are left."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import LocalSGD, Merge
from paceline.torch.callbacks import OnRound
from support.events import Events, until
from support.guarantees import guarantee
from support.ranks import WAITS, errors_of, run_cases, run_ranks
from support.scripted import Script
from support.small_net import UNEVEN, Samples, fresh

pytestmark = pytest.mark.processes

COUNT, BATCH = 83, 12


SPOILT: dict[str, Callable[[torch.Tensor], object]] = {
    "changed": lambda p: p.add_(0.1),
    "negated": lambda p: p.neg_(),
    "rows": lambda p: p.copy_(p.flip(0)),
    "columns": lambda p: p.copy_(p.flip(1)),
    "two": lambda p: p.view(-1)[:2].copy_(p.view(-1)[:2].flip(0)),
    "numbers": lambda p: p.fill_(torch.nan),
}


def spoilt(rank: int, ranks: int) -> list[str]:
    """What is said if rank 1 alone spoils its parameters or has another model; if models are wrapped, or called
    through a wrapper; and if ranks wait for each other within an interval."""
    found = []
    for wrong in (*SPOILT, "another", "wrapped", "around", "waits"):
        model: nn.Module = fresh(torch.float64, sometimes=wrong == "another" and rank == 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if wrong == "wrapped":
            model = nn.parallel.DistributedDataParallel(model)
        called = nn.parallel.DistributedDataParallel(model) if wrong == "around" else model
        try:
            with LocalSGD(model, BATCH, "equal", every=2) as pace:
                for x, y, _ in pace.loader(Samples(COUNT), seed=5):
                    pace.backward(nn.functional.cross_entropy(called(x), y))
                    pace.step(optimizer)
                    if wrong == "waits" and not pace.merged:
                        dist.barrier()
                    if pace.merged and rank == 1:
                        with torch.no_grad():
                            SPOILT.get(wrong, SPOILT["changed"])(next(model.parameters()))
        except PacelineError as error:
            found.append(str(error))
    return found


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
def test_ranks_that_cannot_be_merged_raise() -> None:
    *changed, another, wrapped, around, waits = run_ranks(2, spoilt)[0]
    assert len(changed) == len(SPOILT)
    for words in changed[:-1]:  # negated or swapped, too
        assert "interval 1 began with other parameters on rank 0, 1; expected the same on all" in words
    assert "interval 1 began with other parameters on rank 1; expected the same on all" in changed[-1]
    assert "rank 1 was given a model with the checksum of parameters=" in another
    assert "LocalSGD: ranks take different numbers of steps" in wrapped
    assert "model(x) instead of ddp(x)" in around
    assert "calls a collective (barrier) within the round" in waits
    assert waits.endswith("call it if pace.merged")


class Target(nn.Module):
    """A net, and a target that is an exponential average of it, as BYOL trains."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = fresh(torch.float64), fresh(torch.float64).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) - self.target(x)

    def update(self) -> None:
        for target, trained in zip(self.target.parameters(), self.net.parameters(), strict=True):
            target.data.mul_(0.5).add_(trained.data, alpha=0.5)


def averaged(rank: int, ranks: int, when: str) -> float:
    """The sum of a target that is updated in each step, after merges, or after merges on rank 1 alone."""
    model = Target()
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.1)
    with LocalSGD(model, BATCH, "equal", every=2) as pace:
        for x, y, _ in pace.loader(Samples(COUNT), seed=5):
            pace.backward(nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
            if when == "steps" or (pace.merged and (rank == 1 or when == "merges")):
                model.update()
    return sum(float(p.sum()) for p in model.target.parameters())


@guarantee("Ranks, steps, options, tables and buffers that cannot be merged raise one error that names them.")
def test_frozen_parameters_that_only_a_rank_or_its_steps_change_raise() -> None:
    first, second = run_ranks(2, averaged, "merges")
    assert first == second
    for when, words in (
        ("steps", "parameter target.first.weight requires no gradient and was changed within an interval"),
        ("rank 1", "interval 1 began with other parameters on rank"),
    ):
        assert any(words in found for found in errors_of(2, averaged, when))


def interrupted(rank: int, ranks: int) -> None:
    """Rank 1 leaves its loop in the middle of a merge, and begins another."""
    model = fresh(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(model, 8, "equal", every=2) as pace:
        merges: Any = pace._loop.merges
        loader, take_in = pace.loader(Samples(96), seed=5), merges.take_in

        def stops(*_: object) -> None:
            merges.take_in = take_in
            raise KeyError("an error of the program")

        merges.take_in = stops if rank else take_in
        while pace.epoch < 1:
            with suppress(KeyError):
                for x, y, _ in loader:
                    pace.backward(nn.functional.cross_entropy(model(x), y))
                    pace.step(optimizer)


def test_merge_that_one_rank_leaves_raises() -> None:
    others, alone = errors_of(2, interrupted)
    assert "round 0 was left on this rank after its backward pass" in alone
    assert "rank 1" in others


def drawn(rank: int, ranks: int, kind: str, delay: int) -> tuple[int, int, list[Any]]:
    """A loop that makes its own batches, or a stream: the samples of this rank, the rounds, and the parameters."""
    model, data, ran = fresh(torch.float64), Samples(60), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"limits": [(0, None)] * ranks, "merge": Merge(delay=delay)}
    with LocalSGD(model, BATCH, UNEVEN, every=2, **options) as pace:
        source = pace.sizes(3) if kind == "sizes" else pace.stream(data[n] for n in range(20 * rank, 60))
        for each in source:
            x, y = (data.x[:each], data.y[:each]) if kind == "sizes" else each[:2]
            pace.backward(nn.functional.cross_entropy(model(x), y))
            ran += (each if kind == "sizes" else len(x)) if pace.counts else 0
            pace.step(optimizer)
        assert pace.merged
    return ran, pace.rounds, [p.tolist() for p in model.parameters()]


@guarantee(
    "All ranks end with the parameters of a replay in one process, also under `Merge(delay=1)`, and use each "
    "sample once per epoch."
)
def test_own_batches_and_streams_end_with_one_model() -> None:
    cases = itertools.product(("sizes", "stream"), (0, 1))
    found = run_cases(3, drawn, {f"{kind} {delay}": {"kind": kind, "delay": delay} for kind, delay in cases})
    for name, ranks in found.items():
        assert ranks[0][1:] == ranks[1][1:] == ranks[2][1:]
        ran = [many for many, *_ in ranks]
        assert ran == [60, 40, 20] if name.startswith("stream") else sum(ran) == 3 * 2 * 12


def late(rank: int, ranks: int, folder: str) -> int:
    """The rounds of a run in which rank 1 stays in the second of four intervals until rank 0 is through the third."""
    model, events = fresh(torch.float64), Events(folder)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with LocalSGD(model, BATCH, "equal", every=2, merge=Merge(delay=1)) as pace:
        for x, y, _ in pace.loader(Samples(8 * BATCH), seed=5):
            if (pace.rounds, rank) == (1, 1):
                events.wait("through")
            pace.backward(nn.functional.cross_entropy(model(x), y))
            if (pace.rounds, rank) == (2, 0):
                events.tell("through")
            pace.step(optimizer)
    return pace.rounds


@guarantee(
    "Under `Merge(delay=1)`, a rank that is late by less than an interval delays no other; the process "
    "group's timeout bounds longer waits."
)
def test_rank_late_by_less_than_an_interval_delays_no_other(tmp_path: Path) -> None:
    """It goes on when the other is through the next interval: else this is a hang."""
    assert run_ranks(2, late, str(tmp_path)) == [4, 4]


def patient(rank: int, ranks: int) -> float:
    """Seconds that a merge beside the steps waits for a rank that is stuck."""
    with LocalSGD(fresh(torch.float64), BATCH, merge=Merge(delay=1)) as pace:
        group = pace._ranks.merging._group
        dist.barrier()  # the other rank may still be connecting to this one
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())


@guarantee(
    "Under `Merge(delay=1)`, a rank that is late by less than an interval delays no other; the process "
    "group's timeout bounds longer waits."
)
def test_delayed_merge_waits_as_long_as_the_process_group() -> None:
    assert run_ranks(2, patient) == [WAITS, WAITS]


def slowed(rank: int, ranks: int, policy: str, place: Path) -> tuple[list[int], list[int]]:
    """The samples of this rank's steps in the third interval, and what all ranks are told to have run in it.

    If steps are claimed, rank 1 stays in its first step of that interval until all others are in their last ones,
    before which they claim what they can, or for ever."""
    place.mkdir(exist_ok=True)
    model, told, steps = fresh(torch.float64), list[Any](), list[int]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = [place / f"{each} is in its last step" for each in range(ranks) if each != rank]
    with LocalSGD(model, BATCH, policy, every=6, callbacks=[OnRound(told.append)]) as pace:
        for x, y, _ in pace.loader(Samples(3 * 6 * BATCH), seed=5):
            time.sleep(0.003)
            if pace.rounds == 2:
                if rank == 1 and not steps and policy != "equal":
                    until(lambda: all(map(Path.exists, others)))
                steps.append(len(x))
                if pace._loop.round.piece.last:
                    (place / f"{rank} is in its last step").touch()
            pace.backward(nn.functional.cross_entropy(model(x), y))
            pace.step(optimizer)
    return steps, told[2].loads.tolist()


@guarantee(
    'Under `policy="factoring:scheme=self"`, the others wait for at most two steps of a rank that becomes '
    "slow."
)
def test_slow_rank_delays_others_by_at_most_two_claimed_steps(
    tmp_path: Path,
) -> None:
    """Where all is planned, it runs as many as were planned. What it has not begun is run by the others."""
    planned, claimed = run_cases(
        3,
        slowed,
        {
            "planned": {"policy": "equal", "place": tmp_path / "planned"},
            "claimed": {"policy": "factoring:scheme=self", "place": tmp_path / "claimed"},
        },
    ).values()
    assert len(planned[1][0]) > 3
    assert len(claimed[1][0]) <= 3  # the running one, its last, and one claimed before others began
    for own in (planned, claimed):
        ran = [sum(steps) for steps, _ in own]
        assert sum(ran) == 6 * BATCH
        assert [loads for _, loads in own] == [ran] * 3  # which the record tells


def resumed(rank: int, ranks: int, left: bool) -> tuple[list[int], list[Any]]:
    """The samples that counted and the parameters of a run, which may be left within an interval and goes on from its
    last merge then."""
    torch.manual_seed(3)
    model, states, used = fresh(torch.float64), dict[str, Any](), list[list[int]]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss, options = nn.functional.cross_entropy, {"every": 2, "merge": Merge(outer="nesterov")}
    for part in range(1 + left):
        pace = LocalSGD(model, BATCH, "equal", **options)
        loader = pace.loader(Samples(COUNT), seed=5)
        if part:
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
            model.load_state_dict(states["model"])
            pace.load_state_dict(states["pace"])
        for _ in range(pace.epoch, 2):
            for x, y, index in loader:
                pace.backward(loss(model(x), y))
                step = pace.rounds
                pace.step(optimizer)
                if part or not left or step < 2:
                    used.append(index.tolist())
                if pace.merged:
                    states = {
                        "pace": pace.state_dict(),
                        "model": {n: p.clone() for n, p in model.state_dict().items()},
                    }
                elif left and not part and step == 2:
                    break
            if left and not part:
                break
        assert not left or all(torch.equal(p, states["model"][n]) for n, p in model.state_dict().items())
        pace.host.detach()
    return sorted(itertools.chain(*used)), [p.tolist() for p in model.parameters()]


@guarantee(
    "A left interval restores parameters, buffers, optimizers and scaler, and its samples run again, also "
    "after a kill and `--resume`."
)
def test_left_interval_runs_again() -> None:
    """And the parameters are those of the last merge by then; Nesterov's velocity goes on."""
    both = run_cases(2, resumed, {"whole": {"left": False}, "left": {"left": True}})
    for (samples, whole), (again, left) in zip(*both.values(), strict=True):
        assert again == samples
        for one, other in zip(whole, left, strict=True):
            assert np.allclose(one, other, rtol=0, atol=1e-12)


def left_within(rank: int, ranks: int, how: str, leaves: bool) -> list[np.ndarray]:
    """The parameters after two epochs of a run that is left within its second interval, if it ``leaves``."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    data = torch.Generator().manual_seed(7)
    x = torch.randn(72, 6, generator=data, dtype=torch.float64)
    y = torch.randint(3, (72,), generator=data)
    if how == "AdamW":
        optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if how == "scaler" else None
    with LocalSGD(model, 12, "equal", every=3) as pace:
        loader = pace.loader(torch.utils.data.TensorDataset(x, y), seed=5)
        while pace.epoch < 2:
            taken = 0
            for inputs, targets in loader:
                pace.backward(torch.nn.functional.cross_entropy(model(inputs), targets), scaler=scaler)
                pace.step(optimizer, scaler)
                taken = 0 if pace.merged else taken + 1
                if leaves and pace.rounds == 1 and taken == 2:
                    leaves = False
                    break
            else:
                continue
            pace.load_state_dict(pace.state_dict())
    scale = [] if scaler is None else [np.array(scaler.get_scale())]
    return [p.detach().numpy().copy() for p in model.parameters()] + scale


@guarantee(
    "A left interval restores parameters, buffers, optimizers and scaler, and its samples run again, also "
    "after a kill and `--resume`."
)
@pytest.mark.parametrize("how", ["momentum", "AdamW", "scaler"])
def test_left_interval_restores_optimizer_and_scaler(how: str) -> None:
    whole, left = run_ranks(3, left_within, how, False), run_ranks(3, left_within, how, True)
    for one, other in zip(whole, left, strict=True):
        for expected, found in zip(one, other, strict=True):
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def scheduled(rank: int, ranks: int) -> list[list[str]]:
    """What is warned of a scheduler that is stepped behind each own step, and of one that is at merges."""
    found = []
    for own in (True, False):
        model = fresh(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with LocalSGD(model, 8, Script(((1, 2),)), every=3) as pace:
                for x, y, _ in pace.loader(Samples(48), seed=5):
                    pace.backward(nn.functional.cross_entropy(model(x), y))
                    pace.step(optimizer)
                    if own or pace.merged:
                        scheduler.step()
        found.append([str(each.message) for each in said])
    return found


@guarantee("A scheduler that each rank steps by itself causes a warning with the range of learning rates.")
def test_scheduler_stepped_by_each_rank_warns() -> None:
    """Once, on rank 0; not one that is stepped at merges."""
    (own, merges), *others = run_ranks(2, scheduled)
    assert [each.split(":")[0] for each in own] == [
        "ranks came to the merge of interval 0 with learning rates from 0.05 to 0.1"
    ]
    assert not merges
    assert others == [[[], []]]
