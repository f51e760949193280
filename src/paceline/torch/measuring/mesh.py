"""A connection from every rank to every other, for the few numbers that they tell each other each round.

A message costs its sender one system call and its receiver another, and no third process or thread has to run for it:
what a rank is to hear lies in the system's buffers when it asks.
"""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from contextlib import closing, suppress
from typing import NamedTuple

from paceline.errors import PacelineError
from paceline.torch import peers

_log = logging.getLogger(__name__)
MEETING_SECONDS = 15.0  # for all ranks to reach each other
GREETING_SECONDS = 2.0  # for one that has connected to say who it is
KEY = 16  # bytes, known to the ranks alone
GREETING = KEY + 4


class _Door(NamedTuple):
    """Where a rank is reached by the others while they meet."""

    host: str
    port: int
    key: bytes


def meet(seconds: float = MEETING_SECONDS) -> dict[int, socket.socket]:
    """A connection that does not block to each other rank, in the order of the ranks. Collective.

    Raises PacelineError, on every rank, where one cannot be reached by another within these seconds.
    """
    met: dict[int, socket.socket] = {}
    with closing(_listener()) as listener:
        key = secrets.token_bytes(KEY)
        doors = peers.gather(_Door(_own_address(), listener.getsockname()[1], key))
        try:
            peers.together(lambda: _meet(doors, listener, time.monotonic() + seconds, met))
        except PacelineError:
            part(met, os.getpid())
            raise
    return dict(sorted(met.items()))


def part(met: dict[int, socket.socket], process: int) -> None:
    """End these connections of ``process``. What was sent by them still arrives."""
    for other in met.values():
        with suppress(OSError):
            # What is left unread would take back what was sent. A forked child reads nothing of its parent's.
            while os.getpid() == process and other.recv(1 << 16):
                pass
        other.close()
    met.clear()


def wait_for(other: socket.socket, seconds: float) -> None:
    """Until something has come from this rank, or so many seconds are over."""
    ready = select.poll()
    ready.register(other, select.POLLIN)
    ready.poll(1e3 * seconds)


def _meet(doors: list[_Door], listener: socket.socket, until: float, met: dict[int, socket.socket]) -> None:
    """Call on the ranks before this one, and let those behind it in."""
    rank, other = peers.rank(), 0
    try:
        for other, (host, port, key) in enumerate(doors[:rank]):
            met[other] = socket.create_connection((host, port), _left(until))
            met[other].sendall(key + rank.to_bytes(4, "little"))
        while len(met) < len(doors) - 1:
            other = next(each for each in range(rank + 1, len(doors)) if each not in met)
            listener.settimeout(_left(until))
            guest, _ = listener.accept()
            name = _greeting(guest, min(_left(until), GREETING_SECONDS))
            who = int.from_bytes(name[KEY:], "little")
            known = name[:KEY] == doors[rank].key and rank < who < len(doors) and who not in met
            if known:
                met[who] = guest
            else:  # somebody else on the network
                guest.close()
    except OSError as error:
        raise PacelineError(
            f"rank {rank} and rank {other} cannot reach each other at {doors[min(rank, other)].host}: {error}; "
            "expected the ranks' machines to be open to each other"
        ) from error
    for each in met.values():
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _greeting(guest: socket.socket, seconds: float) -> bytes:
    """What a guest says of itself, or less."""
    guest.settimeout(seconds)
    heard = b""
    with suppress(OSError):
        while len(heard) < GREETING and (more := guest.recv(GREETING - len(heard))):
            heard += more
    return heard


def _left(until: float) -> float:
    return max(until - time.monotonic(), 1e-3)


def _listener() -> socket.socket:
    """On any free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # IPv6 may be turned off
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=peers.ranks()
            )
    return socket.create_server(("", 0), backlog=peers.ranks())


def _own_address() -> str:
    """By which the others reach this rank: that from which it reaches rank 0."""
    there = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if peers.rank() == 0:
        return there
    for family, kind, protocol, _, address in socket.getaddrinfo(there, 9, type=socket.SOCK_DGRAM):
        with suppress(OSError), socket.socket(family, kind, protocol) as towards:
            towards.connect(address)  # sends nothing
            return str(towards.getsockname()[0])
    return there
