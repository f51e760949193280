"""Exact gradients for a loop whose loss can't be touched: weights in DDP's communication hook.

DDP hands each bucket to the hook before it is averaged. Multiplied by this rank's share of the round and
summed, the buckets give the gradient of the whole batch (LB-BSP, weighted aggregation).
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as types.
from collections.abc import Callable

import torch
import torch.distributed as dist


def weigh_in_hook(weight: Callable[[], float], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The communication hook: this rank's buffer times ``weight()``, summed over the ranks."""
    buffer = bucket.buffer().mul_(weight())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
