"""What of a round nobody has run who is still there, cut into parts that its members claim."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from paceline.rounds import Array
from paceline.samples.cost import CostModel
from paceline.samples.deal import at_least

Span = tuple[int, int]  # first sample of the epoch's order, and how many


def missing(ran: Iterable[Span], first: int, size: int) -> list[Span]:
    """The samples from ``first`` on, ``size`` of them, that are in none of ``ran``."""
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
    """As ``parts``, about two of equal cost for each member, where samples cost differently.

    lengths: of the samples of each span. budget: length of a part at most, as ``samples.Room.budget``."""
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
    """Cut into parts of at most ``most`` samples, about two for each member.

    unit: where a span is a multiple of so many samples, its parts are. floor: samples that each part has at least,
    where spans do; ``most`` is at least 2 floor - 1."""
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
