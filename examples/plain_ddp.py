"""A plain DDP training script, to try ``paceline doctor`` on: it knows nothing of Paceline.

    paceline doctor -- torchrun --standalone --nproc-per-node 3 examples/plain_ddp.py

The ranks sleep for each sample, the last one four times as long, as a slower machine would take longer.
"""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    dist.init_process_group("gloo")
    slow = int(os.environ["RANK"]) == dist.get_world_size() - 1
    torch.manual_seed(0)
    x = torch.randn(3840, 64)
    dataset = TensorDataset(x, (x @ torch.randn(64, 10)).argmax(1))
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    criterion = nn.CrossEntropyLoss()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in loader:
            time.sleep((0.002 if slow else 0.0005) * len(x))
            optimizer.zero_grad()
            loss = criterion(ddp(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
