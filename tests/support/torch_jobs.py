"""What the ranks of the torch tests run; in a module of its own so that forked workers can import it."""

from __future__ import annotations

import io
import multiprocessing
import random
import time
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import Pace, RoundResult, meter
from paceline.torch.callbacks import OnRound, Record
from paceline.torch.feed.pieces import Order
from paceline.torch.meter import CpuStopwatch
from support.events import Events
from support.scripted import Script

FEATURES, CLASSES = 6, 3
UNEVEN = Script(((5, 2, 1), (1, 6, 2), (3, 3, 3), (1, 1, 9), (7, 0, 4), (0, 1, 0), (0, 5, 5)))


class Net(nn.Module):
    """Two layers, and one that only some inputs use."""

    def __init__(self, sometimes: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)
        self.extra = nn.Linear(8, 8) if sometimes else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.extra is not None:
            chosen = x[:, 0] > 1.5
            if chosen.any():
                hidden = hidden.masked_scatter(chosen[:, None], torch.tanh(self.extra(hidden[chosen])))
        return self.second(hidden)


class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random samples that know their own index."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def fresh(dtype: torch.dtype, **options: Any) -> Net:
    torch.manual_seed(3)
    return Net(**options).to(dtype)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def reference(
    count: int, batch: int, steps: int, dtype: torch.dtype, sometimes: bool = False
) -> list[torch.Tensor]:
    """The parameters after ``steps`` rounds of one process that takes each whole batch itself."""
    model, data, loss_of = fresh(dtype, sometimes=sometimes), Samples(count, dtype), nn.CrossEntropyLoss()
    optimizer, order, step, epoch = optimizer_of(model), Order(count, 5), 0, 0
    while step < steps:
        indices = order.epoch(epoch)
        for first in range(0, count, batch):
            if step == steps:
                break
            chosen = torch.from_numpy(indices[first : first + batch])
            loss_of(model(data.x[chosen]), data.y[chosen]).backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        epoch += 1
    return [p.detach() for p in model.parameters()]


def differences_from_one_process(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[float]:
    """The largest relative difference from ``reference`` after 20 uneven steps, for each case."""
    return [_difference_from_one_process(rank, ranks, **case) for case in cases]


def _difference_from_one_process(
    rank: int,
    ranks: int,
    dtype: str = "float64",
    sometimes: bool = False,
    count: int = 83,
    batch: int = 16,
    steps: int = 20,
    loader_workers: int = 0,
    limits: Any = ((0, None),) * 3,
    scaled: bool = False,
    reduction: str = "mean",
    jitter: float = 0.0,
    **options: Any,
) -> float:
    kind = getattr(torch, dtype)
    model = fresh(kind, sometimes=sometimes)
    ddp = DistributedDataParallel(model, find_unused_parameters=sometimes)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss(reduction=reduction)
    pace = HostedPace(
        ddp, batch, options.pop("policy", UNEVEN), limits=limits, **({"loop": "pieces"} | options)
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    loader = pace.loader(Samples(count, kind), seed=5, num_workers=loader_workers)
    stalls = random.Random(rank)  # so that the ranks claim in another order every round
    while pace.rounds < steps:
        for x, y, _ in loader:
            time.sleep(jitter * stalls.expovariate(1.0))
            loss = loss_of(ddp(x), y)
            if pace.host.terms.weigh == "hook":
                loss.backward()
            else:
                pace.backward(loss, reduction, scaler)
            pace.step(optimizer, scaler)
            if pace.rounds == steps:
                break
    pace.host.detach()
    expected = reference(count, batch, steps, kind, sometimes)
    return max(
        float((p.detach() - q).abs().max() / q.abs().max())
        for p, q in zip(model.parameters(), expected, strict=True)
    )


def indices_used(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[list[list[int]]]:
    """For each case, for each of 2 epochs, the sample indices that this rank was given, and its steps."""
    return [_indices_case(rank=rank, **case) for case in cases]


def _indices_case(
    count: int = 83,
    batch: int = 16,
    loader_workers: int = 0,
    shuffle: bool = True,
    norm: bool = False,
    jitter: float = 0.0,
    rank: int = 0,
    **options: Any,
) -> list[list[int]]:
    model: nn.Module = fresh(torch.float64)
    if norm:
        model = nn.Sequential(model, nn.BatchNorm1d(CLASSES).double())
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    options.setdefault("limits", [(0, None)] * 3)
    pace = HostedPace(ddp, batch, options.pop("policy", UNEVEN), **({"loop": "pieces"} | options))
    loader = pace.loader(Samples(count), seed=5, shuffle=shuffle, num_workers=loader_workers)
    epochs = []
    stalls = random.Random(rank)
    for _ in range(2):
        used = []
        for x, y, index in loader:
            time.sleep(jitter * stalls.expovariate(1.0))
            if pace.counts:
                used += index.tolist()
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
        epochs.append(used)
    rounds = count // batch if norm and count % batch == 1 else -(-count // batch)
    assert pace.rounds == 2 * rounds
    assert all(torch.isfinite(p).all() for p in model.parameters())
    pace.host.detach()
    assert not multiprocessing.active_children()  # the loader's processes have ended with it
    return epochs


def part_of_an_epoch(
    rank: int, ranks: int, steps: int, saved: bytes | None, loader_workers: int, policy: Any = "level"
) -> dict[str, Any]:
    """Train up to ``steps`` rounds in all (or the end of the epoch) from what another call saved."""
    state = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
    model = fresh(torch.float64)
    if state is not None:
        model.load_state_dict(state["model"])
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    results: list[RoundResult] = []
    pace = Pace(ddp, 16, policy, loop="pieces", callbacks=[OnRound(results.append)])
    loader = pace.loader(Samples(83), seed=5, num_workers=loader_workers)
    if state is not None:
        pace.load_state_dict(state["pace"])
    used = []
    for x, y, index in loader:
        used += index.tolist()
        pace.backward(loss_of(ddp(x), y))
        pace.step(optimizer)
        if pace.rounds == steps:
            break
    buffer = io.BytesIO()
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pace": pace.state_dict()}
    torch.save(parts, buffer)
    saved = buffer.getvalue()
    pace.close()
    loads = [result.loads.tolist() for result in results]
    return {"used": used, "saved": saved, "loads": loads, "rounds": pace.rounds}


def measured(rank: int, ranks: int, policy: str, milliseconds: list[float], steps: int) -> list[RoundResult]:
    """Rounds of ranks that sleep for each sample."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    with Pace(ddp, 60, policy, loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(60 * steps), seed=5):
            time.sleep(milliseconds[rank] * len(x) / 1e3)
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
    return results


def in_intervals(
    rank: int, ranks: int, policy: str, milliseconds: list[float], steps: int
) -> tuple[list[RoundResult], dict[str, Any], int, int]:
    """Short rounds, without a sleep's inexactness: the rounds, the state after them, how many rows the ranks told of
    them, and how many rounds there were."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    told = []
    with Pace(ddp, 24, policy, loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        meter = pace._loop._meter
        announce = meter._announce
        meter._announce = lambda *lag: (told.append(1), announce(*lag))[1]  # type: ignore[method-assign]
        for x, y, _ in pace.loader(Samples(24 * steps), seed=5):
            until = time.perf_counter() + milliseconds[rank] * len(x) / 1e3
            while time.perf_counter() < until:
                pass
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
        state = pace.state_dict()
    return results, state, len(told), pace.rounds


def left_within_an_interval(rank: int, ranks: int, end: str) -> tuple[list[int], int]:
    """The rounds that listeners heard of, and those that there were."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    with Pace(ddp, 24, "level", loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(24 * (400 if end == "break" else 211)), seed=5):
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
            if end == "break" and pace.rounds == 211:
                break
        for size in pace.sizes(11) if end == "own" else ():  # its last round ends when the Pace does
            pace.backward(loss_of(ddp(torch.randn(size, 6, dtype=torch.float64)), torch.zeros(size).long()))
            optimizer.step()
            optimizer.zero_grad()
    return [result.step for result in results], pace.rounds


def own_and_waiting(rank: int, ranks: int, milliseconds: list[float], steps: int) -> list[list[float]]:
    """Of each round: the seconds that Pace found, those until this rank's last gradient, and those of its wait."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    ready, seen, results = [0.0], [], []
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: ready.__setitem__(0, time.perf_counter()))
    with Pace(ddp, 60, "equal", loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(60 * steps), seed=5):
            began = time.perf_counter()
            time.sleep(milliseconds[rank] * len(x) / 1e3)
            pace.backward(loss_of(ddp(x), y))
            seen.append([ready[0] - began, time.perf_counter() - ready[0]])
            pace.step(optimizer)
    return [[float(each.compute[rank]), *both] for each, both in zip(results, seen, strict=True)]


class LateWatch(CpuStopwatch):
    """A stopwatch whose readings come in a round later, as a GPU's do."""

    lag = 1


def measured_late(rank: int, ranks: int, milliseconds: list[float], steps: int) -> list[RoundResult]:
    """``measured`` with readings that come in a round later."""
    meter.stopwatch = lambda device: LateWatch()
    return measured(rank, ranks, "level", milliseconds, steps)


def misuse(rank: int, ranks: int, kind: str) -> str:
    """The sentence that a rank gets when something is wrong."""
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    loss_of = nn.CrossEntropyLoss()
    try:
        if kind == "plain module":
            Pace(model, 16)
        if kind == "record":
            Pace(ddp, 16, callbacks=[Record("/dev/null/run")])
        if kind == "record on rank 1":
            Pace(ddp, 16, callbacks=[Record("/dev/null/run")] if rank == 1 else [])
        if kind == "global batch":
            Pace(ddp, 16 if rank == 0 else 18)
        with Pace(ddp, 16, Wavering(rank) if kind == "other plan" else "equal") as pace:
            for x, y, _ in pace.loader(Samples(83), seed=rank if kind == "seed" else 5):
                if kind == "no backward":
                    continue
                with ddp.no_sync() if kind == "no_sync around the forward pass" else nullcontext():
                    out = model(x) if kind == "the module itself" else ddp(x)
                if kind == "another backward pass":
                    loss_of(out, y).backward(retain_graph=True)
                pace.backward(loss_of(out, y))
                if kind == "a step left out" and (rank, pace.rounds) == (1, 2):
                    ddp.zero_grad()
                    continue
                pace.step(optimizer_of(ddp))
    except PacelineError as error:
        return str(error)
    return "nothing was wrong"


class Wavering:
    """A policy that decides otherwise on rank 1."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, cluster: Any) -> Any:
        bias = (1.0,) * cluster.workers
        return Script((bias, bias, (1.0, 1.0 + 0.1 * (self._rank == 1), 1.0)))(cluster)


def bits(rank: int, ranks: int, seed: int, dtype: str, steps: int, **options: Any) -> list[torch.Tensor]:
    """The parameters after some rounds of ranks that stall at random, in another order for another seed."""
    kind = getattr(torch, dtype)
    model = fresh(kind)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    pace = Pace(ddp, 48, "factoring", loop="pieces", deterministic=True, **options)
    loader = pace.loader(Samples(230, kind), seed=5)
    stalls = random.Random(seed * ranks + rank)
    while pace.rounds < steps:
        for x, y, _ in loader:
            time.sleep(1e-3 * stalls.expovariate(1.0) * len(x))
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer) and pace.rounds == steps:
                break
    pace.host.detach()
    return [p.detach().clone() for p in model.parameters()]


def parameters_of_two_runs(rank: int, ranks: int, dtype: str) -> list[list[Any]]:
    """The parameters of two runs with other claims, as plain lists."""
    return [[p.tolist() for p in bits(rank, ranks, seed, dtype, 8)] for seed in (1, 2)]


def with_as_many_threads(rank: int, ranks: int, threads: list[int]) -> str:
    """The sentence that a rank gets whose sums are to have the same bits as the others'; none where all is well."""
    torch.set_num_threads(threads[rank])
    try:
        Pace(
            DistributedDataParallel(fresh(torch.float64)), 16, "factoring", loop="pieces", deterministic=True
        ).close()
    except PacelineError as error:
        return str(error)
    return ""


class Slow(Samples):
    """Samples that take 15 ms to load, with the time at which that began, by the machine's clock."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:  # type: ignore[override]
        began = time.monotonic()
        time.sleep(15e-3)
        return *super().__getitem__(index), began


def nap(seconds: float, _: torch.Tensor) -> None:
    """For a hook: the backward pass takes so much longer."""
    time.sleep(seconds)


def samples_and_ahead(rank: int, ranks: int, loader_workers: int) -> tuple[list[int], list[float]]:
    """The samples that this rank ran; of each claim, the part of its samples whose loading had begun when they were
    asked for."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    used: list[int] = []
    ahead: list[float] = []
    with Pace(ddp, 120, "factoring:portion=0.3", loop="pieces") as pace:
        loader = pace.loader(Slow(120 * 4), seed=5, num_workers=loader_workers)
        load = loader.load

        def timed(start: int, size: int) -> Any:
            asked = time.monotonic()
            batch = load(start, size)
            ahead.append(float((batch[-1] < asked).double().mean()))
            return batch

        loader.load = timed  # type: ignore[method-assign]
        for x, y, index, _ in loader:
            used += index.tolist()
            loss = loss_of(ddp(x), y)
            loss.register_hook(partial(nap, 18e-3 * len(x)))
            pace.backward(loss)
            pace.step(optimizer)
    return used, ahead


def frozen(rank: int, ranks: int, steps: int, folder: str) -> tuple[float, list[RoundResult]]:
    """Rank 1 is stopped in its first piece of round 5 until the others are at their last: the difference from one
    process, and the rounds."""
    events = Events(folder)
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    results: list[RoundResult] = []
    count = 60 * steps
    with Pace(ddp, 60, "factoring:portion=0.3", loop="pieces", callbacks=[OnRound(results.append)]) as pace:
        for x, y, _ in pace.loader(Samples(count), seed=5):
            if rank == 1 and pace.rounds == 5 and pace.host.first:
                events.stop("0", "2")
            if rank != 1 and pace.rounds == 5 and pace.host.last:
                events.tell(str(rank))
            time.sleep(1e-3 * len(x))
            pace.backward(loss_of(ddp(x), y))
            pace.step(optimizer)
        expected = reference(count, 60, steps, torch.float64)
        difference = max(
            float((p.detach() - q).abs().max() / q.abs().max())
            for p, q in zip(model.parameters(), expected, strict=True)
        )
    return difference, results
