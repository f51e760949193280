"""How many workers a parameter server is to start, and how often a start that fails is tried again."""

from __future__ import annotations

RETRIES = 3  # failed starts in a row that are tried again


class Starts:
    """The workers that are wanted and not started yet, as far as there are free places."""

    def __init__(self) -> None:
        self.wanted = 0
        self._failures = 0  # in a row

    def want(self) -> None:
        """One more worker is wanted."""
        self.wanted += 1

    def began(self) -> None:
        """One of them is being started."""
        self.wanted -= 1

    def up(self) -> None:
        """One that was started takes part."""
        self._failures = 0

    def failed(self) -> bool:
        """Note that one that was started has failed; returns whether it is tried again."""
        self._failures += 1
        again = self._failures <= RETRIES
        self.wanted += again
        return again
