"""Calls that may never return, such as those to a store whose host is stopped, made by a thread of their own.

An executor's thread is not suitable: the program could not end while one of its calls hangs.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Calls:
    """One thread that makes calls one after the other. The caller decides how long it waits for an answer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Make the call when those before it have returned."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name=self._name, daemon=True)
            self._thread.start()
        answer: Future[T] = Future()
        self._asked.put((answer, lambda: call(*arguments)))
        return answer

    def within(self, seconds: float, call: Callable[..., T], *arguments: Any) -> T:
        """What the call returns. Raises TimeoutError if it has not returned after ``seconds``."""
        return self.submit(call, *arguments).result(min(seconds, threading.TIMEOUT_MAX))

    def close(self, seconds: float = 1.0) -> None:
        """End the thread, and wait ``seconds`` for it at most; a thread whose call hangs is abandoned."""
        if self._thread is not None:
            self._asked.put(None)
            self._thread.join(seconds)
            self._thread = None

    def _make(self) -> None:
        while (asked := self._asked.get()) is not None:
            answer, call = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)
            del asked, answer, call  # nothing is kept alive while the thread waits
