"""Tells workers of this machine that give no sign of life for want of a processor, or of Python's lock while C code
runs, from those that are frozen: the former have work, as Linux counts it for each of their threads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from paceline.torch.elastic.signs import EVERY, LOOKS

TIMES = 10  # as long as a frozen one may a worker that has work be silent: then it is in an endless loop
SHARE = 0.5  # of the looks, and of the time between two of them, from which on a worker has work
PROCESSES = Path("/proc")


class Threads(NamedTuple):
    """Of one process. ready: whether one of them runs, or waits for a processor; stopped: whether one is stopped, as
    by SIGSTOP. spent: nanoseconds that each has run and has waited for a processor, by its number, up to when it last
    got one."""

    ready: bool
    stopped: bool
    spent: Mapping[int, int]


def threads(pid: int) -> Threads | None:
    """Those of a process, after proc(5): the state in ``stat``, running and waiting time in ``schedstat``, which some
    kernels lack. None where there is no such process, or no /proc."""
    states, spent = set(), dict[int, int]()
    try:
        for task in (PROCESSES / str(pid) / "task").iterdir():
            try:
                states.add((task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0])
                ran, waited, _ = (task / "schedstat").read_text().split()
                spent[int(task.name)] = int(ran) + int(waited)
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile, or the kernel counts no such times
    except OSError:
        return None
    return Threads("R" in states, bool(states & {"T", "t"}), spent) if states else None


class Starved:
    """Looks at silent workers, again and again. dead: seconds without a sign of life until a frozen one is lost.

    A thread that sleeps is ready for an instant now and then, and one that has work may be between two pieces of it.
    So one look says little: a worker has work where it had some in a share of ``SHARE`` of the looks in the last
    dead / 2 seconds. At a look it has some if a thread is ready, or if threads have run and waited for a processor
    for ``SHARE`` of the time since the look before; the waiting is counted when a thread gets a processor, so neither
    implies the other. One that is stopped, or cannot be seen, has none.

    see: as ``threads``. clock: seconds, as ``time.monotonic`` tells them.
    """

    def __init__(
        self,
        dead: float,
        see: Callable[[int], Threads | None] = threads,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._many, self._see, self._clock = max(LOOKS, round(dead / 2 / EVERY)), see, clock
        self._before: dict[int, tuple[float, Threads]] = {}
        self._had: dict[int, deque[bool]] = {}  # work, at the last looks

    def look(self, pids: Mapping[int, int]) -> set[int]:
        """Those of the workers that have work. pids: of all that have been silent for dead / 2 or more, by their
        numbers; of the others, what was seen is forgotten."""
        for known in (self._before, self._had):
            for ident in known.keys() - pids.keys():
                del known[ident]
        return {ident for ident, pid in pids.items() if self._works(ident, pid)}

    def _works(self, ident: int, pid: int) -> bool:
        now, seen = self._clock(), self._see(pid)
        if seen is None or seen.stopped:
            self._before.pop(ident, None)
            self._had.pop(ident, None)
            return False
        has = seen.ready
        if ident in self._before:
            since, before = self._before[ident]
            grown = sum(ns - before.spent.get(number, 0) for number, ns in seen.spent.items())
            has |= grown / 1e9 >= SHARE * (now - since) > 0
        self._before[ident] = now, seen
        had = self._had.setdefault(ident, deque(maxlen=self._many))
        had.append(has)
        return sum(had) >= SHARE * len(had)
