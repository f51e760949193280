"""The first impression on even machines: the network of pytorch/examples' mnist, on two ranks that are equally fast.

    python benchmarks/even.py [--pairs 10] [--steps 40]

Plain DistributedDataParallel and a Pace around it take turns within one run: an epoch of one, then an epoch of the
other, in changing order, on made-up images of the size of MNIST. Printed are the seconds of a step and the ratio of
each pair: of the clock, and of the processor time of both ranks, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS, BATCH = 2, 64


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25)),
        *(
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
            nn.LogSoftmax(1),
        ),
    )


def work(rank: int, place: str, pairs: int, steps: int) -> None:
    from paceline.torch import Pace

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}/store", rank=rank, world_size=RANKS)
    made = torch.Generator().manual_seed(0)
    count = steps * RANKS * BATCH
    data = TensorDataset(
        torch.randn(count, 1, 28, 28, generator=made), torch.randint(10, (count,), generator=made)
    )
    models = [DistributedDataParallel(net()) for _ in range(2)]
    optimizers = [torch.optim.Adadelta(model.parameters(), lr=1.0) for model in models]
    pace = Pace(models[1], RANKS * BATCH)
    loaders: list[Any] = [DataLoader(data, BATCH, sampler=DistributedSampler(data)), pace.loader(data)]

    def epoch(kind: int) -> tuple[float, float]:
        model, optimizer = models[kind], optimizers[kind]
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for x, y in loaders[kind]:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(model(x), y)
            if kind:
                pace.backward(loss)
                pace.step(optimizer)
            else:
                loss.backward()
                optimizer.step()
        seconds = torch.tensor([time.perf_counter() - began, time.process_time() - used], dtype=torch.float64)
        dist.all_reduce(seconds)
        return seconds[0].item() / RANKS / steps, seconds[1].item() / steps

    for kind in (0, 1):
        epoch(kind)  # to become warm
    clock, processor = [], []
    for pair in range(pairs):
        order = (0, 1) if pair % 2 else (1, 0)
        took = {kind: epoch(kind) for kind in order}
        clock.append(took[1][0] / took[0][0])
        processor.append(took[1][1] / took[0][1])
        if rank == 0:
            plain, ours = took[0][0], took[1][0]
            print(
                f"{1e3 * plain:.1f} and {1e3 * ours:.1f} ms a step: {clock[-1]:.3f}, processor {processor[-1]:.3f}"
            )
    if rank == 0:
        for name, ratios in (("clock", clock), ("processor time", processor)):
            quarter, middle, most = np.quantile(ratios, [0.25, 0.5, 0.75])
            print(
                f"{name}: {middle:.3f} of plain DDP's (quartiles {quarter:.3f} to {most:.3f}, {pairs} pairs)"
            )
    pace.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as place:
        processes.spawn(work, (place, args.pairs, args.steps), nprocs=RANKS)


if __name__ == "__main__":
    main()
