"""What nobody has run of a round that is mended, claimed part by part by whoever is free."""

from __future__ import annotations

from collections.abc import Callable

from paceline.torch.elastic.link import Link
from paceline.torch.elastic.orphans import Span
from paceline.torch.elastic.running import Missing
from paceline.torch.plan import Piece

Turn = tuple[Span | None, Piece]  # the samples of a turn, None for one that counts for nothing; and its piece


class Leftover:
    """For each round ``open``; ``forget`` with each change of members, and at the round's end; ``claim`` between."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._cut: Callable[[Missing], list[Turn]] = lambda missing: []
        self._turns: list[Turn] | None = None  # for whoever claims them
        self._claimed: Turn | None = None

    def open(self, cut: Callable[[Missing], list[Turn]]) -> None:
        """A round begins. cut: what is missing of it as turns, the same on all members."""
        self._cut = cut

    def claim(self, missing: Missing, key: str) -> bool:
        """Whether there is another part for this rank. key: of the round, as these members run it."""
        if self._turns is None:
            self._turns = self._cut(missing)
        self._claimed = None
        if self._turns:
            number = self._link.claim(key)
            if number < len(self._turns):
                self._claimed = self._turns[number]
        return self._claimed is not None

    @property
    def claimed(self) -> Turn:
        """What this rank has claimed."""
        assert self._claimed is not None
        return self._claimed

    def forget(self) -> None:
        """Other members may miss other samples."""
        self._turns = self._claimed = None
