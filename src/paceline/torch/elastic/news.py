"""What a worker gives its launcher and hears from it at any time, in threads: signs of life, and the generations."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from paceline.errors import WorkerError
from paceline.torch.elastic.generation import Generation

BEAT_SECONDS = 0.1  # between two signs of life
LONG = timedelta(days=30)
KEPT = 8  # generations


def life(ident: int) -> str:
    """The key of a worker's signs of life."""
    return f"life/{ident}"


class News:
    """connect: opens a connection to the launcher's store, for calls that may block."""

    def __init__(self, connect: Callable[[], Any], ident: int) -> None:
        self._connect, self._ident = connect, ident
        self._known: dict[int, Generation] = {}
        self.newest = self.hard = -1  # generation, and the newest of those that are hard
        self.lost = False  # the launcher has gone
        for name, target in (("signs of life", self._beat), ("generations", self._watch)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def generation(self, number: int) -> Generation | None:
        """The one with this number, one of the newest few; None where it is not known."""
        return self._known.get(number)

    def _beat(self) -> None:
        number = 0
        try:
            store = self._connect()
            while True:
                number += 1
                store.set(life(self._ident), str(number))
                time.sleep(BEAT_SECONDS)
        except (RuntimeError, WorkerError):
            self.lost = True

    def _watch(self) -> None:
        number = 0
        try:
            store = self._connect()
            while True:
                store.wait([f"generation/{number}"], LONG)
                found = Generation.decode(store.get(f"generation/{number}"))
                self._known[number] = found
                if found.hard:
                    self.hard = number
                self.newest = number
                self._known.pop(number - KEPT, None)
                number += 1
        except (RuntimeError, WorkerError):
            self.lost = True
