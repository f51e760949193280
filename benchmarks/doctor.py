"""What does watching cost a plain DDP run? Two even gloo ranks with real CPU work (LeNet-5).

    python benchmarks/doctor.py [--pairs 20] [--batch 64]

Blocks of steps with and without a watcher alternate in the same processes on the same model. Printed: the step time
of each, the median over pairs of their ratio with its quartiles, and what a clock in the watcher's own hooks says
that they take of a step, which is steadier than the difference of two noisy times: the median hook, and all of them
together with the looks at the script's lines, the reports and the end, spread over 200 steps.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scaffold import command_line, join, progress

RANKS, BLOCK = 2, 40
HOOKS = (
    *("_on_fetch", "_on_fetched", "_on_forward", "_on_forwarded", "_on_backward", "_on_backward_end"),
    *("_on_gradients", "_on_reduced", "_on_optimizer"),
)


def rank_of(rank: int, directory: str, pairs: int, batch: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.doctor import watches
    from paceline.doctor.hooks import Hooks
    from paceline.doctor.probe import Probe
    from paceline.learners import models
    from paceline.torch import leave

    join(rank, RANKS, directory)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(models.create("lenet5", (1, 28, 28)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    loss_of = nn.CrossEntropyLoss()
    batches: Any = [(torch.randn(batch, 1, 28, 28), torch.randint(10, (batch,)))] * BLOCK

    spent_in: dict[str, list[float]] = {}

    def clocked(kind: Any, name: str) -> None:
        hook = getattr(kind, name)

        def timed(self: Any, *arguments: Any) -> Any:
            began = time.perf_counter()
            found = hook(self, *arguments)
            spent_in.setdefault(name, []).append(time.perf_counter() - began)
            return found

        setattr(kind, name, timed)

    for name in HOOKS:
        clocked(Hooks, name)
    clocked(watches, "place")

    def block(watched: bool, number: int) -> float:
        # Its first steps, reports and its end are all in what is timed, but for making the record's folder.
        probe = Probe(ddp, BLOCK, Path(directory) / str(number)) if watched else None
        dist.barrier()
        began = time.perf_counter()
        for x, y in torch.utils.data.DataLoader(batches, batch_size=None):
            loss_of(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        dist.barrier()
        spent = time.perf_counter() - began
        if probe is not None:
            probe.detach()
        return spent / BLOCK

    block(False, 0)
    times = []
    for pair in progress(range(pairs), "pairs of blocks") if rank == 0 else range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        times.append({watched: block(watched, 1 + pair) for watched in order})
    if rank == 0:
        looks = spent_in.pop("place", [0.0])
        typical = sum(float(np.median(found)) for found in spent_in.values())
        per_step = sum(looks) / (pairs * BLOCK)
        ordinary = np.percentile(spent_in["_on_optimizer"], 90)
        rare = sum(each for each in spent_in["_on_optimizer"] if each > ordinary) / pairs
        pipe.send(([(each[False], each[True]) for each in times], typical, rare, per_step))
    leave(ddp)


def main() -> None:
    options = command_line(__doc__)
    options.add_argument("--pairs", type=int, default=20)
    options.add_argument("--batch", type=int, default=64)
    chosen = options.parse_args()
    context = multiprocessing.get_context("spawn")
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe(duplex=False)
        workers = [
            context.Process(target=rank_of, args=(rank, directory, chosen.pairs, chosen.batch, theirs))
            for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        pairs, typical, rare, looks = ours.recv()
        times = np.array(pairs)
        for worker in workers:
            worker.join()
    low, middle, high = np.percentile(times[:, 1] / times[:, 0], [25, 50, 75])
    plain, watched = np.median(times, axis=0) * 1e3
    print(f"plain DDP {plain:.2f} ms a step, watched {watched:.2f} ms")
    print(f"watched over plain: {middle:.4f} (quartiles {low:.4f} to {high:.4f})")
    whole = (typical + rare / 200 + looks) * 1e3
    print(
        f"hooks {typical * 1e3:.3f} ms a step; with looks, reports and end {whole:.3f} ms, {whole / plain:.2%} of it"
    )


if __name__ == "__main__":
    main()
