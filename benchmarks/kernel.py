"""What the kernel's scheduler gives a process: time on a core, time ready without one; and shorter slices of it."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from typing import NamedTuple

SET_ATTRIBUTES = {"x86_64": 314, "aarch64": 274}  # numbers of the system call sched_setattr


class Times(NamedTuple):
    """Seconds of this process so far: its main thread on a core and ready without one, and all others likewise."""

    running: float
    ready: float
    others_running: float
    others_ready: float

    def since(self, before: Times) -> Times:
        return Times(*(now - then for now, then in zip(self, before, strict=True)))


def times() -> Times:
    """As the kernel counts them, exactly."""
    own, others = [0, 0], [0, 0]
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                running, ready, _ = map(int, file.read().split())
        except OSError:  # it has ended
            continue
        sums = own if int(thread) == os.getpid() else others
        sums[0] += running
        sums[1] += ready
    return Times(*(nanoseconds / 1e9 for nanoseconds in (*own, *others)))


def slices(milliseconds: float) -> None:
    """Have all threads of this process scheduled in slices of this length, 0 for the kernel's own.

    A thread with shorter slices gets no more of a core, but when it wakes up it need not wait until another program's
    slice is over. Any user may do so, on Linux from 6.12; elsewhere nothing changes.
    """
    number = SET_ATTRIBUTES.get(platform.machine())
    if number is None:
        return
    system = ctypes.CDLL(None)
    for thread in map(int, os.listdir("/proc/self/task")):
        nice = os.getpriority(os.PRIO_PROCESS, thread)
        # struct sched_attr: size, policy (SCHED_OTHER), flags, nice, priority, runtime, deadline, period
        attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, round(milliseconds * 1e6), 0, 0)
        system.syscall(number, thread, attributes, 0)
