"""Ports that are free until the test that asked for one has bound it.

A port that the system has just named may be taken before it is bound: the system gives each connection that is made
meanwhile one from the same range, and another test may be given it, too.
"""

from __future__ import annotations

import random
import socket
from collections import deque
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # from which the system takes the ports of connections
FIRST = 10_000
_held: deque[socket.socket] = deque(maxlen=64)  # bound to the names of the newest ports, as locks
_random = random.SystemRandom()  # a test's seed must not make two tests ask for the same ports


def free_port() -> int:
    """A port below those of connections, which no other test has; it is kept for the next 64 calls at least."""
    end = int(RANGE.read_text().split()[0])
    while True:
        port, lock = _random.randrange(FIRST, end), socket.socket(socket.AF_UNIX)
        try:
            lock.bind(f"\0port {port} of a test")  # an abstract name leaves no file
            with socket.socket() as bound:
                bound.bind(("127.0.0.1", port))
        except OSError:
            lock.close()
            continue
        if len(_held) == _held.maxlen:
            _held[0].close()
        _held.append(lock)
        return port


def locks() -> set[int]:
    """The file descriptors that keep the newest ports."""
    return {each.fileno() for each in _held}
