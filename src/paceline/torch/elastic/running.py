"""What a rank knows of the running round, or of the next: what of it it has run, and what nobody has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.torch.elastic import orphans
from paceline.torch.elastic.orphans import Span

FRESH = -1  # rounds behind a rank that has nothing yet


class Missing(NamedTuple):
    """What nobody who is there has run of a round. members: who may run it; fits: samples that each of them has room
    for at once."""

    spans: list[Span]
    members: int
    fits: int


@dataclass
class Running:
    """One round. All ranks that have begun it have the same but for ``ran``, ``within`` and ``dropped``."""

    step: int = FRESH  # so many are complete
    first: int = 0  # of its samples, in the epoch's order
    size: int = 0
    among: tuple[int, ...] = ()  # the places that it was divided among, also where some are lost since
    within: bool = False  # it was begun here, and is not complete
    dropped: bool = False  # its gradients were, on this rank
    ran: list[Span] = field(default_factory=list)  # whose gradients this rank has
    missing: Missing | None = None  # where it is mended

    def begin(self, step: int, first: int, size: int) -> None:
        """This round comes next; what is known of it stays."""
        if step != self.step:
            self.step, self.ran, self.missing = step, [], None
        self.first, self.size = first, size

    def over(self) -> None:
        """It is complete."""
        self.within, self.missing, self.ran = False, None, []
        self.step += 1

    def drop(self) -> None:
        """It was left: nothing that this rank has run of it counts."""
        self.within, self.dropped, self.ran = False, True, []

    def word(self) -> dict[str, Any]:
        """What this rank tells the others of it in a meeting."""
        return {
            "done": self.step,
            "ran": self.ran,
            "within": self.within,
            "round": [self.first, self.size, self.among],
        }

    def agree(self, words: list[dict[str, Any]], members: int, fits: int) -> None:
        """What the words of those with as many complete rounds come to; the same on all members."""
        self.step, self.missing = words[0]["done"], None
        running = [word for word in words if word["within"]]
        if running:
            self.first, self.size, among = running[0]["round"]
            self.among = tuple(among)
            ran = [span for word in running for span in word["ran"]]
            self.missing = Missing(orphans.missing(ran, self.first, self.size), members, fits)
