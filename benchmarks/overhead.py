"""What does Paceline cost where there is nothing to balance? Two even gloo ranks with real CPU work.

    python benchmarks/overhead.py [--pairs 40] [--policy level]

Blocks of steps of plain DDP (equal halves) and of Pace alternate in the same processes, each with its own model, so
that whatever else the machine does meets both. Printed: the step time of each, and the median over pairs of their
ratio with its quartiles. "equal" shows the machinery alone; "level" and "auto" also follow the machine's
own noise.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

RANKS, BATCH, BLOCK = 2, 2048, 4


def plain_steps(rank: int, ddp: Any, optimizer: Any, loss_of: Any, data: Any) -> Iterator[None]:
    """Endless steps of an ordinary DDP loop over this rank's half."""
    import torch

    half = BATCH // RANKS
    epoch = 0
    while True:
        order = np.random.default_rng((0, epoch)).permutation(len(data))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            x, y = data.__getitems__(order[first + rank * half : first + (rank + 1) * half].tolist())
            loss_of(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
        epoch += 1
        torch.manual_seed(epoch)


def paced_steps(pace: Any, ddp: Any, optimizer: Any, loss_of: Any, data: Any) -> Iterator[None]:
    """Endless steps under Pace."""
    loader = pace.loader(data, collate_fn=lambda batch: batch)
    while True:
        for x, y in loader:
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer):
                yield


def rank_of(rank: int, directory: str, policy: str, pairs: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.learners import models
    from paceline.torch import Pace, leave

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)

    class Images:
        x, y = torch.randn(BATCH * 16, 1, 28, 28), torch.randint(10, (BATCH * 16,))

        def __len__(self) -> int:
            return len(self.x)

        def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
            return self.x[indices], self.y[indices]

    ways = []
    loss_of = nn.CrossEntropyLoss()
    for paced in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(models.create("lenet5", (1, 28, 28)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if paced:
            ways.append(
                paced_steps(Pace(ddp, BATCH, policy, loop="pieces"), ddp, optimizer, loss_of, Images())
            )
        else:
            ways.append(plain_steps(rank, ddp, optimizer, loss_of, Images()))
    seconds = np.zeros((pairs + 2, 2))
    for pair in range(-2, pairs):
        for way in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(BLOCK):
                next(ways[way])
            seconds[pair, way] = (time.perf_counter() - began) / BLOCK
    if rank == 0:
        pipe.send(seconds[:pairs])
    dist.barrier()
    leave()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--policy", action="append")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "paceline.torch"])
    print(f"{'policy':10}{'plain DDP':>12}{'Paceline':>12}{'ratio':>9}  (quartiles of {options.pairs} pairs)")
    for policy in options.policy or ["equal", "level", "auto"]:
        ours, theirs = context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory() as directory:
            arguments = (directory, policy, options.pairs, theirs)
            workers = [context.Process(target=rank_of, args=(rank, *arguments)) for rank in range(RANKS)]
            for worker in workers:
                worker.start()
            if not ours.poll(600):
                raise SystemExit("a rank has failed; see above")
            seconds = ours.recv()
            for worker in workers:
                worker.join()
        low, middle, high = np.quantile(seconds[:, 1] / seconds[:, 0], [0.25, 0.5, 0.75])
        plain, paced = 1e3 * np.median(seconds, axis=0)
        print(
            f"{policy:10}{plain:9.2f} ms{paced:9.2f} ms{middle:9.3f}  ({low:.3f} to {high:.3f})", flush=True
        )


if __name__ == "__main__":
    main()
