"""The options of LocalSGD: the distance of two merges, and how the ranks' parameters are merged.

Between two merges each rank takes its own optimizer steps, on its own batches, as many as its speed allows. An
interval between two merges is a round: its samples are divided, claimed and reported as those of any other round, and
the merge ends it. This trains a different model from that of one process, so it is never chosen automatically.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline import policies
from paceline.errors import PacelineError, meant, refuse, short
from paceline.rounds import Array
from paceline.sync import intervals
from paceline.torch import groups, peers
from paceline.torch.options import Options

SENT, BLOCK = ("bf16", "int8"), 256  # formats in which changes may be sent; numbers that share a scale
KEPT = 2048  # sizes of rounds that are kept: loaders draw no more rounds ahead
RECENT = 0.3  # weight of the newest merge in the seconds of a merge


@dataclass(frozen=True, kw_only=True)
class Merge:
    """How the ranks' parameters are merged at the end of an interval of LocalSGD.

    Attributes:
        by: the weight of a rank's change. "samples" (default): the number that it has run, or the sum of ``count=``,
            such as tokens. "steps": the number of its optimizer steps. "ranks": the same for each rank that took a
            step. A change also grows with the number of steps that made it: while steps are small, each sample has
            the same influence under "ranks", and one in proportion to its rank's steps under the other two, which go
            further. If all ranks have the same kind of data, all three have the same aim; if each rank has its own
            data, as with ``pace.stream``, all favour those of fast ranks, "ranks" as exact training does and the
            other two more.
        outer: the optimizer that takes the ranks' mean change for a gradient: "mean" (default), which sets the
            parameters to the ranks' mean; "nesterov:lr=0.7,momentum=0.9", as in DiLoCo; or a function that makes a
            torch optimizer from a list of parameters.
        send: the format in which changes are sent: None (default), their own; "bf16", with half of the bytes; "int8",
            with a quarter, and a scale for every 256 numbers. Rounding errors are sent at the next merge, and lost
            only if a run continues from a checkpoint.
        delay: 0 (default): ranks wait for the merge at the end of an interval. 1: they continue, and apply it an
            interval later, so neither the link nor a rank that is late by less than an interval holds up the others.
            All changes are applied at the end of an epoch, and in ``pace.flush()``.
    """

    by: str = "samples"
    send: str | None = None
    delay: int = 0
    outer: str | Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer] = "mean"

    def __post_init__(self) -> None:
        ways = ("samples", "steps", "ranks")
        if self.by not in ways:
            raise PacelineError(
                f"Merge(by={short(self.by)}): expected one of {', '.join(map(repr, ways))}{meant(str(self.by), ways)}"
            )
        if self.send not in (None, *SENT):
            raise PacelineError(f"Merge(send={short(self.send)}): expected None, 'bf16' or 'int8'")
        if isinstance(self.delay, bool) or self.delay not in (0, 1):
            raise PacelineError(f"Merge(delay={short(self.delay)}): expected 0, or 1 interval")
        if not isinstance(self.outer, str) and not callable(self.outer):
            raise PacelineError(
                f"Merge(outer={short(self.outer)}): expected a name such as 'nesterov:lr=0.7,momentum=0.9', or a "
                "function that makes an optimizer from parameters"
            )
        if isinstance(self.outer, str):
            intervals.outer(self.outer)  # raises PacelineError for an unknown name or option

    def __str__(self) -> str:
        outer = self.outer if isinstance(self.outer, str) else "a function"
        return f"Merge(by={self.by!r}, outer={outer!r}, send={self.send!r}, delay={self.delay})"

    def optimizer(self, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """The outer optimizer for these parameters."""
        if isinstance(self.outer, str):
            by = intervals.outer(self.outer)
            return torch.optim.SGD(parameters, lr=by.lr, momentum=by.momentum, nesterov=by.nesterov)
        return self.outer(parameters)


def check(given: Options) -> None:
    """Raises PacelineError for options of local steps that do not go together."""
    steps, merge = isinstance(intervals.interval(given.every), int), given.merge
    if not isinstance(merge, Merge):
        raise PacelineError(f"merge={short(merge)}: expected a paceline.torch.Merge(...)")
    memory, limits = isinstance(given.limits, str), given.limits is not None and not steps
    reasons = {
        "limits='memory' cuts a step into passes, and each pass is a step here; choose a global_batch whose part "
        "fits: each step has global_batch / ranks samples": memory,
        "limits= are samples of an interval, whose size is found while training; set every= to a number of steps, or "
        "leave limits= out": limits,
        f"Merge(send={merge.send!r}) rounds sums, which cannot be undone if a rank is lost within them; leave "
        "send= out": given.elastic and merge.send is not None,
        "Merge(delay=1) continues with sums that a lost rank would leave unfinished; leave delay= out": given.elastic
        and merge.delay,
    }
    refuse("ElasticLocalSGD" if given.elastic else "LocalSGD", reasons)


def check_plain(model: torch.nn.Module) -> None:
    """Raises PacelineError for a model whose gradients or parameters another module exchanges."""
    if any(
        isinstance(module, DistributedDataParallel) or hasattr(module, "set_requires_gradient_sync")
        for module in model.modules()
    ):
        raise PacelineError(
            "LocalSGD: ranks take different numbers of steps, which DistributedDataParallel and fully_shard do not "
            "allow; pass the plain module: Paceline itself merges its parameters"
        )


class Every:
    """The numbers of samples of intervals, and the rounds from which each holds; the same on every rank.

    every: a result of ``intervals.interval``. batch: B, samples of one step on every rank. delay: see ``Merge``.
    """

    def __init__(self, every: int | float | str, batch: int, delay: int = 0) -> None:
        self._every, self._batch, self._delay = every, batch, delay
        self.fixed = isinstance(every, int)
        self._link = math.nan  # seconds that a merge takes, without a wait for late ranks
        self._sizes = {0: batch * every if isinstance(every, int) else batch}

    @property
    def most(self) -> int:
        """The most samples of an interval."""
        return self._sizes[0] if self.fixed else self._batch * intervals.MOST_STEPS

    def size(self, step: int) -> int:
        """Samples of round ``step``."""
        if self.fixed:
            return self._sizes[0]
        return policies.in_force(self._sizes, max(step, next(iter(self._sizes))))

    def take(self, step: int, batch: int, seconds: float, links: Array) -> None:
        """Set the size from round ``step`` on, after ``batch`` samples took the slowest rank ``seconds``.

        links: seconds of each rank in the newest merge, (n,), NaN if there was none; the last rank has not waited."""
        if self.fixed or not (seconds > 0 and batch > 0):
            return
        if not np.isnan(links).all():
            link = float(np.nanmin(links))
            self._link = link if math.isnan(self._link) else self._link + RECENT * (link - self._link)
        if isinstance(self._every, int) or (self._every == intervals.AUTO and math.isnan(self._link)):
            return
        newest = next(reversed(self._sizes.values()))
        size = intervals.next_size(self._every, self._batch, newest, batch, seconds, self._link, self._delay)
        if size != newest:
            self._sizes[step] = size
            if len(self._sizes) > KEPT:
                del self._sizes[min(self._sizes)]

    def state_dict(self, step: int) -> dict[str, Any]:
        """The sizes of round ``step`` and later rounds, in plain numbers."""
        sizes = {str(first): size for first, size in self._sizes.items() if first > step}
        return {"sizes": {str(step): self.size(step), **sizes}, "link": self._link}

    def load_state_dict(self, state: Any) -> None:
        """Resume with these sizes, unless the option fixes the size now."""
        sizes = state.get("sizes") if isinstance(state, dict) else None
        if not self.fixed and isinstance(sizes, dict) and sizes:
            self._sizes = {int(step): int(size) for step, size in sizes.items()}
            self._link = float(state["link"])


# Rounding errors that are still to be sent, for each tensor: of this rank's changes, and of the sums that it makes.
Errors = dict[int, tuple[torch.Tensor, torch.Tensor]]


class Merging:
    """Sums over the ranks of a process group, if there is one, at a merge.

    model: a plain module, whose parameters and buffers are set to rank 0's. Collective."""

    def __init__(self, model: torch.nn.Module, ranks: int) -> None:
        self._ranks = ranks
        self._group: Any = None  # the default one
        self._complete = True  # no sum has failed, and the group is not given back
        self._left: Errors = {}
        if ranks == 1:
            return
        check_plain(model)
        tensors = (*model.named_parameters(), *model.named_buffers())
        names = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors]
        peers.agree({"a model with the checksum of parameters": crc32(repr(names).encode())})
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, 0)
                tensor.copy_(whole)

    def connect(self, merge: Merge) -> None:
        """The ranks agree on ``merge``. Collective."""
        if merge.delay and self._ranks > 1:  # its sums run at the same time as the program's
            self._group = groups.take()

    def summing(self, send: str | None) -> Callable[[Sequence[torch.Tensor]], None]:
        """The function that sums the tensors of the next merge over the ranks, in place. It may be called later, by a
        thread: the rounding errors that it adds and leaves are those that ``forget`` would forget now.

        send: see ``Merge``."""
        return partial(self._sum, send, self._left)

    def _sum(self, send: str | None, left: Errors, own: Sequence[torch.Tensor]) -> None:
        if self._ranks == 1:
            return
        self._complete = False
        if send is not None:
            *flats, table = own
            dist.all_reduce(table, group=self._group)
            weight = float(
                table[:, 1].sum()
            )  # divided by it, rounding errors fit the scale of the next merge
            for number, flat in enumerate(flats if weight else ()):
                flat.copy_(self._rounded(left, number, flat / weight, send) * weight)
        else:
            for work in [dist.all_reduce(flat, group=self._group, async_op=True) for flat in own]:
                work.wait()
        self._complete = True

    def close(self) -> None:
        """No more sums, and none is running. Safe to call twice."""
        if self._group is not None and self._complete:
            groups.give(self._group)
        self._complete = False

    def forget(self) -> None:
        """Other parameters were loaded: forget the rounding errors of earlier merges, which do not belong to them."""
        self._left = {}  # a merge on its way keeps the old dict

    def _rounded(self, left: Errors, number: int, flat: torch.Tensor, send: str) -> torch.Tensor:
        """The sum of all ranks' ``flat``, sent in fewer bits: each rank sums a part of it and sends that to all.

        The rounding errors in both directions are sent at the next merge (error feedback)."""
        ranks, size = self._ranks, -(-flat.numel() // (self._ranks * BLOCK)) * BLOCK
        mine = torch.zeros(ranks, size, dtype=flat.dtype, device=flat.device)
        mine.view(-1)[: flat.numel()] = flat
        first, second = left.get(number) or (torch.zeros_like(mine), torch.zeros_like(mine[0]))
        mine += first
        there = encoded(mine, send)
        parts = torch.empty_like(there)
        dist.all_to_all_single(parts, there, group=self._group)
        total = decoded(parts, send, flat.dtype).sum(0) + second
        back = encoded(total[None], send)
        whole = back.new_empty(ranks, back.shape[1])
        dist.all_gather_into_tensor(whole, back, group=self._group)
        first, second = mine - decoded(there, send, flat.dtype), total - decoded(back, send, flat.dtype)[0]
        left[number] = first.nan_to_num(0, 0, 0), second.nan_to_num(0, 0, 0)
        return decoded(whole, send, flat.dtype).view(-1)[: flat.numel()]


def encoded(values: torch.Tensor, send: str) -> torch.Tensor:
    """Rows of numbers, (n, a multiple of BLOCK), as bytes, (n, ...): as bf16, or as int8 with a scale for each BLOCK.

    In int8, all numbers of a BLOCK with an infinity or NaN become NaN."""
    if send == "bf16":
        return values.to(torch.bfloat16).view(torch.uint8)
    blocks = values.float().view(len(values), -1, BLOCK)
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    steps = (blocks / scale.clamp_min(torch.finfo(torch.float32).tiny)).nan_to_num().round().clamp(-127, 127)
    numbers = steps.to(torch.int8).view(len(values), -1).view(torch.uint8)
    return torch.cat([numbers, scale.squeeze(-1).contiguous().view(torch.uint8)], 1)


def decoded(sent: torch.Tensor, send: str, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that ``encoded`` was given, rounded."""
    if send == "bf16":
        return sent.view(torch.bfloat16).to(dtype)
    numbers = sent.shape[1] * BLOCK // (BLOCK + 4)
    scale = sent[:, numbers:].contiguous().view(torch.float32)
    blocks = sent[:, :numbers].contiguous().view(torch.int8).view(len(sent), -1, BLOCK)
    return (blocks * scale[..., None]).to(dtype).view(len(sent), -1)
