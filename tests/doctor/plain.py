"""A DDP script that knows nothing of Paceline; run by torchrun in the tests."""

import gc
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    slow = dist.get_rank() == 1
    ddp = DistributedDataParallel(torch.nn.Linear(8, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(int(sys.argv[1])):
        optimizer.zero_grad()
        time.sleep(0.3 if slow else 0.01)  # a busy machine adds tens of milliseconds
        ddp(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print("trained step", step)
    del ddp.reducer, ddp
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
