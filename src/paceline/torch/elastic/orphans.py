"""What of a round nobody has run who is still there, cut into parts that its members claim."""

from __future__ import annotations

from collections.abc import Iterable

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
