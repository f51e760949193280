"""The recovery of a running round: finds samples that no remaining member has run, and cuts them into parts to claim.

Samples are identified by their position in the epoch's order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from paceline.rounds import Array
from paceline.samples.cost import CostModel
from paceline.samples.deal import at_least

FRESH = -1  # complete rounds of a rank that does not have the model yet
Span = tuple[int, int]  # position of the first sample in the epoch's order, and number of samples


class Missing(NamedTuple):
    """The samples of a round that no member has run. members: number of ranks that may run them; fits: samples that
    fit into each member's memory at once."""

    spans: list[Span]
    members: int
    fits: int


@dataclass
class Running:
    """The running round. All ranks that have begun it have the same but for ``ran``, ``within`` and ``dropped``."""

    step: int = FRESH  # its number, which is that of complete rounds
    first: int = 0  # position of its first sample in the epoch's order
    size: int = 0
    among: tuple[int, ...] = ()  # the places that it was divided among, including those lost since
    within: bool = False  # this rank has begun it, and it is not complete
    dropped: bool = False  # this rank has dropped its gradients
    ran: list[Span] = field(default_factory=list)  # the samples whose gradients this rank has
    missing: Missing | None = None  # the samples to recover, if its sums have failed

    def begin(self, step: int, first: int, size: int) -> None:
        """This round comes next; if it was running already, keep what is known of it."""
        if step != self.step:
            self.step, self.ran, self.missing = step, [], None
        self.first, self.size = first, size

    def picks_up(self) -> bool:
        """Whether this rank had dropped the gradients of a round, and takes part again."""
        dropped, self.dropped = self.dropped, False
        return dropped

    def enter(self, places: tuple[int, ...]) -> None:
        """This rank begins the round, which is divided among these places unless it is recovered."""
        self.within = True
        if self.missing is None:
            self.among = places

    def over(self) -> None:
        """The round is complete."""
        self.within, self.missing, self.ran = False, None, []
        self.step += 1

    def drop(self) -> None:
        """The round was left: forget what this rank has run of it."""
        self.within, self.dropped, self.ran = False, True, []

    def word(self) -> dict[str, Any]:
        """This rank's report of the round in a rendezvous."""
        return {
            "done": self.step,
            "ran": self.ran,
            "within": self.within,
            "round": [self.first, self.size, self.among],
        }

    def agree(self, words: list[dict[str, Any]], members: int, fits: int) -> None:
        """Take over what the words of the members with the most complete rounds imply; the same on all members."""
        self.step, self.missing = words[0]["done"], None
        running = [word for word in words if word["within"]]
        if running:
            self.first, self.size, among = running[0]["round"]
            self.among = tuple(among)
            ran = [span for word in running for span in word["ran"]]
            self.missing = Missing(missing(ran, self.first, self.size), members, fits)


def missing(ran: Iterable[Span], first: int, size: int) -> list[Span]:
    """The spans of the ``size`` samples from ``first`` on that are in none of ``ran``."""
    found, at, end = [], first, first + size
    for start, count in sorted(tuple(span) for span in ran):
        if start > at:
            found.append((at, start - at))
        at = max(at, start + count)
    if at < end:
        found.append((at, end - at))
    return found


def parts_by_cost(
    spans: Iterable[Span],
    lengths: Sequence[Array],
    model: CostModel,
    members: int,
    most: int,
    budget: float,
    floor: int = 1,
) -> list[Span]:
    """Like ``parts``, for samples that cost differently: about two parts of equal cost for each member.

    lengths: of the samples of each span. budget: the largest length of a part, see ``samples.Room.budget``."""
    found = []
    costs = [model.of(each) for each in lengths]
    aim = sum(float(each.sum()) for each in costs) / (2 * members)
    for (start, _), each, cost in zip(spans, lengths, costs, strict=True):
        sizes: list[int] = []
        size, longest, tokens, dearest, together = 0, 0.0, 0.0, 0.0, 0.0
        for length, own in zip(each.tolist(), cost.tolist(), strict=True):
            longest, dearest = max(longest, length), max(dearest, own)
            tokens, together = tokens + length, together + own
            if model.padded:
                tokens, together = (size + 1) * longest, (size + 1) * dearest
            if size and (size >= most or tokens > budget or together > aim + own / 2):
                sizes.append(size)
                size, longest, tokens, dearest, together = 0, length, length, own, own
            size += 1
        for part in at_least(np.array([*sizes, size], np.int64), floor).tolist():
            found.append((start, part))
            start += part
    return found


def parts(spans: Iterable[Span], members: int, most: int, unit: int = 1, floor: int = 1) -> list[Span]:
    """Cut spans into parts of at most ``most`` samples, about two for each member.

    unit: parts of a span are multiples of this number of samples if the span is. floor: each part has at least this
    number of samples if the span has; ``most`` must be at least 2 floor - 1."""
    spans = list(spans)
    each = max(-(-sum(size for _, size in spans) // (2 * members)), 2 * floor - 1)
    each = max(min(each, most) // unit, 1) * unit
    found = []
    for start, size in spans:
        count = -(-size // each)
        units, rest = divmod(size, unit)
        low, larger = divmod(units, count)
        sizes = [(low + (number < larger)) * unit for number in range(count)]
        sizes[-1] += rest  # less than a unit, and the last parts are the smaller ones
        for part in sizes:
            if part:
                found.append((start, part))
            start += part
    return found
