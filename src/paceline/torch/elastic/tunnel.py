"""The way from a machine to the store of the first, through its door: the workers here connect to a port of this
machine, and each connection shows the token there."""

from __future__ import annotations

import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

from paceline.errors import PacelineError
from paceline.torch.elastic import challenge
from paceline.torch.elastic.listening import LOOPBACK
from paceline.torch.elastic.relay import Ends, Relay, both_ways


class Tunnel(Relay):
    """host, port: of the door; ``port`` is then that of this machine."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._door, self._token = (host, port), token
        super().__init__(LOOPBACK, 0)

    def knock(self) -> str:
        """The run's secret. Raises OSError or EOFError where nobody answers, PacelineError where it is another's."""

        async def knocked() -> str:
            (_, writer), secret = await self._through()
            writer.close()
            return secret

        return asyncio.run_coroutine_threadsafe(knocked(), self.loop).result()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(PacelineError):  # told by ``knock``
            await both_ways((reader, writer), (await self._through())[0])

    async def _through(self) -> tuple[Ends, str]:
        async with asyncio.timeout(challenge.SECONDS):
            reader, writer = await asyncio.open_connection(*self._door)
            try:
                host, port = self._door
                return (reader, writer), await challenge.knock(reader, writer, self._token, f"{host}:{port}")
            except BaseException:
                writer.close()
                raise
