"""Jobs for ranks: plain DDP training under watch, and the same without."""

from __future__ import annotations

import contextlib
import time

import torch
from torch.nn.parallel import DistributedDataParallel

import paceline.doctor
from paceline import PacelineError
from paceline.torch import leave


def train(
    rank: int,
    ranks: int,
    run_dir: str | None,
    steps: int,
    watched: int,
    loading: list[float],
    computing: list[float],
    micro: int = 1,
) -> tuple[list[float], bool]:
    """Ranks that sleep before and after the forward pass; the parameters, and whether gradients still report."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    probe = None
    if run_dir is not None:
        from paceline.doctor.probe import Probe

        probe = Probe(ddp, watched, run_dir)
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            time.sleep(loading[rank] / micro)
            x = torch.randn(8, 4, generator=data, dtype=torch.float64)
            with ddp.no_sync() if part < micro - 1 else contextlib.nullcontext():
                y = ddp(x)
                time.sleep(computing[rank] / micro)
                y.square().mean().backward()
        optimizer.step()
    attached = probe is not None and bool(probe._handles)
    if probe is not None:
        probe.detach()
    values = torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()
    leave(ddp)
    return values, attached


def refusals(rank: int, ranks: int) -> list[str]:
    """What cannot be watched."""
    found = []
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    for model, steps in ((torch.nn.Linear(4, 2), 10), (ddp, 1)):
        try:
            paceline.doctor.watch(model, steps)
        except PacelineError as error:
            found.append(str(error))
    leave(ddp)
    return found


def survives(rank: int, ranks: int) -> int:
    """Steps trained where what should tell of them fails."""
    from paceline.doctor.probe import Probe

    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def failing(_: object) -> None:
        raise ZeroDivisionError

    Probe(ddp, 5, None, failing)
    steps = 0
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        steps += 1
    leave(ddp)
    return steps
