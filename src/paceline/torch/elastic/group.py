"""Sums over the members of one membership epoch, which neither raise nor wait if a member is lost.

This is the only file that uses gloo's own classes.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch.elastic.messages import Signer
from paceline.torch.liveness.calls import Calls

_log = logging.getLogger(__name__)

TIMEOUT = timedelta(seconds=60)  # of a sum; the same members try again if one was only late
PROOFS = timedelta(seconds=5)  # to receive the proofs of all others that they belong to this run
SLICE = timedelta(milliseconds=20)  # of waiting for a sum between two looks at the members


class Group:
    """The members of one membership epoch, connected by gloo. Constructing it waits for all of them.

    Raises RuntimeError also if a process that answers in a member's place is not of this run: gloo does not check.
    """

    def __init__(self, pool: ConnectionPool, key: str, index: int, size: int, signer: Signer) -> None:
        held = pool.take()
        try:
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(key, held), index, size, TIMEOUT)
        finally:
            pool.give(held)
        self._open: list[Any] = []  # works that may be unfinished
        _made.append(self)
        proofs = [list(signer.mac(f"{key}/{index}/{to}")) for to in range(size)]
        mine = torch.tensor(proofs, dtype=torch.uint8)
        theirs = torch.zeros_like(mine)
        self._group.alltoall_base(theirs, mine, [], []).wait(PROOFS)  # type: ignore[attr-defined]  # no stub has it
        for of, row in enumerate(theirs):
            if bytes(row.tolist()) != signer.mac(f"{key}/{of}/{index}"):
                raise RuntimeError(f"the process that answers in the place of member {of} is not of this run")

    def sum(self, tensor: torch.Tensor) -> Any:
        """Start to sum ``tensor`` over all members, in place; for ``all_done``. All must sum in the same order."""
        return self._started(self._group.allreduce, [tensor])

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Start to send ``tensor`` from the member with this index to all others; for ``all_done``."""
        return self._started(self._group.broadcast, tensor, root)

    def all_done(self, works: Sequence[Any], lost: Callable[[], bool]) -> bool:
        """Wait for all of these works; False as soon as one has failed, or ``lost`` says that a member is lost."""
        for work in works:
            if work is None:
                return False
            done = False
            while not done:
                completed = work.is_completed()
                if not completed and lost():
                    return False
                try:
                    work.wait(SLICE)
                    done = True
                except RuntimeError:
                    if completed:  # otherwise perhaps only ``SLICE`` is over
                        return False
        return True

    @property
    def idle(self) -> bool:
        """Whether gloo has released all tensors that were passed to it."""
        return all(over(work) for work in self._open)

    def _started(self, call: Callable[..., Any], *arguments: Any) -> Any:
        with suppress(RuntimeError):
            work = call(*arguments)
            self._open = [*(one for one in self._open if not over(one)), work]
            return work
        return None


def over(work: Any) -> bool:
    """Whether gloo has released the tensor of this work; None for a work that could not start."""
    return work is None or bool(work.is_completed())


class ConnectionPool:
    """Connections to the launcher's store that are opened ahead: opening one looks up the name of this machine's own
    address, which takes 5 s if no name server answers. ``take`` one, and ``give`` it back as soon as no call on it
    can block. connect: opens one."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect, self._idle = connect, deque[Any](maxlen=2)
        self._open()

    def take(self) -> Any:
        """A connection that nothing else uses. Raises WorkerError if there is none, and the launcher has gone."""
        if len(self._idle) < 2:
            self._open()
        try:
            return self._idle.popleft()
        except IndexError:
            return self._connect()

    def give(self, held: Any) -> None:
        """Put a connection back that is free again."""
        self._idle.append(held)

    def _open(self) -> None:
        def opened() -> None:
            with suppress(Exception):  # ``take`` raises it when a connection is needed
                self.give(self._connect())

        threading.Thread(target=opened, name="spare connection", daemon=True).start()


# The groups that were made and are kept: a destructor waits for threads that a lost member may block, and closes
# connections from which others may still read the end of a sum.
_made: list[Group] = []


def connect(
    pool: ConnectionPool,
    key: str,
    index: int,
    size: int,
    lost: Callable[[], bool],
    signer: Signer,
) -> Group | None:
    """The group of a new membership epoch; None if a member is lost meanwhile, cannot be reached, or is not of this
    run.

    pool: connections to the launcher's store, through which the members find each other. key: of this epoch. index,
    size: this member's index, and the number of members. signer: of the run.
    """
    calls = Calls("connecting")
    made = calls.submit(Group, pool, key, index, size, signer)
    calls.close(0.0)  # the thread ends by itself
    while not wait([made], SLICE.total_seconds()).done:
        if lost():
            return None
    if (error := made.exception()) is not None:
        _log.info("not connected for %s: %s", key, error)
        return None
    return made.result()


def let_go(*in_use: Group | None) -> None:
    """Close the groups of earlier epochs in the background, except those ``in_use`` or not idle. Each group holds
    some threads, and a connection to each member."""
    for at in reversed(range(len(_made))):
        if all(_made[at] is not one for one in in_use) and _made[at].idle:
            # The last reference goes in the thread: a destructor may wait for as long as a sum may take.
            held = [_made.pop(at)]
            threading.Thread(target=held.clear, name="closing a group", daemon=True).start()
