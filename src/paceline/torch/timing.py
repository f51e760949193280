"""A clock of a rank's own seconds, which stops while it waits for other ranks in any function of torch.

The time that a rank spends in a collective is not its own, since it includes the others' work. Counted as its own, it
would make all ranks look equally fast, and nothing would be balanced. A program may wait anywhere: in a gathered
metric, a loss averaged over ranks, a barrier, a layer of FSDP2, DDP's broadcast of buffers. All waits from Python
use a few functions: the collectives of ``ProcessGroup``, ``Work.wait``, ``Future.wait`` and ``wait_tensor``. These
are replaced by functions that notify the listeners, from the first listener on until the last one is gone. DDP's own
all-reduce in C++ does not go through them; it follows a rank's last gradient.

On a CPU a collective blocks, so its seconds on the host are the wait. On a device the stream waits, so the listeners
record an event at both ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch.hooks_of_torch import running_pass

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv", "recv_anysource"),
)
"""Methods of a process group, under their names in torch 2.6 to 2.15."""

BUFFERS = "broadcast of buffers"  # by DDP, before a forward pass
CALLED_THROUGH = (
    *("distributed_c10d.py", "c10d_logger.py", "_functional_collectives.py", "functional.py", "function.py"),
    *("_contextlib.py", "module.py"),
)  # files of torch through which a program calls a collective, also within a module's forward pass

# Packages that run a program's loop. Their frames are not the program's, whose own filter of their warnings
# (``filterwarnings("ignore", module="lightning")``) would hide those of Paceline.
FRAMEWORKS = ("lightning", "transformers", "accelerate", "trl", "sentence_transformers")
TORCH = os.path.dirname(torch.__file__) + os.sep
PACELINE = os.path.dirname(os.path.dirname(__file__)) + os.sep

# The two functions of each listener, by the function that ends it, see ``listen``.
_listeners: dict[Callable[[], None], tuple[Callable[[str], object], Callable[[], object]]] = {}
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, the original, its replacement
_threads: set[int] = set()  # threads that have listened


class Within(threading.local):
    """What this thread knows of the collective that it runs."""

    running = False
    arguments: tuple[Any, ...] = ()

    def set(self, running: bool, arguments: tuple[Any, ...] = ()) -> None:
        self.running, self.arguments = running, arguments


_thread = Within()
waited = 0.0  # seconds waited so far while there were listeners; changed here alone


def listen(begins: Callable[[str], object], ends: Callable[[], object]) -> Callable[[], None]:
    """Notify of each wait of this thread, and of backward passes, until the returned function is called.

    begins: called with the collective's name before a possible wait; it may raise. ends: called after it."""

    def stop() -> None:
        if _listeners.pop(stop, None) is not None and not _listeners:
            _put_back()

    _threads.add(threading.get_ident())
    if not _listeners and dist.is_available():
        _replace()
    _listeners[stop] = begins, ends
    return stop


def arguments() -> tuple[Any, ...]:
    """The arguments of the function that ``begins`` is notified of, of a process group's method with the group."""
    return _thread.arguments


def now() -> float:
    """Seconds of a clock that stops while this process waits for other ranks; call it outside of a wait."""
    return time.perf_counter() - waited


def caller(itself: bool = False) -> tuple[Any, tuple[str, int]] | None:
    """The frame, with file and line, where the program calls the collective that ``begins`` is notified of; None if
    Paceline does. itself: None also if a part of torch does, such as DistributedDataParallel or batch norm."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back  # leave the listener's own frames
    while frame is not None and (name := frame.f_code.co_filename).startswith((TORCH, __file__, "<")):
        if itself and name.startswith(TORCH) and not name.endswith(CALLED_THROUGH):
            return None
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(PACELINE):
        return None
    return frame, (frame.f_code.co_filename, frame.f_lineno)


def level() -> int:
    """The ``stacklevel`` of the program's own line, for a warning by the caller. Where a framework runs the loop, it
    is the line that calls the framework."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and not _of_program(frame):
        level, frame = level + 1, frame.f_back
    return level


def _of_program(frame: FrameType) -> bool:
    """Whether a frame is of neither torch, Paceline nor a framework."""
    own = frame.f_code.co_filename.startswith((TORCH, PACELINE, contextlib.__file__))
    return not own and str(frame.f_globals.get("__name__")).partition(".")[0] not in FRAMEWORKS


def _replace() -> None:
    """Replace the functions that wait by functions that also notify the listeners."""
    from torch.distributed import _functional_collectives as functional

    group = dist.ProcessGroup
    for name in COLLECTIVES:
        if name in vars(group):
            _put(group, name, name)
    _put(dist.Work, "wait", "wait")
    _put(torch._C.Future, "wait", "wait")
    _put(functional, "wait_tensor", "wait")
    _put(dist, "_broadcast_coalesced", BUFFERS)


def _put(owner: Any, attribute: str, name: str) -> None:
    original = getattr(owner, attribute)

    @functools.wraps(original)
    def notifying(*arguments: Any, **named: Any) -> Any:
        if _thread.running or not _ours() or _alone(arguments):
            return original(*arguments, **named)
        return _notified(name, original, arguments, named)

    _replaced.append((owner, attribute, vars(owner)[attribute], notifying))
    setattr(owner, attribute, notifying)


def _ours() -> bool:
    """Whether this thread's waits hold up the training; those of a loader's thread, for instance, do not."""
    return threading.get_ident() in _threads or running_pass() != -1


def _alone(arguments: tuple[Any, ...]) -> bool:
    """Whether this is a collective of a group of one rank, which does not wait."""
    return bool(arguments) and isinstance(arguments[0], dist.ProcessGroup) and arguments[0].size() == 1


def _notified(name: str, original: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    global waited
    _thread.set(True, arguments)
    began, notified = time.perf_counter(), []
    try:
        for begins, ends in tuple(_listeners.values()):
            begins(name)
            notified.append(ends)
        return original(*arguments, **named)
    finally:
        for ends in notified:
            ends()
        waited += time.perf_counter() - began
        _thread.set(False)


def _put_back() -> None:
    """Restore the original functions, except those that another program has replaced since."""
    for owner, attribute, before, notifying in reversed(_replaced):
        if vars(owner)[attribute] is notifying:
            setattr(owner, attribute, before)
    _replaced.clear()
