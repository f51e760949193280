"""The port by which guards of other machines reach the launcher's store: only those that have the token come in.

A TCPStore lets in whoever reaches it. So it listens on this machine alone, and others come through here.
"""

from __future__ import annotations

import asyncio
import secrets
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable

from paceline.torch.elastic import challenge
from paceline.torch.elastic.listening import LOOPBACK
from paceline.torch.elastic.relay import Relay, both_ways

STRANGERS = 64  # that may be asked at once; further ones are turned away
TOLD = 16  # addresses of strangers that are told of


class Door(Relay):
    """host, port: of this machine, as others reach it. store: the port of the store here. tell: takes sentences."""

    def __init__(self, host: str, port: int, token: str, store: int, tell: Callable[[str], None]) -> None:
        self._token, self._store, self._tell = token, store, tell
        self._run = secrets.token_bytes(challenge.NONCE)
        self._asked, self._told = 0, set[str]()
        super().__init__(host, port)

    @property
    def secret(self) -> str:
        """Of the run."""
        return challenge.run_secret(self._token, self._run)

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self._asked >= STRANGERS:
            return
        self._asked += 1
        known = False
        try:
            async with asyncio.timeout(challenge.SECONDS):
                known = await challenge.let_in(reader, writer, self._token, self._run)
        finally:
            self._asked -= 1
            if not known:
                self._turned_away(writer)
        if known:
            store = await asyncio.open_connection(LOOPBACK, self._store)
            await both_ways((reader, writer), store)

    def _turned_away(self, writer: StreamWriter) -> None:
        address = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
        if address not in self._told and len(self._told) < TOLD:
            self._told.add(address)
            self._tell(f"somebody at {address} does not have the token, and was turned away")
