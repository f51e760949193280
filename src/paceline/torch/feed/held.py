"""Samples that a rank has drawn from its stream and not used yet, single ones or batches to be cut and joined."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from paceline.torch.feed.nested import joined, length, part


class Held(Protocol):
    """In the order in which they were drawn."""

    @property
    def count(self) -> int:
        """Of samples."""
        ...

    def add(self, item: Any) -> None:
        """Take what the stream gave."""
        ...

    def take(self, count: int) -> Any:
        """A batch of the first ``count`` samples."""
        ...

    def back(self, batch: Any) -> None:
        """Put what was taken last where it was."""
        ...

    def batch(self, taken: Any) -> Any:
        """What the loop is given of what was taken."""
        ...

    def cut(self, taken: Any, start: int, end: int) -> Any:
        """A part of what was taken."""
        ...

    def state(self) -> list[Any]:
        """What ``add`` is given again, one after the other."""
        ...


class Samples:
    """A stream of samples; ``collate`` makes batches of them."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate
        self._samples: deque[Any] = deque()

    @property
    def count(self) -> int:
        return len(self._samples)

    def add(self, item: Any) -> None:
        self._samples.append(item)

    def take(self, count: int) -> list[Any]:
        return [self._samples.popleft() for _ in range(count)]

    def back(self, batch: list[Any]) -> None:
        self._samples.extendleft(reversed(batch))

    def batch(self, taken: list[Any]) -> Any:
        return self._collate(taken)

    def cut(self, taken: list[Any], start: int, end: int) -> list[Any]:
        return taken[start:end]

    def state(self) -> list[Any]:
        return list(self._samples)


class Batches:
    """A stream of batches of any size, whose first dimension counts samples."""

    def __init__(self) -> None:
        self._batches: deque[Any] = deque()
        self._count = 0

    @property
    def count(self) -> int:
        return self._count

    def add(self, item: Any) -> None:
        self._batches.append(item)
        self._count += length(item)

    def take(self, count: int) -> Any:
        self._count -= count
        parts = []
        while count:
            first = self._batches.popleft()
            size = length(first)
            if size > count:
                self._batches.appendleft(part(first, count, size))
                first, size = part(first, 0, count), count
            parts.append(first)
            count -= size
        return joined(parts) if parts else None

    def back(self, batch: Any) -> None:
        if batch is not None:
            self._batches.appendleft(batch)
            self._count += length(batch)

    def batch(self, taken: Any) -> Any:
        return taken

    def cut(self, taken: Any, start: int, end: int) -> Any:
        return part(taken, start, end)

    def state(self) -> list[Any]:
        return list(self._batches)
