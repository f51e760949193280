"""What the README's diff says, run on real ranks: the script as it was, and as it is with Paceline."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, SAMPLES = 5, 256  # as many as a batch of the README's


def trained(rank: int, ranks: int, script: str) -> tuple[list[float], int]:
    """The parameters after some epochs of one batch each, in double precision; and how many steps were taken."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(SAMPLES, 4).double(), torch.randn(SAMPLES, 1).double())
    model = nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    names: dict[str, Any] = {
        "DistributedDataParallel": DistributedDataParallel,
        "DistributedSampler": DistributedSampler,
        "DataLoader": DataLoader,
        "model": model,
        "dataset": dataset,
        "criterion": nn.MSELoss(),
        "optimizer": optimizer,
        "epochs": EPOCHS,
    }
    exec(script, names)
    if "pace" in names:
        names["pace"].host.detach()
    return torch.cat([p.detach().ravel() for p in model.parameters()]).tolist(), len(steps)
