"""What the workers' machines are: processors, how fast, how much memory; for a first division of the work."""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from paceline.rounds import Machines

ATTEMPTS, SIZE = 50, 8192  # of the probe: exponentials of this many numbers, by one thread
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for a running kernel, whatever a container calls itself


class Machine(NamedTuple):
    """One worker's machine, as that worker finds it.

    host: which machine it is. processors: those the worker may run on. speed: probes per second on one of
    them. memory: bytes.
    """

    host: str
    processors: tuple[int, ...]
    speed: float
    memory: float


def measure() -> Machine:
    """This process's machine, in some milliseconds."""
    processors = tuple(sorted(os.sched_getaffinity(0)))
    memory = float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    return Machine(_host(), processors, _speed(), memory)


def sizes(machines: Sequence[Machine]) -> Machines:
    """Each worker's part of its machine: workers share the processors that they may run on, and the memory.

    cpus: processors. cores: processors, as fast as they are. memory: bytes. Each of shape (n,).
    """
    users = Counter((m.host, processor) for m in machines for processor in m.processors)
    neighbours = Counter(m.host for m in machines)
    cpus = np.array([sum(1 / users[m.host, processor] for processor in m.processors) for m in machines])
    return Machines(
        cpus,
        cpus * np.array([m.speed for m in machines]),
        np.array([m.memory / neighbours[m.host] for m in machines]),
    )


def _host() -> str:
    """A name that processes share if and only if they run on one machine."""
    try:
        return BOOT.read_text().strip()
    except OSError:  # hidden from a container
        return platform.node()


def _speed() -> float:
    """By the quickest of several attempts, which others on the machine disturb least."""
    numbers = np.linspace(-1.0, 1.0, SIZE)
    out, took = np.empty_like(numbers), []
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        np.exp(numbers, out=out)
        took.append(time.perf_counter() - began)
    return 1.0 / min(took)
