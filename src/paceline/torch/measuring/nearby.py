"""Messages between the ranks of one machine, in memory that they share: to tell and to hear takes no system call.

Each rank writes into memory of its own, which the others only read. A message stays there until its slot is written
again. It ends with a checksum, so that who reads while it is written sees that, in whatever order a processor writes.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from contextlib import suppress
from typing import NamedTuple
from zlib import crc32

from paceline.torch import peers

CHECK = struct.Struct("<I")  # behind each message


class _Where(NamedTuple):
    """By what the other processes of a machine open a rank's memory."""

    process: int
    file: int
    name: str  # which no other memory has, on whatever machine


class Nearby:
    """The memory of all ranks of this machine. Constructing it is collective.

    slots: how many messages of a rank are kept, each until the one so many numbers later. size: of a message, bytes.
    """

    def __init__(self, slots: int, size: int) -> None:
        self._slots, self._size, self._each = slots, size, size + CHECK.size
        length, rank = slots * self._each, peers.rank()
        self._own, where = _make(length)
        try:
            places = dict(enumerate(peers.gather(where)))
            opened = {other: _open(place, length) for other, place in places.items() if other != rank}
            found = {other: memory for other, memory in opened.items() if memory is not None}
            reached = peers.gather(sorted(found))
        finally:
            if where is not None:  # all have opened it by now
                os.close(where.file)
        self._others = {other: memory for other, memory in found.items() if rank in reached[other]}

    @property
    def ranks(self) -> list[int]:
        """The others that this rank hears so; each of them hears this one so, too."""
        return list(self._others)

    def tell(self, number: int, message: bytes) -> None:
        """Leave a message for the others, where they find it by its number."""
        at = number % self._slots * self._each
        self._own[at : at + self._each] = message + self._check(message)

    def hear(self, rank: int, number: int) -> bytes:
        """What stands in the place of this rank's message, perhaps another of its messages; b"" while that is being
        written."""
        at = number % self._slots * self._each
        read = self._others[rank][at : at + self._each]
        message = read[: self._size]
        return message if self._check(message) == read[self._size :] else b""

    def _check(self, message: bytes) -> bytes:
        return CHECK.pack(crc32(message))


def _make(length: int) -> tuple[mmap.mmap, _Where | None]:
    """Memory of this rank, and where others find it; None where this system has none that can be shared so."""
    name = f"paceline-{secrets.token_hex(16)}"
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not on Linux, or not allowed
        return mmap.mmap(-1, length), None
    os.ftruncate(file, length)
    return mmap.mmap(file, length), _Where(os.getpid(), file, name)


def _open(where: _Where | None, length: int) -> mmap.mmap | None:
    """Another rank's memory; None where it is on another machine, or in a container of its own."""
    if where is None:
        return None
    path = f"/proc/{where.process}/fd/{where.file}"
    with suppress(OSError, ValueError):
        if os.readlink(path).startswith(f"/memfd:{where.name}"):
            file = os.open(path, os.O_RDONLY)
            try:
                return mmap.mmap(file, length, prot=mmap.PROT_READ)
            finally:
                os.close(file)
    return None
