"""How a model's gradients are averaged over the ranks: by DDP, by FSDP2, or not at all.

Both leave the mean over the ranks in ``grad``, so one weight of the loss serves both. They differ in how an average
is put off to the round's last micro-batch, and in where a rank waits for the others: in DDP once a round, after its
last gradient; in FSDP2 in each layer.
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as types.
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError

Waits = Literal["never", "behind", "within"]
"""Where a backward pass waits for other ranks: behind the callbacks that were queued while it ran, or within."""


class Alone:
    """One process: nothing to average."""

    averages = False  # what is in ``grad`` after a round is the mean over the ranks; else it is the sum
    counts = False  # it sums what the losses are means over, too
    in_step = False  # all ranks must take as many micro-steps in a round
    waits: Waits = "never"

    def no_sync(self) -> AbstractContextManager[Any]:
        """Backward passes in here leave the gradients on this rank."""
        return nullcontext()

    def check_sync(self, last: bool) -> None:
        """Raises PacelineError where the coming backward pass would not reduce the gradients in a round's last piece
        alone."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let ``hook`` reduce the gradients."""

    def release(self) -> None:
        """Let go of the model before the process group ends."""


class Replicated(Alone):
    """DistributedDataParallel."""

    averages = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self._ddp = ddp

    @property
    def waits(self) -> Waits:  # type: ignore[override]
        # a hook of the user's may wait for the sum that it starts; it is in a list without a public name
        return "within" if getattr(self._ddp, "_comm_hooks", ()) else "behind"

    def no_sync(self) -> AbstractContextManager[Any]:
        return self._ddp.no_sync()

    def check_sync(self, last: bool) -> None:
        if bool(self._ddp.require_backward_grad_sync) != last:
            raise PacelineError(
                "the model's no_sync() or require_backward_grad_sync was used within pace's loop; expected neither: "
                "Paceline itself reduces the gradients in each round's last backward pass"
            )

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        self._ddp.register_comm_hook(state, hook)

    def release(self) -> None:
        # otherwise gloo's thread may free its last work while Python ends, and abort
        self._ddp.reducer = None  # type: ignore[assignment]


class Sharded(Alone):
    """FSDP2: modules that were given to ``fully_shard``."""

    averages = True
    waits: Waits = "within"
    in_step = True  # every forward and backward pass gathers parameters from all ranks

    def __init__(self, shards: list[Any]) -> None:
        self._shards = shards

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._reduce(False)
        try:
            yield
        finally:
            self._reduce(True)

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        raise PacelineError("weigh='hook' needs DistributedDataParallel; with fully_shard use weigh='loss'")

    def _reduce(self, now: bool) -> None:
        for shard in self._shards:
            shard.set_requires_gradient_sync(now, recurse=False)


def parallel(model: torch.nn.Module, ranks: int) -> Alone:
    """How ``model``, or what it wraps, averages its gradients. Raises PacelineError where it does not, or in a way
    that is not supported."""
    modules = list(model.modules())
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if len(wrapped) == 1:
        if (members := wrapped[0].process_group.size()) != ranks:
            raise PacelineError(
                f"the DistributedDataParallel module is in a group of {members} ranks, and {ranks} take part in the "
                "run; expected a group of all: start each group as a run of its own"
            )
        return Replicated(wrapped[0])
    if not wrapped and ranks == 1:
        return Alone()
    if wrapped:
        raise PacelineError(
            f"{type(model).__name__} holds {len(wrapped)} DistributedDataParallel modules; expected one"
        )
    if sharded := shards(modules):
        check(model, ranks)
        return Sharded(sharded)
    raise PacelineError(
        f"{type(model).__name__} in a group of {ranks} ranks: expected a DistributedDataParallel module, or one that "
        "was given to fully_shard; wrap the model and pass the wrapped one"
    )


def weigh_in_hook(weight: Callable[[], float], bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """DDP's communication hook for a loop whose loss can't be touched: this rank's buffer times ``weight()``, summed.

    DDP hands each bucket to it before it is averaged. Weighed by each rank's share of the round and summed, the
    buckets give the gradient of the whole batch (LB-BSP, weighted aggregation).
    """
    buffer = bucket.buffer().mul_(weight())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def shards(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Those of the modules that were given to ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule  # takes long to load, and few need it

    return [module for module in modules if isinstance(module, FSDPModule)]


def check(model: torch.nn.Module, ranks: int) -> None:
    """Raise PacelineError unless every parameter is sharded over all ranks, on the CPU, and torch is new enough."""
    if not all(hasattr(module, "set_custom_all_gather") for module in shards(model.modules())):
        raise PacelineError(f"fully_shard of torch {torch.__version__} was not tried; expected 2.9 or newer")
    for name, parameter in model.named_parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is None or mesh.ndim != 1 or mesh.size() != ranks:
            how = (
                "is not sharded" if mesh is None else f"is laid out over a mesh of shape {tuple(mesh.shape)}"
            )
            raise PacelineError(
                f"parameter {name} {how}; expected fully_shard over one dimension of all {ranks} ranks: "
                "give the root module to fully_shard, and mix it with no other parallelism"
            )
        if parameter.device.type != "cpu":
            raise PacelineError(
                f"fully_shard on {parameter.device.type}: nobody has tried yet whether a rank's own seconds can be "
                "told from its waits in each layer there; use DistributedDataParallel"
            )
