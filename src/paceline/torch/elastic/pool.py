"""The counter behind claims within a round, where ranks may be lost: on the launcher's store, a key for each round.

What a lost rank has claimed is not given back: it is missing when the round's sums fail, and found then.
"""

from __future__ import annotations

from paceline.torch.claiming.counter import Count, count_of, packed
from paceline.torch.elastic.link import Link


class Pool:
    """``open`` for each round; then ``add`` from any thread, see ``claiming.counter.Counter``."""

    keeper = "the launcher"
    quick = False

    def __init__(self, link: Link) -> None:
        self._link = link
        self._key = self._before = ""

    def open(self, key: str, first: bool) -> None:
        """A round begins. key: of it and its generation; first: whether this rank is the first of the members."""
        if first and self._before:  # all have left that round: its sums, and those of the next, are there
            self._link.forget(self._before)
        self._before, self._key = self._key, f"pool/{key}"

    def add(self, step: int, samples: int = 0, told: int = 0, speed: int = 0) -> Count:
        """Add to the counts of the round that is open."""
        return count_of(self._link.add(self._key, packed(samples, told, speed)), samples)

    def close(self) -> None:
        """The link stays."""
