"""Server-sent events: the newest panel to each page, with ids by which one that comes back goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from paceline.live.follower import POLL, Shot

EVERY = 0.5  # seconds between two events to one page, at least
BEAT = 5.0  # seconds without an event after which a heartbeat goes out
RETRY = 1000  # milliseconds after which a page that lost the connection tries again


async def stream(
    newest: Callable[[], Awaitable[Shot]], seen: str, closed: Callable[[], bool]
) -> AsyncIterator[str]:
    """Events until ``closed``: each carries the whole panel, so that none that was missed matters.

    seen: id of the last event that the page got before, "" for none; it is not sent again.
    """
    yield f"retry: {RETRY}\n\n"
    sent = beat = 0.0
    while not closed():
        clock = time.monotonic()
        shot = await newest()
        if shot.id != seen and clock - sent >= EVERY:
            yield f"id: {shot.id}\nevent: panel\ndata: {shot.data}\n\n"
            seen, sent, beat = shot.id, clock, clock
        elif clock - beat >= BEAT:
            yield "event: beat\ndata: \n\n"
            beat = clock
        await asyncio.sleep(POLL)
