"""A DDP script that knows nothing of Paceline; run by torchrun in the tests.

plain.py STEPS [KIND]: with "frozen", the optimizer's first parameter is a frozen one, and the
wrapper is in evaluation's mode, in which Lightning leaves it after a validation; with "another", it trains
another module than the first that it wraps; with "quiet", it says nothing behind its first step; with "until14", it
stays in step 14.
"""

import gc
import sys
import time

import torch
import torch.distributed as dist
from simulated import compute
from torch.nn.parallel import DistributedDataParallel


class Net(torch.nn.Module):
    """A linear layer behind a position that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.position = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self.layer = torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.position)


def main() -> None:
    steps, kind = int(sys.argv[1]), "".join(sys.argv[2:])
    dist.init_process_group("gloo")
    slow = dist.get_rank() == 1
    ddp = DistributedDataParallel(Net() if kind == "frozen" else torch.nn.Linear(8, 2))
    if kind == "another":
        ddp = DistributedDataParallel(torch.nn.Linear(8, 2))
    if kind == "frozen":
        ddp.eval().module.train()
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        compute(30.0 if slow else 1.0)
        time.sleep(0.01 * (kind != "another"))  # a training that is to be ended is not to take all of a core
        ddp(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        if dist.get_rank() == 0 and (kind != "quiet" or step == 0):
            print("trained step", step)
            if kind == f"until{step}":
                time.sleep(600)
    del ddp.reducer, ddp
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
