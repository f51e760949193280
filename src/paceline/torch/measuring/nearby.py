"""Messages between the ranks of one machine, in memory that they share: to tell and to hear takes no system call.

Each rank writes into memory of its own, which the others only read. A message stays there until its slot is written
again. It ends with a checksum, so that who reads while it is written sees that, in whatever order a processor writes.
"""

from __future__ import annotations

import struct
from zlib import crc32

from paceline.torch import memory, peers

CHECK = struct.Struct("<I")  # behind each message
WHOLE = crc32(CHECK.pack(crc32(b"")))  # the checksum of anything that ends with its own


class Nearby:
    """The memory of all ranks of this machine. Constructing it is collective.

    slots: how many messages of a rank are kept, each until the one so many numbers later. size: of a message, bytes.
    """

    def __init__(self, slots: int, size: int) -> None:
        self._slots, self._each = slots, size + CHECK.size
        length, rank = slots * self._each, peers.rank()
        own, place = memory.make(length)
        try:
            places = enumerate(peers.gather(place))
            opened = {other: memory.find(where, length) for other, where in places if other != rank}
            found = {other: one for other, one in opened.items() if one is not None}
            reached = peers.gather(sorted(found))
        finally:
            own.close_file()  # all have opened it by now
        for one in found.values():
            one.close_file()
        self._own = own.content
        self._others = {other: one.content for other, one in found.items() if rank in reached[other]}

    @property
    def ranks(self) -> list[int]:
        """The others that this rank hears so; each of them hears this one so, too."""
        return list(self._others)

    def tell(self, number: int, message: bytes) -> None:
        """Leave a message for the others, where they find it by its number."""
        at = number % self._slots * self._each
        self._own[at : at + self._each] = message + self._check(message)

    def hear(self, rank: int, number: int) -> bytes:
        """What stands in the place of this rank's message, perhaps another message, with its checksum; nothing while
        it is being written."""
        at = number % self._slots * self._each
        read = self._others[rank][at : at + self._each]
        return read if crc32(read) == WHOLE else b""

    def _check(self, message: bytes) -> bytes:
        return CHECK.pack(crc32(message))
