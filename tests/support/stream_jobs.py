"""Ranks that draw from streams of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError, WorkerError
from paceline.torch import Pace
from support.loop_jobs import gathered
from support.torch_jobs import Samples, fresh, optimizer_of

COUNT, BATCH = 300, 24


class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """Some of the samples, one after the other; it can tell where it stands."""

    def __init__(self, start: int, end: int) -> None:
        self.data, self.start, self.end, self.at = Samples(COUNT), start, end, start
        self.resumed = False

    def __iter__(self) -> Iterator[Any]:
        self.at, self.resumed = self.at if self.resumed else self.start, False
        while self.at < self.end:
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at, self.resumed = state["at"], True


class InBatches:
    """The same, in batches of unlike sizes."""

    def __init__(self, start: int, end: int) -> None:
        self.data, self.start, self.end = Samples(COUNT), start, end

    def __iter__(self) -> Iterator[Any]:
        at, size = self.start, 1
        while at < self.end:
            chosen = slice(at, min(at + size, self.end))
            yield self.data.x[chosen], {"y": self.data.y[chosen]}, torch.arange(COUNT)[chosen]
            at, size = at + size, size % 7 + 3


def streams(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[tuple[float, list[int], list[int]]]:
    """For each case: the difference from one process, the samples used, and the sizes of the rounds."""
    return [_case(rank, **case) for case in cases]


def _case(
    rank: int, ends: tuple[int, ...] = (100, 110, 150), batches: bool = False, workers: int = 0,
    drop_last: bool = False, loop: str = "whole", stop: int | None = None, leave: int | None = None,
    shared: bool = False, **options: Any,
) -> tuple[float, list[int], list[int]]:  # fmt: skip
    start, end = (0, ends[-1]) if shared else ((0, *ends)[rank], ends[rank])
    kind = InBatches if batches else Stream
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(model), nn.CrossEntropyLoss()
    used: list[list[int]] = []

    def function(x: torch.Tensor, y: Any, index: torch.Tensor) -> torch.Tensor:
        if pace.host.first:
            used.append([])
        if pace.counts:
            used[-1] += index.tolist()
        return loss_of(ddp(x), y["y"] if batches else y)

    def run(until: int | None, leave: int | None = None) -> None:
        for micro_step, batch in enumerate(loader, 1):
            if micro_step == leave:
                return
            if loop == "round":
                pace.round(batch, function)
            else:
                pace.backward(function(*batch))
            pace.step(optimizer)
            if pace.rounds == until:
                return

    pace = Pace(ddp, BATCH, loop=loop, **options)
    own, processes = kind(start, end), {"num_workers": workers} if workers else {}
    loader = pace.stream(own, batches=batches, drop_last=drop_last, shared=shared, **processes)
    if stop is not None:
        run(stop)
        kept, held = loader.state_dict(), pace.state_dict()
        pace.host.detach()
        pace = Pace(ddp, BATCH, loop=loop, **options)
        loader = pace.stream(Stream(start, end), shared=shared)
        pace.load_state_dict(held)
        loader.load_state_dict(kept)
    if leave is not None:
        run(None, leave)
    run(None)
    pace.host.detach()
    rounds = [[index for part in parts for index in part] for parts in zip(*gathered(used), strict=True)]
    data, plain = Samples(COUNT), fresh(torch.float64)
    reference = optimizer_of(plain)
    for indices in rounds:
        chosen = torch.tensor(indices)
        reference.zero_grad()
        loss_of(plain(data.x[chosen]), data.y[chosen]).backward()
        reference.step()
    difference = max(
        float((p.detach() - q.detach()).abs().max() / q.detach().abs().max())
        for p, q in zip(model.parameters(), plain.parameters(), strict=True)
    )
    return difference, [i for part in used for i in part], [len(indices) for indices in rounds]


def shares_unlike(rank: int, ranks: int) -> str:
    """A shared stream that is longer on each rank: what each rank is told."""
    pace = Pace(DistributedDataParallel(fresh(torch.float64)), BATCH)
    try:
        for _ in pace.stream(Stream(0, 20 + rank), shared=True):
            pass
    except PacelineError as error:
        return str(error)
    return ""


def fails_while_drawing(rank: int, ranks: int) -> str:
    """The last rank's stream raises after 30 samples: what each rank is told."""

    def stream() -> Iterator[Any]:
        data = Samples(COUNT)
        for at in range(100):
            if rank == ranks - 1 and at == 30:
                raise ValueError("a torn page")
            yield data[at]

    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer = optimizer_of(ddp)
    try:
        with Pace(ddp, BATCH, "level") as pace:
            for x, y, _ in pace.stream(stream()):
                pace.backward(nn.functional.cross_entropy(ddp(x), y))
                pace.step(optimizer)
    except (ValueError, WorkerError) as error:
        return str(error)
    return "nothing"
