"""Which calls of a job are on their way to the disk, so that none is logged that another one of them makes wrong."""

from __future__ import annotations

import asyncio
from typing import NamedTuple


class Turn(NamedTuple):
    """What a call needs to itself. worker: that worker's state. place: that place. moves: it changes who is there.
    plans: who is there must not change.
    """

    worker: str | None = None
    place: int | None = None
    moves: bool = False
    plans: bool = False


class Turns:
    """The turns that are taken. Reports of many workers go together; a plan waits for all joins and departures."""

    def __init__(self) -> None:
        self.places: set[int] = set()  # that workers are about to take
        self._workers: set[str] = set()
        self._moving = self._planning = 0
        self._waiting: list[asyncio.Future[None]] = []

    def free(self, turn: Turn) -> bool:
        """Whether nothing on its way stands against it."""
        if turn.worker in self._workers or turn.place in self.places:
            return False
        return not (self._planning and (turn.moves or turn.plans)) and not (self._moving and turn.plans)

    def take(self, turn: Turn) -> None:
        """The call is on its way."""
        if turn.worker is not None:
            self._workers.add(turn.worker)
        if turn.place is not None:
            self.places.add(turn.place)
        self._moving += turn.moves
        self._planning += turn.plans

    def give_back(self, turn: Turn) -> None:
        """It has arrived, or never will: whoever waits looks again."""
        if turn.worker is not None:
            self._workers.discard(turn.worker)
        if turn.place is not None:
            self.places.discard(turn.place)
        self._moving -= turn.moves
        self._planning -= turn.plans
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def change(self) -> None:
        """Wait until a turn is given back."""
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waits)
        await waits
