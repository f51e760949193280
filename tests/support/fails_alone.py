"""A program as people write it, without ``with``: rank 1 fails in round 2, or ends where nobody expects it."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace, join
from support.torch_jobs import Samples, fresh, optimizer_of

join()
torch.set_num_threads(1)
ddp = DistributedDataParallel(fresh(torch.float64))
optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
pace = Pace(ddp, 20, "level", patience=float(sys.argv[2]))
for x, y, _ in pace.loader(Samples(20 * 6), seed=5):
    if pace.rank == 1 and pace.rounds == 2:
        if sys.argv[1] == "raise":
            raise ValueError("a bad image\nand more")
        sys.exit(3)
    pace.backward(loss_of(ddp(x), y))
    pace.step(optimizer)
