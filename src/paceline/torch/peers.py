"""The ranks that take part: their machines and links, exchanges between them, and whether their options agree."""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import constants

from paceline.errors import PacelineError
from paceline.machines import Machine, measure, sizes
from paceline.rounds import Array, Machines
from paceline.torch import hooks_of_torch

T = TypeVar("T")


_company: Any = None  # the ranks of a run without a process group, see ``elastic.link.LauncherLink``
SENT, TIMES = 1 << 18, 2  # bytes sent there and back to measure a link, and how often
MOST_LINKS = 64  # links that are measured at most
LAST_SECONDS = (
    5.0  # that a rank waits for another to print the error of both, unless its launcher ends it before
)
LONGEST = 1e7  # largest timeout in seconds, since a thread's wait is limited, too
_collected: list[bool] = []  # for each fork in progress: whether garbage collection was enabled when it began


def keep_company(company: Any) -> None:
    """Replace the ranks of the process group by those of ``company``; None restores those of the group."""
    global _company
    _company = company


def rank() -> int:
    """This process's rank; 0 outside of a process group."""
    if _company is not None:
        return int(_company.rank)
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    """n; 1 outside of a process group."""
    if _company is not None:
        return int(_company.ranks)
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(item: Any) -> list[Any]:
    """``item`` of every rank, by rank. Collective."""
    if _company is not None:
        return list(_company.gather(item))
    if ranks() == 1:
        return [item]
    items: list[Any] = [None] * ranks()
    dist.all_gather_object(items, item)
    return items


def agree(facts: dict[str, Any], extra: Any = None, **advice: str) -> list[Any]:
    """Make sure that all ranks were given the same ``facts``; returns every rank's ``extra``. Collective.

    advice: what to do if the fact of this name differs. Raises PacelineError on every rank, naming the first rank and
    the first fact that differ from rank 0's.
    """
    everyone = gather((facts, extra))
    for other, (theirs, _) in enumerate(everyone):
        for name, value in everyone[0][0].items():
            if theirs[name] != value:
                _raise(
                    f"rank {other} was given {name}={theirs[name]!r} and rank 0 {name}={value!r}; "
                    f"expected the same on every rank{advice.get(name, '')}",
                    0,
                )
    return [theirs for _, theirs in everyone]


class Repeated(PacelineError):
    """An error that another rank raises as well, and prints: this rank ends without its own traceback."""


def _raise(words: str, first: int) -> NoReturn:
    """Raise PacelineError with these words on all ranks; ``first`` is the one that prints it."""
    if rank() == first:
        raise PacelineError(words)
    _silence()
    raise Repeated(words)


@functools.cache
def _silence() -> None:
    """Let ``Repeated`` end this process without a traceback; the first rank of another machine prints its words.

    A launcher that sees this process end terminates the others: so the rank that prints the traceback ends first."""
    before = sys.excepthook

    def shown(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, Repeated):
            before(kind, error, trace)
            return
        if os.environ.get("LOCAL_RANK") == "0":
            before(PacelineError, PacelineError(str(error)), None)
        time.sleep(LAST_SECONDS)

    sys.excepthook = shown


def together(action: Callable[[], T]) -> T:
    """What ``action`` returns on this rank; a PacelineError on any rank is raised on all of them. Collective."""
    result, complaint, own = None, "", None
    try:
        result = action()
    except PacelineError as error:
        complaint, own = str(error), error
    for other, words in enumerate(gather(complaint)):
        if words:
            if own is not None and other == rank():
                raise own
            _raise(words, other)
    return result  # type: ignore[return-value]  # there was no complaint, so there is a result


def timeout() -> float:
    """Seconds after which the process group gives up a collective that a rank has not joined."""
    if not dist.is_initialized():
        return constants.default_pg_timeout.total_seconds()
    usual = constants.default_pg_timeout.total_seconds()
    return next((min(seconds, LONGEST) for seconds in hooks_of_torch.group_seconds()), usual)


def own_store(timeout: float, first: Mapping[str, str | bytes] | None = None) -> dist.TCPStore:
    """A TCPStore on rank 0, at the rendezvous host, separate from the process group's store. Collective.

    timeout: seconds to reach it, and to wait for a missing key. first: the keys that it holds from the beginning.
    A call hangs as long as rank 0 is stopped, regardless of the timeout. No rank returns before all are connected:
    rank 0 may then fail in a check, leave, and take the store with it.
    Raises PacelineError on every rank if one of them cannot reach it.
    """
    let_forks_alone()
    wait = timedelta(seconds=timeout)
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")

    def connect(there: tuple[str, int]) -> dist.TCPStore:
        try:
            return dist.TCPStore(*there, ranks(), rank() == 0, wait_for_workers=False, timeout=wait)
        except RuntimeError as error:
            raise PacelineError(
                f"rank {rank()} cannot reach rank 0 at {there[0]}, where the ranks report their speeds; expected "
                "MASTER_ADDR to name rank 0's machine, and any port of it to be open to the other ranks"
            ) from error

    def begin() -> dist.TCPStore:
        store = connect((host, 0))
        for key, value in (first or {}).items():
            store.set(key, value)  # type: ignore[arg-type]  # the store keeps bytes
        return store

    hosted = together(lambda: begin() if rank() == 0 else None)
    there = gather(None if hosted is None else (host, hosted.port))[0]
    return together(lambda: connect(there) if hosted is None else hosted)


def machines() -> Machines:
    """Every rank's part of its machine, for policies that divide the load by it. Collective."""
    return sizes([Machine(*each) for each in gather(tuple(measure()))])


def links() -> Array | None:
    """Seconds that 256 kB take over each rank's own link and back, (n,); None if it is not measured. Collective.

    A pair of ranks is as slow as the slower of its links. So each rank exchanges with its neighbour, and then with
    one rank of the fastest pair, one after the other; a rank's shortest exchange is that of its own link.
    """
    n, own, message = ranks(), rank(), torch.zeros(SENT, dtype=torch.uint8)
    if _company is not None or not 3 <= n <= MOST_LINKS or dist.get_backend() != dist.Backend.GLOO:
        return None

    def exchange(first: int, second: int) -> float:
        took = math.inf
        sizes = (1, *[SENT] * TIMES) if own in (first, second) else ()  # after the first, both are there
        for size in sizes:
            began = time.perf_counter()
            for sends in (own == first, own != first):
                (dist.send if sends else dist.recv)(message[:size], first + second - own)
            took = min(took, time.perf_counter() - began) if size > 1 and own == first else took
        return took

    ring = np.array(gather([exchange(one, (one + 1) % n) for one in range(n)])).min(axis=1)
    quick = int(np.argmin(ring))
    star = np.array(gather(min(exchange(one, quick) for one in range(n) if one != quick)))
    return np.minimum(np.minimum(ring, np.roll(ring, 1)), star)


def joined() -> bool:
    """True inside a process group."""
    return dist.is_available() and dist.is_initialized()


@functools.cache
def let_forks_alone() -> None:
    """Make forked children, such as a DataLoader's workers, never collect objects from before the fork.

    The threads of stores and groups do not exist there. If the child's garbage collector finds a store or group that
    the rank has released, the destructor waits for such a thread and ends the child with a segmentation fault.
    """
    os.register_at_fork(before=_stop_collecting, after_in_parent=_collect_on, after_in_child=_leave_alone)


def _stop_collecting() -> None:
    # The hooks of other modules run in the child before ``_leave_alone``, and might trigger a collection.
    _collected.append(gc.isenabled())
    gc.disable()


def _collect_on() -> None:
    if _collected.pop():
        gc.enable()


def _leave_alone() -> None:
    gc.freeze()
    if any(_collected):
        gc.enable()
    _collected.clear()
