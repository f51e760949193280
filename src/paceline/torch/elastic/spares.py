"""Connections to the launcher's store that are opened ahead, so that nobody waits for one in a change of members.

Whoever opens one asks the name server for the name of its own address. Where none answers, that takes 5 s.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Spares:
    """``take`` one, and ``give`` it back as soon as no call on it can block. connect: opens one."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._open()

    def take(self) -> Any:
        """One that is in nobody else's use. Raises WorkerError where there is none, and the launcher has gone."""
        with self._lock:
            held = self._idle.pop() if self._idle else None
            last = not self._idle
        if last:
            self._open()
        return self._connect() if held is None else held

    def give(self, held: Any) -> None:
        """It is free again."""
        with self._lock:
            if len(self._idle) < 2:
                self._idle.append(held)

    def _open(self) -> None:
        def opened() -> None:
            with suppress(Exception):  # who needs one is told by ``take``
                self.give(self._connect())

        threading.Thread(target=opened, name="spare connection", daemon=True).start()
