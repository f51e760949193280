"""A failure detector, and a test that distinguishes starved workers from frozen ones.

Both are called with the time and what was observed, so that they can be tested with made-up clocks. An observer that
was itself stopped blames no one: a long pause between two looks counts for little, and several looks are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

BEAT_SECONDS = 0.1  # between two heartbeats of an elastic run
EVERY = BEAT_SECONDS / 2  # seconds between two looks at them
LOOKS = 4  # without a new heartbeat, at least, until a process counts as silent
PAUSES = 3.0  # usual pauses that the time between two looks counts as, at most
UNBORN = b"0"  # the heartbeat of a process that has not begun, which may take any time
TIMES = 10  # a worker that has work may be silent this many times as long as a frozen one; then it hangs
SHARE = 0.5  # portion of the looks, and of the time between two, in which a worker that has work is active
PROCESSES = Path("/proc")


class Awake:
    """Counts the seconds between looks, but few of those in which the observer was stopped. pause: usual seconds."""

    def __init__(self, pause: float, now: float) -> None:
        self._most, self.last = PAUSES * pause, now

    def since(self, now: float) -> float:
        """Seconds since the last call, at most ``PAUSES`` pauses. now: as from ``time.monotonic``."""
        seconds, self.last = now - self.last, now
        return min(seconds, self._most)


class FailureDetector:
    """Finds the processes that give no heartbeat for too long.

    dead: seconds without a new heartbeat after which a process is silent. every: seconds between two looks.
    """

    def __init__(self, dead: float, every: float = EVERY) -> None:
        self._dead, self._every, self._awake = dead, every, Awake(every, 0.0)
        self._seen: dict[int, tuple[Any, float, int]] = {}  # heartbeat; seconds and looks without a new one

    def due(self, now: float) -> bool:
        """Whether to look again. now: as from ``time.monotonic``."""
        return now - self._awake.last >= self._every

    def silent(self, now: float, beats: Mapping[int, Any], least: float = 0.0) -> dict[int, float]:
        """The processes that have been silent for too long, and for how many seconds.

        beats: the newest heartbeat of each process, by number; one that is left out is forgotten. least: seconds of
        silence that are never too long.
        """
        seconds, seen = self._awake.since(now), {}
        for number, sign in beats.items():
            before, since, looks = self._seen.get(number, (UNBORN, 0.0, 0))
            still = sign == before != UNBORN
            seen[number] = (sign, since + seconds, looks + 1) if still else (sign, 0.0, 0)
        self._seen, most = seen, max(self._dead, least)
        return {
            number: since for number, (_, since, looks) in seen.items() if since >= most and looks >= LOOKS
        }

    def quiet(self, least: float) -> list[int]:
        """The processes that were silent for at least ``least`` seconds at the last look."""
        return [number for number, (_, since, _) in self._seen.items() if since >= least]


class Threads(NamedTuple):
    """The threads of one process. ready: whether one of them runs, or waits for a processor; stopped: whether one is
    stopped, as by SIGSTOP. spent: nanoseconds that each has run and has waited for a processor, by thread number, up
    to when it last got one."""

    ready: bool
    stopped: bool
    spent: Mapping[int, int]


def threads(pid: int) -> Threads | None:
    """The threads of a process, after proc(5): the state in ``stat``, running and waiting time in ``schedstat``,
    which some kernels lack. None if there is no such process, or no /proc."""
    states, spent = set(), dict[int, int]()
    try:
        for task in (PROCESSES / str(pid) / "task").iterdir():
            try:
                states.add((task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0])
                ran, waited, _ = (task / "schedstat").read_text().split()
                spent[int(task.name)] = int(ran) + int(waited)
            except (OSError, ValueError, IndexError):
                continue  # the thread has ended meanwhile, or the kernel does not count these times
    except OSError:
        return None
    return Threads("R" in states, bool(states & {"T", "t"}), spent) if states else None


class Starved:
    """Distinguishes workers of this machine that give no heartbeat because they lack a processor, or Python's lock
    while C code runs, from frozen ones: the former have work, as Linux counts it for each of their threads.

    A thread that sleeps is ready for an instant now and then, and one that has work may be between two pieces of it.
    So one look proves little: a worker has work if it had some in a share of ``SHARE`` of the looks in the last
    dead / 2 seconds. At a look it has some if a thread is ready, or if threads have run and waited for a processor
    for ``SHARE`` of the time since the look before; the waiting is counted when a thread gets a processor, so neither
    implies the other. A worker that is stopped, or whose threads cannot be read, has none.

    dead: seconds without a heartbeat until a frozen worker is lost. see: reads the threads of a process.
    """

    def __init__(self, dead: float, see: Callable[[int], Threads | None] = threads) -> None:
        self._many, self._see = max(LOOKS, round(dead / 2 / EVERY)), see
        self._before: dict[int, tuple[float, Threads]] = {}
        self._had: dict[int, deque[bool]] = {}  # whether each had work, at the last looks

    def look(self, now: float, pids: Mapping[int, int]) -> set[int]:
        """The workers that have work. pids: those of all workers that have been silent for dead / 2 or more, by
        worker number; earlier looks at other workers are forgotten."""
        for known in (self._before, self._had):
            for ident in known.keys() - pids.keys():
                del known[ident]
        return {ident for ident, pid in pids.items() if self._works(now, ident, pid)}

    def _works(self, now: float, ident: int, pid: int) -> bool:
        seen = self._see(pid)
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
