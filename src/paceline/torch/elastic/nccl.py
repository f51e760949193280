"""Sums on GPUs by NCCL, behind the same interface as gloo's. It has not run on a GPU yet, and so ``elastic`` in
``parallel`` refuses models on one; it is tested with stand-ins for NCCL's classes.

NCCL differs from gloo in three ways. Nobody is told when a member is lost: a sum hangs until the communicator is
aborted. An aborted sum ends as if it had worked, with anything in its memory. And a communicator cannot be used
again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch.elastic.group import TIMEOUT, GlooGroup

LOOK = 2e-4  # seconds between two looks at a sum
# torch's own watchdog is to do nothing about a lost member, else it would end this process; and waiting for a sum
# raises what was wrong with it.
ENVIRONMENT = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}


class NcclGroup:
    """Tensors on GPUs go by NCCL, and those on processors, such as a round's note, by gloo.

    Constructing it waits for all members.
    """

    def __init__(self, store: Any, index: int, size: int, timeout: timedelta = TIMEOUT) -> None:
        os.environ |= ENVIRONMENT
        self._beside = GlooGroup(dist.PrefixStore("beside", store), index, size, timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        self._group: Any = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), index, size, options)
        self._aborted = False

    def sum(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._beside.sum(tensor)
        return self._started(lambda: self._group.allreduce([tensor]))

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        if tensor.device.type == "cpu":
            return self._beside.broadcast(tensor, root)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._started(lambda: self._group.broadcast([tensor], options))

    def all_done(self, works: Sequence[Any], lost: Callable[[], bool]) -> bool:
        mine = [work.work for work in works if isinstance(work, _Work)]
        others = [work for work in works if not isinstance(work, _Work)]
        # The note first: where it fails on any member, none waits for the device.
        if self._aborted or not self._beside.all_done(others, lost):
            return self._abort()
        for work in mine:
            try:
                while not work.is_completed():
                    if lost():
                        return self._abort()
                    time.sleep(LOOK)
                work.wait()  # raises what was wrong, and lets the current stream wait for the sum
            except RuntimeError:
                return self._abort()
        return not lost()  # what was aborted elsewhere meanwhile may look complete

    def swap(self, mine: torch.Tensor) -> torch.Tensor:
        return self._beside.swap(mine)

    @property
    def idle(self) -> bool:
        return self._beside.idle

    def _started(self, start: Callable[[], Any]) -> Any:
        try:
            return None if self._aborted else _Work(start())
        except RuntimeError:
            return None

    def _abort(self) -> bool:
        """Nothing of this communicator is waited for, or used, from now on."""
        if not self._aborted:
            self._aborted = True
            self._group.abort()
        return False


class _Work:
    """A sum on a GPU."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def is_completed(self) -> bool:
        """Whether the device has let go of the tensor; an aborted communicator has."""
        return bool(self.work.is_completed())
