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


def parts(spans: Iterable[Span], members: int, most: int | None) -> list[Span]:
    """Cut into parts of at most ``most`` samples, about two for each member."""
    spans = list(spans)
    total = sum(size for _, size in spans)
    each = max(-(-total // (2 * members)), 1)
    if most is not None:
        each = min(each, most)
    return [(start + at, min(each, size - at)) for start, size in spans for at in range(0, size, each)]
