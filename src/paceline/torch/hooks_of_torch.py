"""Every name of torch that is not public and that the engine uses, in one place.

Tried on torch 2.13, and the oldest release that is allowed is 2.6 (FSDP2: 2.9). If a new release of torch breaks
something, look here first: each function says what is expected of torch. Nothing else in ``paceline.torch`` uses a
name of torch with an underscore, but for the functions that ``timing`` replaces, and ``torch._foreach_*``.
"""

from __future__ import annotations

import gc
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils.pin_memory import pin_memory as pin_memory

SUM, MEAN = 2, 1  # torch's numbers for these reductions of a loss

# -- backward passes -----------------------------------------------------------------------------------------

running_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that runs on this thread; -1 for none."""

at_end_of_pass: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Queue a function to be called at the end of the running backward pass, in the order of the queue."""


class GradientsOfPass:
    """Calls ``notify`` once in each backward pass that adds to the gradients of some of these parameters: before the
    first one is added, or, with ``last``, when the last one has come.

    It does nothing in ``torch.autograd.grad``, as in the inner loop of MAML, which adds to no gradient, and in which
    ``torch.autograd.graph.register_multi_grad_hook`` raises RuntimeError.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], notify: Callable[[], object], last: bool = True
    ) -> None:
        parameters = list(parameters)
        self._notify, self._last = notify, last
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in parameters]
        self._left: dict[int, int] = {}  # the gradients that are still to come in each running pass
        self._lock = threading.Lock()
        self._handles = [p.register_hook(self._came) for p in parameters]

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def _came(self, _: torch.Tensor) -> None:
        this = running_pass()
        with self._lock:  # a pass over several devices has a thread for each
            first = (left := self._left.get(this)) is None
            if left is None:
                try:
                    left = sum(map(torch._C._will_engine_execute_node, self._nodes))
                except RuntimeError:  # it is torch.autograd.grad with some of the parameters
                    return
            if left > 1:
                self._left[this] = left - 1
            else:
                self._left.pop(this, None)
        if left == 1 if self._last else first:
            self._notify()


def accumulates(node: Any) -> bool:
    """Whether the running pass adds to the gradient of a parameter, of which this is the node. It does not in
    ``torch.autograd.grad``."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # it is torch.autograd.grad with this parameter
        return False


def call_in_pass(loss: torch.Tensor, first: Any, key: int, notify: Callable[..., None]) -> None:
    """Call ``notify`` when a backward pass begins at ``loss``, whose graph node is ``first``.

    This does the same as ``loss.register_hook``, without the handle for its removal, which costs more than all the
    rest: the hook stays with the loss. key: replaces the hook of the same number."""
    hooks: Any = loss._backward_hooks
    if hooks is None:
        loss._backward_hooks = hooks = OrderedDict()
        first._register_hook_dict(loss)
    hooks[key] = notify


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether the program has registered hooks on a tensor. Ours and those of ``torch.autograd.graph`` only notice a
    pass, and DDP's are hooks of nodes."""
    hooks: Any = tensor._backward_hooks or {}
    notice = __name__, torch.autograd.graph.__name__
    return any(getattr(hook, "__module__", None) not in notice for hook in hooks.values())


def watched(nodes: Collection[Any]) -> bool:
    """Whether the program has hooks on a tensor that one of these nodes has made, or lets it keep its gradient."""
    return any(
        (each.retains_grad or has_hooks(each)) and each.grad_fn in nodes
        for each in gc.get_objects()
        if type(each) is torch.Tensor and not each.is_leaf
    )


def first_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> Any:
    """Register a hook on a tensor that has some, before these. Returns the handle for its removal."""
    hooks: Any = tensor._backward_hooks
    others = list(hooks.items())
    hooks.clear()  # torch calls them in the order of their insertion, which ``move_to_end`` does not change
    handle = tensor.register_hook(hook)
    hooks.update(others)
    return handle


def version(tensor: torch.Tensor) -> int:
    """A number that grows with each change of the tensor in place."""
    return tensor._version


def storage_uses(tensor: torch.Tensor) -> int | None:
    """The number of references to a tensor's memory; None if this torch does not tell."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else int(count(tensor.untyped_storage()._cdata))


# -- nodes of a graph ----------------------------------------------------------------------------------------


def reduction(node: Any) -> int:
    """``MEAN`` or ``SUM`` for the node of a loss with that reduction, else 0."""
    return int(getattr(node, "_saved_reduction", 0))


def nll_weights(node: Any) -> tuple[float, int]:
    """For the node of a negative log-likelihood: the sum of its targets' weights, and the number of targets."""
    return float(node._saved_total_weight), node._saved_target.numel()


PRODUCTS = "DotBackward", "MvBackward", "MmBackward", "BmmBackward"  # nodes that multiply and sum


def summed_rows(node: Any) -> int:
    """For the node of a sum over all elements, the first dimension of what it sums, or what a product sums over; 0 if
    unknown."""
    sizes: Any = getattr(node, "_saved_self_sym_sizes", ())
    if node.name().startswith(PRODUCTS):
        for name, dim in (("_saved_self", -1), ("_saved_tensor", 0), ("_saved_vec", 0), ("_saved_mat2", -2)):
            if isinstance(factor := getattr(node, name, None), torch.Tensor) and factor.ndim:
                return factor.shape[dim]
        return 0
    if not sizes and isinstance(summed := getattr(node, "_saved_self", None), torch.Tensor):  # nansum
        sizes = summed.shape
    return int(sizes[0]) if sizes else 0


def reduced(node: Any) -> int:
    """For the node of a sum, a mean, or a loss with such a reduction, the elements that it is over; 0 if unknown."""
    shape: Any = getattr(node, "_saved_self_sym_sizes", None)
    if shape is None:
        behind = [(one, index) for one, index in node.next_functions if one is not None]
        shapes = [output_shapes(one)[index] for one, index in behind if index < len(output_shapes(one))]
        shape = shapes[0] if shapes else (0,)
    return math.prod(shape) if all(isinstance(one, int) for one in shape) else 0


def saved_factors(node: Any) -> Iterator[torch.Tensor]:
    """The tensors that a node of a product or quotient has saved."""
    for name in ("_saved_other", "_saved_self"):
        if isinstance(factor := getattr(node, name, None), torch.Tensor):
            yield factor


def distances(node: Any) -> tuple[list[torch.Tensor], float]:
    """For the node of distances between rows: the tensors of these rows, and the exponent of the norm."""
    names = ("_saved_x1", "_saved_x2") if hasattr(node, "_saved_x1") else ("_saved_self",)
    return [getattr(node, name) for name in names], float(getattr(node, "_saved_p", 2.0))


def function_of(node: Any) -> type[Any]:
    """The custom autograd function of a node."""
    made: type[Any] = getattr(type(node), "_forward_cls", type(node))
    return made


def output_shapes(node: Any) -> list[Any]:
    """The shapes of a node's outputs, as it was run forward; empty if unknown."""
    return [each.shape for each in getattr(node, "_input_metadata", ())]


def zeros_for(node: Any, number: int) -> torch.Tensor:
    """A tensor of zeros in the form of this output of a node."""
    like = node._input_metadata[number]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


def dims(node: Any, many: int) -> list[int]:
    """The dimensions along which a node of a maximum or a sort works; all of ``many`` if it has none."""
    saved = getattr(node, "_saved_dim", ())
    found = [saved] if isinstance(saved, int) else list(saved)
    if not found or not many:
        return list(range(many))
    return [(dim - (1 << 64) if dim >> 63 else dim) % many for dim in found]  # as they are unsigned


def without_modes() -> AbstractContextManager[Any]:
    """A context without dispatch modes, in which the tensor of a Python number has no value."""
    return _disable_current_modes()


# -- modules -------------------------------------------------------------------------------------------------


def is_batch_norm(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.batchnorm._BatchNorm)


def is_dropout(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.modules.dropout._DropoutNd)


# -- DataLoader ----------------------------------------------------------------------------------------------


def dataloader_iterator(iterator: Any) -> tuple[bool, int]:
    """Of an iterator of a DataLoader: whether it gives batches in the order in which they were drawn, and how many it
    draws ahead."""
    ahead = getattr(iterator, "_num_workers", 0) * (getattr(iterator, "_prefetch_factor", None) or 0)
    return bool(getattr(iterator, "_in_order", True)), int(ahead)


def each_batch(iterator: Any, notify: Callable[[Any], None]) -> None:
    """Call ``notify`` with each batch that an iterator of a DataLoader is about to give to the loop; nothing happens
    for another iterator."""
    if (next_data := getattr(type(iterator), "_next_data", None)) is None:
        return
    own = weakref.ref(iterator)  # a circle would keep the processes of workers

    def noted() -> Any:
        batch = next_data(own())
        notify(batch)
        return batch

    iterator._next_data = noted


# -- DistributedDataParallel and FSDP2 -----------------------------------------------------------------------


def running_ddp() -> Any:
    """The DistributedDataParallel whose forward pass runs; None if there is none."""
    return DistributedDataParallel._active_ddp_module


def comm_hooks(ddp: DistributedDataParallel) -> list[Any]:
    """The communication hooks that were registered: the list is DDP's own, and grows with them."""
    found: list[Any] = getattr(ddp, "_comm_hooks", [])
    return found


def release(ddp: Any) -> None:
    """Free DDP's reducer. Otherwise gloo's thread may free its last work while Python ends, and abort."""
    if getattr(ddp, "reducer", None) is not None:
        ddp.reducer = None


def drop_accumulated(shards: Iterable[Any]) -> None:
    """Drop the gradients that FSDP2's micro-steps without a sum have left in the unsharded parameters, which
    ``zero_grad`` does not reach. (The names are those of torch 2.9 to 2.13.)"""
    for shard in shards:
        state = shard._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
            parameter.unsharded_accumulated_grad = None
            if (unsharded := getattr(parameter, "_unsharded_param", None)) is not None:
                unsharded.grad = None


# -- process groups ------------------------------------------------------------------------------------------


def group_seconds() -> Iterator[float]:
    """The timeouts of the default process group's backends, for those that show it."""
    group = dist.distributed_c10d._get_default_group()
    for device in ("cuda", "cpu"):
        try:
            span = group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):
            continue  # this group has no backend for such a device, or one that does not show its timeout
        yield float(span.total_seconds())
