"""A thread that carries bytes between connections, as they come."""

from __future__ import annotations

import asyncio
import threading
from asyncio import StreamReader, StreamWriter

from paceline.torch.elastic.listening import socket_at

AT_ONCE = 1 << 16  # bytes
Ends = tuple[StreamReader, StreamWriter]


class Relay:
    """Listens, and has ``serve`` for each that connects, in an event loop of its own."""

    def __init__(self, host: str, port: int) -> None:
        """Raises PacelineError where the port cannot be used."""
        listening = socket_at(host, port)
        self.port = int(listening.getsockname()[1])
        self.loop = asyncio.new_event_loop()
        self._server = self.loop.run_until_complete(asyncio.start_server(self._accepted, sock=listening))
        self._thread = threading.Thread(target=self.loop.run_forever, name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and drop every connection with what was still on its way. The second time does nothing."""
        if self.loop.is_closed():
            return
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.run_until_complete(self._end())
        self.loop.close()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """All of one connection, which is closed then."""
        raise NotImplementedError

    async def _accepted(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        except (OSError, EOFError, TimeoutError):  # it has gone
            pass
        except asyncio.CancelledError:
            pass  # by ``close``; Python 3.11 logs a traceback of a connection's task that ends as cancelled
        finally:
            writer.close()

    async def _end(self) -> None:
        self._server.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes a connection in its next turn


async def both_ways(one: Ends, other: Ends) -> None:
    """Until either ends; then both are closed."""
    await asyncio.gather(_one_way(one[0], other[1]), _one_way(other[0], one[1]))


async def _one_way(reader: StreamReader, writer: StreamWriter) -> None:
    try:
        while data := await reader.read(AT_ONCE):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    except asyncio.CancelledError:
        writer.transport.abort()  # who reads no more is not waited for
        raise
    finally:
        writer.close()
