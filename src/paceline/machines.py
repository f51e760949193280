"""Sizes of the workers' machines (processors, their speed, memory), for a first division of the work."""

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

ATTEMPTS, SIZE = 50, 8192  # runs of the probe, and the numbers whose exponentials one thread computes in each
BOOT = Path("/proc/sys/kernel/random/boot_id")  # one for each running kernel, the same in its containers


class Machine(NamedTuple):
    """One worker's machine, as that worker measures it.

    host: identifies the machine. processors: those the worker may run on. speed: probes per second on one of
    them. memory: bytes.
    """

    host: str
    processors: tuple[int, ...]
    speed: float
    memory: float


def measure() -> Machine:
    """Measures this process's machine, which takes some milliseconds."""
    processors = tuple(sorted(os.sched_getaffinity(0)))
    memory = float(os.sysconf("SC_PAGE_SIZE")) * os.sysconf("SC_PHYS_PAGES")
    return Machine(_host(), processors, _speed(), memory)


def sizes(machines: Sequence[Machine]) -> Machines:
    """Each worker's part of its machine: workers share the processors that they may run on, and the memory.

    cpus: processors. cores: processors times their speed. memory: bytes. Each of shape (n,).
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
    """Probes per second of the fastest of several attempts, which other processes disturb least."""
    numbers = np.linspace(-1.0, 1.0, SIZE)
    out, took = np.empty_like(numbers), []
    for _ in range(ATTEMPTS):
        began = time.perf_counter()
        np.exp(numbers, out=out)
        took.append(time.perf_counter() - began)
    return 1.0 / min(took)
