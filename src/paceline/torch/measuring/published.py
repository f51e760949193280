"""What one rank makes of a round's reports, in memory that all ranks share: the others take it as it is.

All ranks would make the same of the same reports. Where there are more ranks than processors, they would take the
time for it from one another, and all of them wait for the last. So the first rank that gets there makes it, and the
others leave it their processors meanwhile.
"""

from __future__ import annotations

import pickle
import struct
import time
from typing import Any
from zlib import crc32

from paceline.torch import memory
from paceline.torch.memory import Memory

BEGUN = struct.Struct("<q")  # the number that somebody is at
HEAD = struct.Struct("<qqI")  # number, length, checksum
START = BEGUN.size + HEAD.size
SLOTS = 2  # all ranks have taken a round in before anybody begins with the next
EACH = 1 << 18  # bytes of a slot; a page of them is only there once it is written
LENGTH = SLOTS * EACH
FIRST_PAUSE, GROWTH = 2e-4, 1.5  # between looks for what somebody is at
PATIENCE = 0.05  # seconds: who is at it may have failed


class Published:
    """memory: of ``LENGTH``, of which all ranks read and write, at first zeros."""

    def __init__(self, memory: Memory) -> None:
        self._content = memory.content
        memory.close_file()

    def wait(self, number: int) -> Any:
        """What another rank makes under this number; None where this rank should: it is the first, or has waited in
        vain. Numbers are above 0; where two ranks are first at the same time, both make it."""
        at, pause, waited = self._at(number), FIRST_PAUSE, 0.0
        if BEGUN.unpack_from(self._content, at)[0] != number:
            BEGUN.pack_into(self._content, at, number)
            return None
        while (found := self.find(number)) is None and waited < PATIENCE:
            time.sleep(pause)
            waited, pause = waited + pause, pause * GROWTH
        return found

    def put(self, number: int, made: Any) -> None:
        """Leave it for the others. Of what two ranks leave at once, the others find one, or nothing."""
        content = pickle.dumps(made, 5)
        if len(content) > EACH - START:
            return  # then each makes it by itself
        at = self._at(number)
        self._content[at + START : at + START + len(content)] = content
        HEAD.pack_into(self._content, at + BEGUN.size, number, len(content), crc32(content))

    def find(self, number: int) -> Any:
        """What stands under this number; None where there is nothing, or it is being written."""
        at = self._at(number)
        held, length, check = HEAD.unpack_from(self._content, at + BEGUN.size)
        if held != number or not 0 < length <= EACH - START:
            return None
        content = self._content[at + START : at + START + length]
        return pickle.loads(content) if crc32(content) == check else None

    def _at(self, number: int) -> int:
        return number % SLOTS * EACH


def shared() -> Published | None:
    """Of ranks that are all on one machine; None, for all of them, where they are not. Collective."""
    found = memory.common(LENGTH)
    return None if found is None else Published(found)
