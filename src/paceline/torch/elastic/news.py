"""What a worker gives its launcher and hears from it at any time, in threads: signs of life, and the generations."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

from paceline.errors import WorkerError
from paceline.torch.elastic.generation import Generation
from paceline.torch.elastic.messages import Seal
from paceline.torch.liveness.detector import BEAT_SECONDS

LONG = timedelta(days=30)
KEPT = 8  # generations
CLOSE_SECONDS = 2.0  # that a thread may take to end, as where the launcher stands still


def life(ident: int) -> str:
    """The key of a worker's signs of life."""
    return f"life/{ident}"


def told(number: int, ident: int) -> str:
    """The key by which a worker hears that there is a generation of this number; it may set it itself, to wake up."""
    return f"told/{number}/{ident}"


class News:
    """connect: opens a connection to the launcher's store, for calls that may block."""

    def __init__(self, connect: Callable[[], Any], ident: int, seal: Seal) -> None:
        self._connect, self._ident, self._seal = connect, ident, seal
        self._known: dict[int, Generation] = {}
        self.newest = self.hard = -1  # generation, and the newest of those that are hard
        self.lost = False  # the launcher has gone, or ``wrong`` says what else
        self.wrong = "the launcher, which keeps the ranks together, has gone"
        self._over = threading.Event()
        threads = (("signs of life", self._beat), ("generations", self._watch))
        self._threads = [threading.Thread(target=target, name=name, daemon=True) for name, target in threads]
        for thread in self._threads:
            thread.start()

    def close(self, store: Any) -> None:
        """No more signs of life. A thread that is in a call of torch's while Python ends would abort the process."""
        self._over.set()
        with suppress(RuntimeError):
            store.set(told(self.newest + 1, self._ident), "")  # what the thread waits for
        for thread in self._threads:
            thread.join(CLOSE_SECONDS)

    def generation(self, number: int) -> Generation | None:
        """The one with this number, one of the newest few; None where it is not known."""
        return self._known.get(number)

    def _beat(self) -> None:
        number = 0
        try:
            store = self._connect()
            while not self._over.wait(BEAT_SECONDS if number else 0):
                number += 1
                store.set(life(self._ident), str(number))
        except (RuntimeError, WorkerError):
            self.lost = True

    def _watch(self) -> None:
        number = 0
        try:
            store = self._connect()
            while not self._over.is_set():
                key = f"generation/{number}"
                if not store.check([key]):
                    store.wait([told(number, self._ident)], LONG)
                    continue
                found = Generation.of(self._seal.opened(key, store.get(key), "the launcher"))
                self._known[number] = found
                if found.hard:
                    self.hard = number
                self.newest = number
                self._known.pop(number - KEPT, None)
                number += 1
        except RuntimeError:
            self.lost = True
        except WorkerError as error:
            self.wrong, self.lost = str(error), True
