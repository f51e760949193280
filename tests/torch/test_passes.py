"""A rank tells of its round when its own gradients are there, whatever it then waits for."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from paceline.torch import Pace
from support.ranks import errors_of, run_cases
from support.scripted import Script
from support.small_net import Net, Samples, fresh, optimizer_of

pytestmark = pytest.mark.processes

GUARANTEES = (
    "Waits for other ranks, in any collective of torch or in a communication hook, do not count as a "
    "rank's own seconds.",
)

ROUNDS, BATCH = 4, 8
SECONDS = timedelta(seconds=60)
LOSS = nn.CrossEntropyLoss()


class Again(Net):
    """A first layer that is computed again in a backward pass of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(lambda x: torch.tanh(self.first(x)), x.requires_grad_(), use_reentrant=True)
        return self.second(hidden)


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSS(self.model(x), y)


def sum_at_once(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads annotations, and not as text
    """A hook of DDP's that waits for the other ranks."""
    buffer = bucket.buffer().div_(2)
    dist.all_reduce(buffer)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(buffer)
    return done


class Loop:
    """One way to run backward passes; by default the usual one."""

    model: Callable[[], nn.Module] = staticmethod(lambda: fresh(torch.float64))
    ddp: ClassVar[dict[str, Any]] = {}
    pace: ClassVar[dict[str, Any]] = {}

    def prepare(self, ddp: DistributedDataParallel) -> None:
        pass

    def loss(self, ddp: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSS(ddp(x), y)

    def backward(self, pace: Pace, loss: torch.Tensor) -> None:
        pace.backward(loss)


class Plain(Loop):
    pass


class Scaled(Loop):
    def __init__(self) -> None:
        self.scaler = torch.amp.GradScaler("cpu")

    def backward(self, pace: Pace, loss: torch.Tensor) -> None:
        pace.backward(loss, scaler=self.scaler)


class NothingToDo(Loop):
    pace: ClassVar[dict[str, Any]] = {"policy": Script(((0, 1),))}


class Sums(Loop):
    def backward(self, pace: Pace, loss: torch.Tensor) -> None:
        pace.backward(loss * 3, "sum", count=3)


class Unused(Loop):
    model = staticmethod(lambda: fresh(torch.float64, sometimes=True))
    ddp: ClassVar[dict[str, Any]] = {"find_unused_parameters": True}


class Static(Loop):
    ddp: ClassVar[dict[str, Any]] = {"static_graph": True}


class TwoForwardPasses(Loop):
    def loss(self, ddp: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return LOSS(ddp(x), y) + LOSS(ddp(x * 2), y)


class Compiled(Loop):
    """The loss comes from the compiled model itself."""

    model = staticmethod(lambda: torch.compile(WithLoss(fresh(torch.float64)), backend="aot_eager"))

    def loss(self, ddp: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return ddp(x, y)


class InPieces(Loop):
    pace: ClassVar[dict[str, Any]] = {"loop": "pieces", "micro_batch": 2}


class ByTheUser(Loop):
    def backward(self, pace: Pace, loss: torch.Tensor) -> None:
        pace.weighted(loss).backward()
        pace.host.backward_done()


class ByAHost(Loop):
    """Which only asks for the weight, in every other round."""

    def backward(self, pace: Pace, loss: torch.Tensor) -> None:
        (loss * pace.host.weight(loss)).backward()
        pace.host.backward_done()


class Reentrant(Loop):
    model = staticmethod(Again)


class WaitingHook(Loop):
    def prepare(self, ddp: DistributedDataParallel) -> None:
        ddp.register_comm_hook(None, sum_at_once)


# Ways in which no parameter needs a hook.
QUICK = (
    Plain,
    Scaled,
    NothingToDo,
    Sums,
    Unused,
    Static,
    TwoForwardPasses,
    Compiled,
    InPieces,
    ByTheUser,
)
WAYS = (*QUICK, ByAHost, Reentrant, WaitingHook)


def hooked_after(rank: int, ranks: int, way: type[Loop]) -> bool:
    """Whether the parameters had hooks at the end of rounds of this way."""
    store, name, loop = dist.distributed_c10d._get_default_store(), way.__name__, way()
    torch.manual_seed(3)
    model = loop.model().to(torch.float64)
    ddp = DistributedDataParallel(model, **loop.ddp)
    loop.prepare(ddp)
    pace, optimizer = Pace(ddp, BATCH, **{"policy": "equal", **loop.pace}), optimizer_of(model)
    meter = pace._loop._meter
    stop = meter.stop

    def telling(*more: Any) -> None:
        stop(*more)
        if rank == 0:
            store.set(f"{name}{pace.rounds}", "told")

    meter.stop = telling  # type: ignore[method-assign]
    for x, y, _ in pace.loader(Samples(BATCH * ROUNDS)):
        loss = loop.loss(ddp, x, y)
        if rank == 1 and pace.host.last:
            store.wait([f"{name}{pace.rounds}"], SECONDS)
        loop.backward(pace, loss)
        pace.step(optimizer)
    hooked = any(parameter._backward_hooks for parameter in model.parameters())
    pace.host.detach()
    return hooked


def test_round_is_reported_before_other_ranks_are_waited_for() -> None:
    hooked = run_cases(2, hooked_after, {way.__name__: {"way": way} for way in WAYS})
    assert hooked == {way.__name__: [way not in QUICK] * 2 for way in WAYS}, "a hook costs every pass"


def wrong_round(rank: int, ranks: int, foreign: bool) -> None:
    """A later round runs ``loss.backward()`` by itself, or has no backward pass."""
    model = fresh(torch.float64)
    ddp = DistributedDataParallel(model)
    pace, optimizer = Pace(ddp, BATCH, "equal"), optimizer_of(model)
    for x, y, _ in pace.loader(Samples(BATCH * ROUNDS)):
        if pace.rounds < 2:
            pace.backward(LOSS(ddp(x), y))
        elif foreign:
            LOSS(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # zeros are no gradients that somebody has computed


def test_foreign_and_missing_backward_passes_raise() -> None:
    for said in errors_of(2, wrong_round, True):
        assert "after a backward pass that is not Paceline's" in said
    for said in errors_of(2, wrong_round, False):
        assert "before all its gradients were there" in said
