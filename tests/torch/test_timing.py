"""Whatever a loop waits for other ranks in, a rank's seconds are its own."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

from paceline import runs
from paceline.errors import PacelineError
from paceline.torch import Pace, timing
from paceline.torch.callbacks import OnRound
from support.guarantees import guarantee
from support.ranks import run_ranks

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Waits for other ranks, in any collective of torch or in a communication hook, do not count as a "
    "rank's own seconds.",
)

RANKS = 3


ATTEMPTS = 8
Case = tuple[str, str]  # a way, and the place of a step where a loop waits in it


def _check(run: Callable[[int, list[Case]], tuple[Any, Any]], cases: list[Case]) -> None:
    """What was measured is what each rank slept, and what little it computed.

    run: gives both, of shape (steps, ranks), for the number of an attempt and the cases that are its last steps. A
        busy machine makes a step now and then longer, by what does not depend on its length. So what was too long is
        repeated with steps that are twice as long, and the best attempt counts: a wait that is counted is three
        quarters of the slowest rank's step in all of them.
    """
    beyond: dict[Case, Any] = dict.fromkeys(cases, np.inf)  # as parts of the slowest rank's step
    wrong = cases
    for attempt in range(ATTEMPTS):
        slept, measured = (np.asarray(each)[-len(wrong) :] for each in run(attempt, wrong))
        assert (measured - slept > -1e-3).all()
        for case, more, longest in zip(wrong, measured - slept, slept[:, -1], strict=True):
            beyond[case] = np.minimum(beyond[case], more / longest)
        wrong = [case for case in wrong if (beyond[case] > 0.2).any()]
        if not wrong:
            return
    raise AssertionError(
        "\n".join(f"{case}: {beyond[case]} of the slowest rank's step beyond a rank's own" for case in wrong)
    )


SAMPLES = 4  # of each rank in a step
SECONDS = (0.01, 0.01, 0.04)  # that a rank sleeps for a sample, times what an attempt gives
PLACES = ("fetch", "before", "forward", "between", "backward", "after", "step")


def _exchange(rank: int, ranks: int) -> None:
    received = torch.zeros(1)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(1), (rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
        ]
    )
    for work in works:
        work.wait()
    dist.barrier()  # a ring alone waits for one neighbour


def _gathered(ranks: int) -> None:
    work = dist.all_gather([torch.zeros(1) for _ in range(ranks)], torch.ones(1), async_op=True)
    assert work is not None
    work.get_future().wait()


WAYS: dict[str, Callable[[int, int], object]] = {
    "all_reduce": lambda *_: dist.all_reduce(torch.ones(1)),
    "all_reduce, waited for later": lambda *_: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "all_gather": lambda _, n: dist.all_gather([torch.zeros(1) for _ in range(n)], torch.ones(1)),
    "all_gather, its future": lambda _, n: _gathered(n),
    "all_gather_into_tensor": lambda _, n: dist.all_gather_into_tensor(torch.zeros(n), torch.ones(1)),
    "all_gather_object": lambda _, n: dist.all_gather_object([None] * n, "metric"),
    "all_to_all_single": lambda _, n: dist.all_to_all_single(torch.zeros(n), torch.ones(n)),
    "barrier": lambda *_: dist.barrier(),
    "monitored_barrier": lambda *_: dist.monitored_barrier(timeout=timedelta(seconds=60)),
    "isend and irecv": _exchange,
    "functional all_reduce": lambda *_: functional.all_reduce(torch.ones(1), "sum", dist.group.WORLD).item(),
    "differentiable all_gather": lambda *_: differentiable.all_gather(torch.ones(1, requires_grad=True)),
}
CASES: list[Case] = [(way, place) for way in WAYS for place in PLACES]
WARM = 3  # steps before them, in which DDP makes its buckets and memory is taken


class Step:
    """One step of a loop: where this rank sleeps, and waits."""

    def __init__(self, rank: int, ranks: int, times: float) -> None:
        self.rank, self.ranks, self._nap = rank, ranks, times * SECONDS[rank] * SAMPLES / 3
        self.case, self.slept = CASES[0], 0.0

    def at(self, place: str) -> None:
        """Sleep where a rank works, then wait if this is the place for it."""
        if place in ("fetch", "forward", "backward"):
            began = time.perf_counter()
            time.sleep(self._nap)
            self.slept += time.perf_counter() - began
        if place == self.case[1]:
            WAYS[self.case[0]](self.rank, self.ranks)


class Sleeps(torch.nn.Module):
    def __init__(self, step: Step) -> None:
        super().__init__()
        self.layer, self.step = torch.nn.Linear(2, 1), step
        self.register_buffer("seen", torch.zeros(1))  # which DDP broadcasts before each forward pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step.at("forward")
        found: torch.Tensor = self.layer(x)
        if found.requires_grad:
            found.register_hook(lambda _: self.step.at("backward"))
        return found


def _made(rank: int, ranks: int, times: float) -> tuple[Step, Any, torch.optim.Optimizer, TensorDataset, Any]:
    step = Step(rank, ranks, times)
    ddp = DistributedDataParallel(Sleeps(step))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: step.at("step"))
    data = TensorDataset(torch.randn(SAMPLES * ranks * (WARM + len(CASES)), 2))

    def collate(samples: list[Any]) -> Any:
        step.at("fetch")
        return default_collate(samples)

    return step, ddp, optimizer, data, collate


def paced(rank: int, ranks: int, cases: list[Case], times: float) -> tuple[list[float], list[list[float]]]:
    """What this rank slept in each round, these cases last; what each rank's seconds are said to be."""
    step, ddp, optimizer, data, collate = _made(rank, ranks, times)
    results: list[Any] = []
    pace = Pace(ddp, SAMPLES * ranks, "equal", callbacks=[OnRound(results.append)])
    slept = []
    loader = iter(pace.loader(data, shuffle=False, collate_fn=collate))
    for case in CASES[:1] * WARM + cases:
        step.case, step.slept = case, 0.0
        (x,) = next(loader)
        step.at("before")
        loss = ddp(x).square().mean()
        step.at("between")
        pace.backward(loss)
        step.at("after")
        pace.step(optimizer)
        slept.append(step.slept)
    next(loader, None)
    pace.close()
    return slept, [result.compute.tolist() for result in results]


def test_seconds_leave_out_waits_at_every_place_of_a_step() -> None:
    def run(attempt: int, cases: list[Case]) -> tuple[Any, Any]:
        found = run_ranks(RANKS, paced, cases, 2.0**attempt)
        return np.transpose([slept for slept, _ in found]), found[0][1]

    _check(run, CASES)


# Each way once and each place at least once, for what measures by the same clock: see ``paced`` for all of them.
SOME: list[Case] = [(way, PLACES[number % len(PLACES)]) for number, way in enumerate(WAYS)]


def _plain(step: Step, ddp: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """A step of a loop without Pace, from its batch on; what was slept in all of it."""
    step.at("before")
    loss = ddp(x).square().mean()
    step.at("between")
    loss.backward()
    step.at("after")
    optimizer.step()
    optimizer.zero_grad()
    return step.slept


def watched(rank: int, ranks: int, directory: str, cases: list[Case], times: float) -> list[float]:
    """The same in a plain loop that the doctor watches; rank 0 leaves the record in ``directory``."""
    from paceline import doctor

    step, ddp, optimizer, data, collate = _made(rank, ranks, times)
    warm = max(WARM, 12 - len(cases))  # it takes some steps to tell anything
    doctor.watch(ddp, steps=warm + len(cases), run_dir=directory)
    loader = iter(DataLoader(data, SAMPLES, collate_fn=collate))
    slept = []
    for case in SOME[:1] * warm + cases:
        step.case, step.slept = case, 0.0
        (x,) = next(loader)
        slept.append(_plain(step, ddp, optimizer, x))
    return slept


def test_doctor_finds_the_slow_rank_wherever_the_loop_waits(tmp_path: Path) -> None:
    from paceline.doctor.findings import diagnose

    records: list[Path] = []

    def run(attempt: int, cases: list[Case]) -> tuple[Any, Any]:
        records.append(tmp_path / str(attempt))
        slept = run_ranks(RANKS, watched, str(records[-1]), cases, 2.0**attempt)
        return np.transpose(slept), runs.read(records[-1]).compute

    _check(run, SOME)
    said = diagnose(runs.read(records[-1])).sentences[0]  # of the attempt that nothing held up
    assert said.startswith("Rank 2 takes")
    assert "the fastest rank's time per sample" in said


def gathers_within(rank: int, ranks: int, loop: str) -> tuple[str, int, int]:
    """What a collective within a round comes to: the sentence, rounds done, and this file's line that calls it."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    pace = Pace(ddp, 12, "level" if loop == "whole" else "factoring", loop=loop)
    loader = pace.loader(TensorDataset(torch.randn(48, 2)))

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = ddp(x).square().mean()
        dist.all_reduce(loss.detach().clone())
        return loss

    line = loss_of.__code__.co_firstlineno + 2
    rounds = 0
    try:
        for batch in loader:
            if loop == "round":
                pace.round(batch, loss_of)
            else:
                pace.backward(loss_of(batch[0]))
            rounds += bool(pace.step(optimizer))
            if loop != "pieces":  # whose micro-steps are unlike
                dist.all_reduce(torch.ones(1))
    except PacelineError as error:
        pace._loop.failed(error)
        return str(error), rounds, line
    pace.close()
    return "", rounds, line


@guarantee(
    "A collective within rounds whose micro-steps differ between ranks "
    "raises with its file and line, and does not hang."
)
@pytest.mark.parametrize("loop", ["whole", "round", "pieces"])
def test_collective_within_a_round_raises(loop: str) -> None:
    for said, rounds, line in run_ranks(2, gathers_within, loop):
        if loop == "whole":
            assert (said, rounds) == ("", 4)
        else:
            assert rounds == 0
            assert f"test_timing.py:{line} calls a collective (allreduce) within the round" in said


def test_replaced_functions_are_restored_after_listening() -> None:
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    places = [(dist.ProcessGroup, "allreduce"), (dist.Work, "wait"), (functional, "wait_tensor")]
    before = [vars(owner)[name] for owner, name in places]
    nothing = (lambda _: None), (lambda: None)
    first, second = (timing.listen(*nothing) for _ in range(2))
    first()
    first()  # which leaves the second alone
    assert all(hasattr(getattr(owner, name), "__wrapped__") for owner, name in places)
    second()
    assert [vars(owner)[name] for owner, name in places] == before


def test_nested_waits_and_those_of_threads_count_once() -> None:
    told: list[str] = []
    stop = timing.listen(told.append, lambda: told.append("end"))
    try:
        future: torch.futures.Future[int] = torch.futures.Future()
        future.set_result(1)
        assert future.wait() == 1  # calls the wait of its base class
        import threading

        thread = threading.Thread(target=future.wait)
        thread.start()
        thread.join()
    finally:
        stop()
    assert told == ["wait", "end"]


def test_level_is_that_of_the_programs_line() -> None:
    """Within files of Paceline, of torch, of contextlib, as where an ``ExitStack`` closes, and of a framework."""
    inner = {
        timing.PACELINE + "hosts/own.py": "paceline.hosts.own",
        timing.TORCH + "nn/own.py": "torch.nn.own",
        contextlib.__file__: "contextlib",
        "/site/call.py": "lightning.pytorch.trainer.call",
    }
    for depth, (place, name) in enumerate(inner.items(), 1):
        named: dict[str, Any] = {"__name__": name}
        exec(compile("def one(call):\n    return call()", place, "exec"), named)
        call: Callable[[], int] = timing.level
        for _ in range(depth):
            call = functools.partial(named["one"], call)
        assert call() == depth + 1
