"""Memory that the processes of one machine share. It is in no directory, so nothing of it is left when they end."""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress
from typing import NamedTuple

from paceline.torch import peers


class Place(NamedTuple):
    """The place at which other processes of the machine open a memory, as long as its file is open."""

    process: int
    file: int
    name: str  # unique over all memories of all machines


class Memory:
    """Shared bytes, zero at first. file: its descriptor, for locks and for others to open; None if they cannot."""

    def __init__(self, content: mmap.mmap, file: int | None) -> None:
        self.content, self.file = content, file

    def close_file(self) -> None:
        """Close the file: processes that have it open keep it, and no others can open it. Safe to call twice."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def make(length: int) -> tuple[Memory, Place | None]:
    """Memory of this process, and its place for others; None if other processes of this system cannot find it."""
    name = f"paceline-{secrets.token_hex(16)}"
    try:
        file = os.memfd_create(name)
    except (AttributeError, OSError):  # not on Linux, or not allowed
        return Memory(mmap.mmap(-1, length), None), None
    os.ftruncate(file, length)
    return Memory(mmap.mmap(file, length), file), Place(os.getpid(), file, name)


def find(where: Place | None, length: int, writes: bool = False) -> Memory | None:
    """Another process's memory; None if it is on another machine, or cannot be seen from here.

    writes: this process also writes to it."""
    if where is None:
        return None
    path = f"/proc/{where.process}/fd/{where.file}"
    with suppress(OSError):
        if os.readlink(path).startswith(f"/memfd:{where.name}"):
            file = os.open(path, os.O_RDWR if writes else os.O_RDONLY)
            try:
                reach = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
                return Memory(mmap.mmap(file, length, prot=reach), file)
            except (OSError, ValueError):
                os.close(file)
    return None


def common(length: int) -> Memory | None:
    """Memory with a file that all ranks read and write; None if they are on several machines. Collective."""
    first = peers.rank() == 0
    own, place = make(length) if first else (None, None)
    where = peers.gather(place)[0]
    found = (own if where is not None else None) if first else find(where, length, writes=True)
    if all(peers.gather(found is not None)) and found is not None:
        return found
    for one in (own, found):
        if one is not None:
            one.close_file()
    return None
