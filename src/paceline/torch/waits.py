"""Notices each time that this process waits for other ranks, whatever function of torch it waits in.

What a rank spends in a collective is not its own time: the others' work is in it. Counted as its own, it would make
all ranks look equally fast, and nothing would be balanced. A program may wait anywhere: in a gathered metric, a loss
that is averaged over ranks, a barrier, a layer of FSDP2, DDP's broadcast of buffers. All that Python can wait in goes
through few functions, whatever name the program called: the collectives of ``ProcessGroup``, ``Work.wait``, a
``Future``'s, ``wait_tensor``. Those are replaced by functions that tell the listeners, from the first listener on
until the last one is gone. DDP's own all-reduce in C++ does not go through them; it is behind a rank's last gradient.

On a processor a collective blocks, so that its seconds on the host are the wait. On a device the stream waits: there
the listeners record an event at both ends.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from paceline.errors import PacelineError

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "monitored_barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced", "gather"),
    *("all_gather_single", "all_gather_single_coalesced", "alltoall", "alltoall_base", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "send", "recv", "recv_anysource"),
)
"""Methods of a process group, under their names in torch 2.6 to 2.15."""

BUFFERS = "broadcast of buffers"  # DDP's, before a forward pass

_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACELINE = os.path.dirname(os.path.dirname(__file__)) + os.sep

# By what ends each of them, see ``listen``.
_listeners: dict[Callable[[], None], tuple[Callable[[str], object], Callable[[], object]]] = {}
_replaced: list[tuple[Any, str, Any, Any]] = []  # owner, name, what was there, what is there now
_threads: set[int] = set()  # that have listened
_thread = threading.local()
_waited = 0.0  # seconds so far, while somebody listened


def listen(begins: Callable[[str], object], ends: Callable[[], object]) -> Callable[[], None]:
    """Tell of each wait of this thread, and of backward passes, until the function that is returned is called.

    begins: called with the collective's name before this process waits, or may; it may raise. ends: after it."""

    def stop() -> None:
        if _listeners.pop(stop, None) is not None and not _listeners:
            _put_back()

    _threads.add(threading.get_ident())
    if not _listeners and dist.is_available():
        _replace()
    _listeners[stop] = begins, ends
    return stop


def refuse(running: Callable[[], int | None], loop: str) -> Callable[[], None]:
    """Raise a PacelineError for each collective that the program calls while ``running`` gives the number of a round,
    until the function that is returned is called: ranks that run a round in unlike numbers of pieces would wait in it
    for ever. loop: how the training loop takes a round."""

    def begins(name: str) -> None:
        if name == BUFFERS or (step := running()) is None or (where := caller()) is None:
            return
        raise PacelineError(
            f"round {step}: {where[0]}:{where[1]} calls a collective ({name}) within the round, and with "
            f"loop={loop!r} the ranks run it in unlike numbers of pieces, so that some would wait for ever; call it "
            + ("if pace.merged" if loop == "local" else "after pace.step(optimizer), or use loop='whole'")
        )

    return listen(begins, lambda: None)


def now() -> float:
    """Seconds of a clock that stands still while this process waits for other ranks; call it outside of a wait."""
    return time.perf_counter() - _waited


def caller() -> tuple[str, int] | None:
    """File and line of the program that calls the collective of which ``begins`` is told; None if Paceline does."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != __file__:
        frame = frame.f_back  # out of the listener
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, __file__, "<")):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename.startswith(_PACELINE):
        return None
    return frame.f_code.co_filename, frame.f_lineno


def _replace() -> None:
    """Put functions that tell in place of those that wait."""
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
    def telling(*arguments: Any, **named: Any) -> Any:
        if getattr(_thread, "within", False) or not _ours() or _alone(arguments):
            return original(*arguments, **named)
        return _told(name, original, arguments, named)

    _replaced.append((owner, attribute, vars(owner)[attribute], telling))
    setattr(owner, attribute, telling)


def _ours() -> bool:
    """Whether this thread's waits hold up the training: a loader's thread, say, waits beside it."""
    return threading.get_ident() in _threads or torch._C._current_graph_task_id() != -1


def _alone(arguments: tuple[Any, ...]) -> bool:
    """Whether this is a collective of a group of one, which waits for nobody."""
    return bool(arguments) and isinstance(arguments[0], dist.ProcessGroup) and arguments[0].size() == 1


def _told(name: str, original: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
    global _waited
    _thread.within = True
    began, told = time.perf_counter(), []
    try:
        for begins, ends in tuple(_listeners.values()):
            begins(name)
            told.append(ends)
        return original(*arguments, **named)
    finally:
        for ends in told:
            ends()
        _waited += time.perf_counter() - began
        _thread.within = False


def _put_back() -> None:
    """Nobody listens any more. What another program has replaced since stays as it is."""
    for owner, attribute, before, telling in reversed(_replaced):
        if vars(owner)[attribute] is telling:
            setattr(owner, attribute, before)
    _replaced.clear()
