"""Sums over the members of one generation, with nothing that raises or waits for a member that is lost.

This is the one file that uses gloo's own classes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from paceline.torch.elastic.messages import Seal
from paceline.torch.elastic.spares import Spares

_log = logging.getLogger(__name__)

TIMEOUT = timedelta(
    seconds=60
)  # of a sum; who is only late is waited for again, in a generation of the same members
PROOFS = timedelta(seconds=5)  # to hear from all others that they are of this run
SLICE = timedelta(milliseconds=20)  # how long a sum is waited for before a look at the members


class Group:
    """The members of one generation, connected by gloo. Constructing it waits for all of them."""

    def __init__(self, store: Any, index: int, size: int) -> None:
        self._group: Any = dist.ProcessGroupGloo(store, index, size, TIMEOUT)
        self._open: list[Any] = []  # works that may be under way

    def sum(self, tensor: torch.Tensor) -> Any:
        """Start to sum ``tensor`` over all, in place; for ``all_done``. In the same order on all members."""
        try:
            return self._noted(self._group.allreduce([tensor]))
        except RuntimeError:
            return None

    def broadcast(self, tensor: torch.Tensor, root: int) -> Any:
        """Start to send ``tensor`` from the member with this index to all others; for ``all_done``."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        try:
            return self._noted(self._group.broadcast([tensor], options))
        except RuntimeError:
            return None

    def all_done(self, works: Sequence[Any], lost: Callable[[], bool]) -> bool:
        """Wait for all of these; False as soon as one has failed, or ``lost`` says that somebody is."""
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
                    if completed:  # else perhaps only the time is over
                        return False
        return True

    def swap(self, mine: torch.Tensor) -> torch.Tensor:
        """Row i of ``mine`` for member i; a row of each member, by index. Raises RuntimeError after a while."""
        theirs = torch.zeros_like(mine)
        self._group.alltoall_base(theirs, mine, [], []).wait(PROOFS)
        return theirs

    @property
    def idle(self) -> bool:
        """Whether gloo has let go of all that it was given."""
        return all(over(work) for work in self._open)

    def _noted(self, work: Any) -> Any:
        self._open = [one for one in self._open if not over(one)]
        self._open.append(work)
        return work


def over(work: Any) -> bool:
    """Whether gloo has let go of the tensor."""
    return work is None or bool(work.is_completed())


# Those that were made. The destructor of one waits for threads that a lost member may block, and closes connections
# from which others may still read the end of a sum.
_made: list[Group] = []


def connect(
    stores: Spares,
    key: str,
    index: int,
    size: int,
    lost: Callable[[], bool],
    seal: Seal,
) -> Group | None:
    """The group of a new generation; None where a member is lost meanwhile, cannot be reached, or is not of this run.

    stores: connections to the launcher's store, by which the members find each other. key: of this generation. seal:
    of the run.
    """
    found: list[Group] = []
    through = threading.Event()

    def run() -> None:
        try:
            held = stores.take()
            try:
                made = Group(dist.PrefixStore(key, held), index, size)
            finally:
                stores.give(held)
            check(made, key, index, size, seal)
            found.append(made)
            _made.append(made)
        except Exception as error:
            _log.info("not connected for %s: %s", key, error)
        finally:
            through.set()

    threading.Thread(target=run, name="connecting", daemon=True).start()
    while not through.wait(SLICE.total_seconds()):
        if lost():
            return None
    return found[0] if found else None


def check(group: Group, key: str, index: int, size: int, seal: Seal) -> None:
    """Make sure that whoever has answered in the place of each member is of this run: gloo asks nobody.

    Raises RuntimeError where somebody is not, or does not answer."""
    mine = torch.tensor([list(seal.proof(f"{key}/{index}/{to}")) for to in range(size)], dtype=torch.uint8)
    for of, row in enumerate(group.swap(mine)):
        if bytes(row.tolist()) != seal.proof(f"{key}/{of}/{index}"):
            raise RuntimeError(f"what answers in the place of member {of} is not of this run")


def let_go(*in_use: Group | None) -> None:
    """Close the groups of earlier generations, beside the training; not those that may be in use. Each holds some
    threads, and a connection to each member."""
    for group in list(_made):
        if all(group is not one for one in in_use) and group.idle:
            _made.remove(group)
            # The last reference goes in the thread.
            threading.Thread(target=lambda held: held.clear(), args=([group],), daemon=True).start()
