"""The way by which other machines reach the launcher's store: only those that have the run's token come in.

A TCPStore lets in whoever reaches it. So it listens on this machine alone, and a ``Door`` carries the bytes of others
to it. Each other machine has a ``Tunnel``: its workers connect to a port there, and each connection shows the token
at the door.

Both sides send random bytes and answer the other's with an HMAC under the token, which itself is never sent. All that
is read before is of a known length. The door's answer names the run, too: both sides make the run's secret of that
name and the token.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import socket
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable
from contextlib import suppress

from paceline.errors import PacelineError
from paceline.tokens import TOKEN

LOOPBACK = "127.0.0.1"
AT_ONCE = 1 << 16  # bytes
STRANGERS = 64  # that may be asked at once; further ones are turned away
TOLD = 16  # addresses of strangers that are told of
MARK = b"paceline launcher 1"
SECONDS = 5.0  # that showing the token may take
NONCE = PROOF = 32  # bytes
YES, NO = b"y", b"n"
Ends = tuple[StreamReader, StreamWriter]


def socket_at(host: str, port: int) -> socket.socket:
    """One of IPv4 that listens at this machine's address ``host``; port: 0 for any.

    Raises PacelineError if the port cannot be used."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise PacelineError(
            f"port {port} cannot be used on this machine; choose another, or 0 for any"
        ) from error


class Relay:
    """Listens, and has ``serve`` for each that connects, in a thread with an event loop of its own."""

    def __init__(self, host: str, port: int) -> None:
        """Raises PacelineError if the port cannot be used."""
        listening = socket_at(host, port)
        self.port = int(listening.getsockname()[1])
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop, self._over = self._runner.get_loop(), asyncio.Event()
        run, served = self._runner.run, self._listen(listening)
        self._thread = threading.Thread(target=run, args=(served,), name="relay", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more, and drop every connection with what was still on its way. The second time does nothing."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
            self._runner.close()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """All of one connection, which is closed then."""
        raise NotImplementedError

    async def _listen(self, listening: socket.socket) -> None:
        server = await asyncio.start_server(self._accepted, sock=listening)
        await self._over.wait()
        server.close()
        serving = asyncio.all_tasks() - {asyncio.current_task()}
        for task in serving:
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await asyncio.sleep(0)  # the loop closes a connection in its next turn

    async def _accepted(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await self.serve(reader, writer)
        except (OSError, EOFError, TimeoutError):  # it has gone
            pass
        except asyncio.CancelledError:
            pass  # by ``close``; Python 3.11 logs a traceback of a connection's task that ends as cancelled
        finally:
            writer.close()


async def both_ways(one: Ends, other: Ends) -> None:
    """Carry bytes as they come, until either ends; then both are closed."""
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


class Door(Relay):
    """host, port: of this machine, as others reach it. store: the port of the store here. tell: takes sentences."""

    def __init__(self, host: str, port: int, token: str, store: int, tell: Callable[[str], None]) -> None:
        self._token, self._store, self._tell = token, store, tell
        self._run = secrets.token_bytes(NONCE)
        self._asked, self._told = 0, set[str]()
        super().__init__(host, port)

    @property
    def secret(self) -> str:
        """The run's seal."""
        return _proof(self._token, b"run", self._run).hex()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self._asked >= STRANGERS:
            return
        self._asked += 1
        known = False
        try:
            async with asyncio.timeout(SECONDS):
                known = await self._let_in(reader, writer)
        finally:
            self._asked -= 1
            address = str((writer.get_extra_info("peername") or ("an unknown address",))[0])
            if not known and address not in self._told and len(self._told) < TOLD:
                self._told.add(address)
                self._tell(f"somebody at {address} does not have the token, and was turned away")
        if known:
            store = await asyncio.open_connection(LOOPBACK, self._store)
            await both_ways((reader, writer), store)

    async def _let_in(self, reader: StreamReader, writer: StreamWriter) -> bool:
        """Whether the other has the token."""
        mine = secrets.token_bytes(NONCE)
        writer.write(MARK + mine)
        told = await reader.readexactly(NONCE + PROOF)
        theirs, proof = told[:NONCE], told[NONCE:]
        known = hmac.compare_digest(proof, _proof(self._token, b"joins", mine, theirs))
        keeps = YES + self._run + _proof(self._token, b"keeps", mine, theirs, self._run)
        writer.write(keeps if known else NO)
        return known


class Tunnel(Relay):
    """host, port: of the door; ``port`` is then that of this machine."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._door, self._token = (host, port), token
        super().__init__(LOOPBACK, 0)

    def knock(self) -> str:
        """The run's secret. Raises OSError or EOFError if nobody answers, PacelineError if it is another's."""
        (_, writer), secret = asyncio.run_coroutine_threadsafe(self._through(), self.loop).result()
        self.loop.call_soon_threadsafe(writer.close)
        return secret

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(PacelineError):  # told by ``knock``
            await both_ways((reader, writer), (await self._through())[0])

    async def _through(self) -> tuple[Ends, str]:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(*self._door)
            try:
                return (reader, writer), await self._show(reader, writer)
            except BaseException:
                writer.close()
                raise

    async def _show(self, reader: StreamReader, writer: StreamWriter) -> str:
        """Show the token, and see that the other has it, too: the run's secret."""
        there = "{}:{}".format(*self._door)
        head = await reader.readexactly(len(MARK) + NONCE)
        if not head.startswith(MARK):
            raise PacelineError(
                f"what answers at {there} is no launcher that asks for a token; see to --join"
            )
        mine, theirs = secrets.token_bytes(NONCE), head[len(MARK) :]
        writer.write(mine + _proof(self._token, b"joins", theirs, mine))
        if await reader.readexactly(1) != YES:
            raise PacelineError(
                f"the launcher at {there} has another token; give all launchers of a run the same"
                if self._token
                else f"the launcher at {there} asks for a token; give --token-file FILE, or set {TOKEN}, to the same "
                "as there"
            )
        told = await reader.readexactly(NONCE + PROOF)
        run, proof = told[:NONCE], told[NONCE:]
        if not hmac.compare_digest(proof, _proof(self._token, b"keeps", theirs, mine, run)):
            raise PacelineError(f"what answers at {there} does not have the token; see to --join")
        return _proof(self._token, b"run", run).hex()


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"paceline " + b"\0".join(parts), "sha256")
