"""Jobs for ranks: plain DDP scripts on record."""

from __future__ import annotations

import time

import torch
from torch.nn.parallel import DistributedDataParallel

from paceline import PacelineError
from paceline.torch import Recorder, leave


def plain_script(rank: int, ranks: int, run_dir: str, seconds: list[float], steps: int) -> None:
    """A training loop that knows nothing of balancing; each rank computes for its own time."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    with Recorder(ddp, run_dir) as recorder:
        for _ in range(steps):
            x = torch.randn(8, 4)
            recorder.start(len(x))
            time.sleep(seconds[rank])
            optimizer.zero_grad()
            ddp(x).square().mean().backward()
            optimizer.step()
    leave(ddp)


def second_record(rank: int, ranks: int, run_dir: str) -> str:
    """A recorder where something is already."""
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    try:
        Recorder(ddp, run_dir)
    except PacelineError as error:
        return str(error)
    finally:
        leave(ddp)
    return ""
