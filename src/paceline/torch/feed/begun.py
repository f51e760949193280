"""What processes load ahead: what is asked for is perhaps what was begun."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

from paceline.rounds import Indices
from paceline.torch.feed.fetching import Fetcher


class Begun:
    """What processes load while something else runs. ``next`` gives what is asked for, begun or not."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self._begun: deque[Indices] = deque()

    def begin(self, turns: list[Indices]) -> None:
        """Begin to load each of these, behind what was begun before; from any thread."""
        self._fetcher.begin(turns)
        self._begun.extend(turns)

    def expect(self, turns: list[Indices]) -> None:
        """These come next: begin them, if something else was begun."""
        same = len(turns) == len(self._begun) and all(map(np.array_equal, turns, self._begun))
        if not same:
            self.reset()
            self.begin(turns)

    def comes(self, turn: Indices) -> bool:
        """Whether this is what was begun first."""
        return bool(self._begun) and np.array_equal(self._begun[0], turn)

    def next(self, turn: Indices) -> Any:
        """A batch of these samples."""
        if not self.comes(turn):
            self.reset()
            self.begin([turn])
        self._begun.popleft()
        return self._fetcher.next(turn)

    def reset(self) -> None:
        """Forget what was begun."""
        self._begun.clear()
        self._fetcher.reset()

    def close(self) -> None:
        """No more samples."""
        self._fetcher.close()
