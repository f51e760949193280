"""The gateway through which other machines reach the launcher's store, which admits only those with the run's token.

A TCPStore accepts any process that reaches it. So it listens on this machine only, and a ``Gateway`` carries the
bytes of others to it. Each other machine has a ``Forwarder``: its workers connect to a port there, and each
connection proves at the gateway that it has the token.

Both sides send random bytes and answer the other's with an HMAC under the token, which itself is never sent. All data
that is read before is of a known length. The gateway's answer names the run, too: both sides derive the run's secret
from that name and the token.
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
AT_ONCE = 1 << 16  # bytes that are read at once, at most
STRANGERS = 64  # connections whose token may be checked at the same time; further ones are turned away
REPORTED = 16  # addresses of strangers that are reported, at most
MARK = b"paceline launcher 1"
SECONDS = 5.0  # that the exchange of proofs may take
NONCE = PROOF = 32  # bytes
YES, NO = b"y", b"n"
Ends = tuple[StreamReader, StreamWriter]


def socket_at(host: str, port: int) -> socket.socket:
    """An IPv4 socket that listens at this machine's address ``host``. port: 0 for any.

    Raises PacelineError if the port cannot be used."""
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise PacelineError(
            f"port {port} cannot be used on this machine; choose another, or 0 for any"
        ) from error


class Relay:
    """Listens, and calls ``serve`` for each connection, in a thread with its own event loop."""

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
        """Listen no more, and drop every connection with its unsent data. The second time does nothing."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
            self._runner.close()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        """Serve one connection, which is closed afterwards."""
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
            # The other side may go; and Python 3.11 would log a traceback for a task that ``close`` cancels.
            with suppress(OSError, EOFError, TimeoutError, asyncio.CancelledError):
                await self.serve(reader, writer)
        finally:
            writer.close()


async def both_ways(one: Ends, other: Ends) -> None:
    """Carry bytes in both directions until either connection ends; then both are closed."""
    await asyncio.gather(_one_way(one[0], other[1]), _one_way(other[0], one[1]))


async def _one_way(reader: StreamReader, writer: StreamWriter) -> None:
    try:
        while data := await reader.read(AT_ONCE):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    except asyncio.CancelledError:
        writer.transport.abort()  # does not wait for a receiver that has stopped reading
        raise
    finally:
        writer.close()


class Gateway(Relay):
    """Admits connections that have the token to the store on this machine.

    host, port: of this machine, as others reach it. store: the store's port. notify: called with sentences."""

    def __init__(self, host: str, port: int, token: str, store: int, notify: Callable[[str], None]) -> None:
        self._token, self._store, self._notify = token, store, notify
        self._run = secrets.token_bytes(NONCE)
        self._asked, self._reported = 0, set[str]()
        super().__init__(host, port)

    @property
    def secret(self) -> str:
        """The run's secret, for its ``Signer``."""
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
            if not known and address not in self._reported and len(self._reported) < REPORTED:
                self._reported.add(address)
                self._notify(f"a program at {address} does not have the token, and was turned away")
        if known:
            store = await asyncio.open_connection(LOOPBACK, self._store)
            await both_ways((reader, writer), store)

    async def _let_in(self, reader: StreamReader, writer: StreamWriter) -> bool:
        """Whether the other side has the token."""
        mine = secrets.token_bytes(NONCE)
        writer.write(MARK + mine)
        answer = await reader.readexactly(NONCE + PROOF)
        theirs, proof = answer[:NONCE], answer[NONCE:]
        known = hmac.compare_digest(proof, _proof(self._token, b"joins", mine, theirs))
        keeps = YES + self._run + _proof(self._token, b"keeps", mine, theirs, self._run)
        writer.write(keeps if known else NO)
        return known


class Forwarder(Relay):
    """Carries connections on this machine to a gateway. host, port: its address; the attribute ``port`` is local."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._gateway, self._token = (host, port), token
        super().__init__(LOOPBACK, 0)

    def authenticate(self) -> str:
        """The run's secret. Raises OSError or EOFError if no gateway answers, PacelineError for another token."""
        (_, writer), secret = asyncio.run_coroutine_threadsafe(self._through(), self.loop).result()
        self.loop.call_soon_threadsafe(writer.close)
        return secret

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(PacelineError):  # ``authenticate`` raises it, too
            await both_ways((reader, writer), (await self._through())[0])

    async def _through(self) -> tuple[Ends, str]:
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection(*self._gateway)
            try:
                return (reader, writer), await self._show(reader, writer)
            except BaseException:
                writer.close()
                raise

    async def _show(self, reader: StreamReader, writer: StreamWriter) -> str:
        """Prove that this side has the token, and check that the other has it, too; returns the run's secret."""
        there = "{}:{}".format(*self._gateway)
        head = await reader.readexactly(len(MARK) + NONCE)
        if not head.startswith(MARK):
            raise PacelineError(
                f"the program that answers at {there} is no launcher that asks for a token; check --join"
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
        answer = await reader.readexactly(NONCE + PROOF)
        run, proof = answer[:NONCE], answer[NONCE:]
        if not hmac.compare_digest(proof, _proof(self._token, b"keeps", theirs, mine, run)):
            raise PacelineError(f"the program that answers at {there} does not have the token; check --join")
        return _proof(self._token, b"run", run).hex()


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.digest(token.encode(), b"paceline " + b"\0".join(parts), "sha256")
