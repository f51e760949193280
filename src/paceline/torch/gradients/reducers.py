"""The ways to average a model's gradients over the ranks: by DDP, by FSDP2, or not at all.

Both leave the mean over the ranks in ``grad``, so one weight of the loss is right for both. They differ in how they
defer the average to the round's last micro-batch, and in where a rank waits for the others: in DDP once a round,
after its last gradient; in FSDP2 in each layer. ``elastic.member.Summing`` is a third way, whose sums may fail.
"""

# No `from __future__ import annotations` here: DDP inspects the hook's annotations as types.
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import hooks_of_torch

LOOKS = 16  # backward passes at the beginning that are checked
# The modules of all reducers, which put off their sums to a round's last pass; only ``Replicated`` changes it.
deferred: WeakSet[DistributedDataParallel] = WeakSet()
# Communication hooks that keep nothing for the next round.
STATELESS = "allreduce_hook", "fp16_compress_hook", "bf16_compress_hook", "weigh_in_hook"
Waits = Literal["never", "behind", "within"]
"""Where a backward pass waits for other ranks: behind the callbacks that were queued while it ran, or within it."""


class Reducer:
    """Sums the gradients of one model over the ranks. This base class is the reducer of a single process, which has
    nothing to sum, and of local steps, which sum no gradients."""

    averages = False  # ``grad`` holds the mean over the ranks after a round; else it holds the sum
    sums = False  # a round's last backward pass sums its gradients over the ranks
    carries_counts = False  # the counts that losses are means over are summed with the gradients
    remembers = False  # a communication hook may keep a part of a round's gradients for the next one
    lockstep = False  # all ranks must take the same number of micro-steps in a round
    waits: Waits = "never"
    ddp: Any = None  # the DistributedDataParallel to be released before the process group ends
    # Whether the coming backward pass reduces the gradients, so that ``check_sync`` may be left out if that is right;
    # None if it may not. A function in C, since it is called for each pass.
    reduces: Callable[[], bool | None] = bool

    def no_sync(self) -> AbstractContextManager[Any]:
        """A context in which backward passes leave the gradients on this rank."""
        return nullcontext()

    def check_sync(self, last: bool) -> None:
        """Raises PacelineError unless the coming backward pass reduces the gradients exactly if it is the round's
        ``last``."""

    def sums_next(self) -> bool | None:
        """Whether the coming backward pass sums the gradients that it leaves in the model; None if unknown."""
        return True

    def prepared(self) -> None:
        """A framework has made the coming backward pass sum its gradients, within the model's forward pass."""

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let ``hook`` reduce the gradients."""

    def runs_again(self, prepared: Callable[[], None]) -> None:
        """A forward pass may be left, and run again: what it has sent to the other ranks is not sent again.

        prepared: called after a forward pass that has made the next backward pass sum its gradients."""

    def drop(self) -> None:
        """The running round was left."""

    def close(self) -> None:
        """Remove all hooks from the model."""


class Sums:
    """The sums of a round of an ``elastic.member.Member``: ``begin`` before the last backward pass, if sums are to
    start while it runs; ``finish`` after it; ``apply`` when all sums are complete."""

    def begin(self, sum: Callable[[torch.Tensor], Any]) -> None:
        """The coming backward pass is the round's last: ``sum`` starts a sum."""

    def add(self) -> None:
        """A backward pass is done."""

    def drop(self) -> None:
        """The round was left, perhaps in the backward pass that was to be summed."""

    def used(self) -> list[bool]:
        """For each parameter, whether it has a gradient of this rank's own; empty if the others need not know."""
        return []

    def close(self) -> None:
        """Remove all hooks from the model."""


def _to_be_summed() -> bool:
    """Called in a hook of a wrapped module: whether DistributedDataParallel runs it, as ``ddp(x)`` or
    ``ddp.forward(x)``, and sums the gradients of the coming backward pass."""
    ddp = hooks_of_torch.running_ddp()
    return ddp is not None and ddp.require_backward_grad_sync and torch.is_grad_enabled()


class _Prepared:
    """Whether the coming backward pass sums the gradients: there was a forward pass, and no backward pass since. A
    class, so that its hooks can be copied and pickled with the model."""

    now = False

    def through(self, *_: Any) -> None:
        """The hook after a forward pass of the wrapped module."""
        self.now = self.now or _to_be_summed()

    def used(self, _: torch.Tensor) -> None:
        """The hook after a parameter's gradient."""
        self.now = False

    def by_framework(self) -> None:
        """A framework has prepared the pass itself."""
        self.now = True


class Replicated(Reducer):
    """The gradients are averaged by DistributedDataParallel."""

    averages = sums = True

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.ddp = ddp
        deferred.add(ddp)
        self._hooks = hooks_of_torch.comm_hooks(ddp)  # the user's
        self.reduces = type(None)  # while ``check_sync`` looks at forward passes, too
        self._prepared, self._looks = _Prepared(), LOOKS
        self._kept = list[Any]()  # handles of hooks that stay until the end
        self._handles = list[Any]()
        self._follow()

    @property
    def waits(self) -> Waits:  # type: ignore[override]
        return "within" if self._hooks else "behind"  # a hook may wait for the sum that it starts

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        return any(getattr(hook, "__name__", "") not in STATELESS for hook, _ in self._hooks)

    def no_sync(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()

    def check_sync(self, last: bool) -> None:
        if self.ddp.require_backward_grad_sync != last:
            raise PacelineError(
                "the model's no_sync() or require_backward_grad_sync was used within pace's loop; expected neither: "
                "Paceline itself reduces the gradients in each round's last backward pass"
            )
        if last and self._looks:
            if not self._prepared.now:
                raise PacelineError(
                    "pace.backward() was given a loss that DDP would not sum over the ranks; expected one of its own "
                    "forward pass ddp(x), not model(x), outside of no_sync() and before another backward pass"
                )
            self._looks -= 1
            if not self._looks:
                self._forget()  # the hooks cost time, and this mistake is usually made from the beginning
                self.reduces = partial(getattr, self.ddp, "require_backward_grad_sync")

    def sums_next(self) -> bool | None:
        if not self._handles:  # from now on: most programs have no further passes
            self._follow()
            return None
        return self._prepared.now and self.ddp.require_backward_grad_sync

    def prepared(self) -> None:
        self._prepared.by_framework()

    def runs_again(self, prepared: Callable[[], None]) -> None:
        def sent(*_: Any) -> None:  # after DDP has sent its buffers, and before the module's own forward pass
            self.ddp.require_forward_param_sync = False

        def through(*_: Any) -> None:
            if _to_be_summed():
                prepared()

        module = self.ddp.module
        self._kept += [module.register_forward_pre_hook(sent), module.register_forward_hook(through)]

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        if there := hooks_of_torch.comm_hooks(self.ddp):
            name = getattr(there[0][0], "__name__", "another")
            raise PacelineError(
                "weigh='hook' needs DistributedDataParallel's one communication hook, and the model has "
                f"{name} already; use weigh='loss', which needs none"
            )
        self.ddp.register_comm_hook(state, hook)

    def _follow(self) -> None:
        """Notice which forward passes prepare a sum."""
        trained = [p for p in self.ddp.parameters() if p.requires_grad]
        self._handles = [self.ddp.module.register_forward_hook(self._prepared.through)]
        self._handles += [p.register_post_accumulate_grad_hook(self._prepared.used) for p in trained]

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def close(self) -> None:
        self._forget()
        for handle in self._kept:
            handle.remove()
        deferred.discard(self.ddp)


class Sharded(Reducer):
    """The gradients are averaged by FSDP2. shards: the modules that were given to ``fully_shard``."""

    averages = sums = True
    waits: Waits = "within"
    lockstep = True  # every forward and backward pass gathers parameters from all ranks

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

    def drop(self) -> None:
        hooks_of_torch.drop_accumulated(self._shards)

    def _reduce(self, now: bool) -> None:
        for shard in self._shards:
            shard.set_requires_gradient_sync(now, recurse=False)


def reducer_of(model: torch.nn.Module, ranks: int) -> Reducer:
    """The reducer that suits ``model``, or the module that it wraps. Raises PacelineError if the model does not
    average its gradients, or does so in an unsupported way."""
    modules = list(model.modules())
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    if len(wrapped) == 1:
        if (members := wrapped[0].process_group.size()) != ranks:
            raise PacelineError(
                f"the DistributedDataParallel module is in a group of {members} ranks, and {ranks} take part in the "
                "run; expected a group of all ranks: start each group as a separate run"
            )
        return Replicated(wrapped[0])
    if not wrapped and ranks == 1:
        return Reducer()
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
    """DDP's communication hook for a loop whose loss cannot be changed: sums this rank's buffer times ``weight()``.

    DDP calls it with each bucket before it is averaged. Weighed by each rank's share of the round and summed, the
    buckets give the gradient of the whole batch (LB-BSP, weighted aggregation).
    """
    buffer = bucket.buffer().mul_(weight())
    work = dist.all_reduce(buffer, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def shards(modules: Iterable[torch.nn.Module]) -> list[Any]:
    """Those of the modules that were given to ``fully_shard``."""
    from torch.distributed.fsdp import FSDPModule  # takes long to import, and few programs need it

    return [module for module in modules if isinstance(module, FSDPModule)]


def check(model: torch.nn.Module, ranks: int) -> None:
    """Raise PacelineError unless every parameter is sharded over all ranks, on the CPU, and torch is new enough."""
    if not all(hasattr(module, "set_custom_all_gather") for module in shards(model.modules())):
        raise PacelineError(f"fully_shard of torch {torch.__version__} is untested; expected 2.9 or newer")
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
                f"fully_shard on {parameter.device.type}: it is untested whether a rank's own seconds can be "
                "distinguished from its waits in each layer there; use DistributedDataParallel"
            )
