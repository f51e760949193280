"""How two guards show each other that both have the token, before anything else is read.

Each sends random bytes, and answers the other's with an HMAC of both under the token; the token itself is never sent.
All that is read before is of a known length. The answer of the first machine's guard names the run, too: both make
the run's secret of that name and the token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

from paceline.errors import PacelineError
from paceline.tokens import TOKEN

MARK = b"paceline guard 1"
GREETING_SECONDS = 0.1  # until whoever asks for a token has done so
SECONDS = 5.0  # that all of it may take
NONCE = PROOF = 32  # bytes
YES, NO = b"y", b"n"


def run_secret(token: str, run: bytes) -> str:
    """Of the run with this name, ``NONCE`` bytes."""
    return _proof(token, b"run", run).hex()


async def let_in(reader: StreamReader, writer: StreamWriter, token: str, run: bytes) -> bool:
    """The side of the first machine: whether the other has the token. run: the name of the run."""
    mine = secrets.token_bytes(NONCE)
    writer.write(MARK + mine)
    told = await reader.readexactly(NONCE + PROOF)
    theirs, proof = told[:NONCE], told[NONCE:]
    if not hmac.compare_digest(proof, _proof(token, b"joins", mine, theirs)):
        writer.write(NO)
        return False
    writer.write(YES + run + _proof(token, b"keeps", mine, theirs, run))
    return True


async def knock(reader: StreamReader, writer: StreamWriter, token: str, there: str) -> str:
    """The side of all others: the run's secret. there: whom this asks. Raises PacelineError where it is another's."""
    head = await reader.readexactly(len(MARK) + NONCE)
    if not head.startswith(MARK):
        raise PacelineError(f"what answers at {there} is no guard that asks for a token; see to --join")
    mine, theirs = secrets.token_bytes(NONCE), head[len(MARK) :]
    writer.write(mine + _proof(token, b"joins", theirs, mine))
    if await reader.readexactly(1) != YES:
        raise PacelineError(f"the guard at {there} has another token; give all guards of a run the same")
    told = await reader.readexactly(NONCE + PROOF)
    run, proof = told[:NONCE], told[NONCE:]
    if not hmac.compare_digest(proof, _proof(token, b"keeps", theirs, mine, run)):
        raise PacelineError(f"what answers at {there} does not have the token; see to --join")
    return run_secret(token, run)


def check_open(host: str, port: int, seconds: float) -> None:
    """Raises PacelineError where a token is asked for there, OSError where nobody listens."""
    with socket.create_connection((host, port), seconds) as there:
        there.settimeout(GREETING_SECONDS)
        with suppress(TimeoutError):  # a store waits for the first word
            if there.recv(len(MARK)) == MARK:
                raise PacelineError(
                    f"the guard at {host}:{port} asks for a token; give --token-file FILE, or set {TOKEN}, to the "
                    "same as there"
                )


def _proof(token: str, *parts: bytes) -> bytes:
    return hmac.new(token.encode(), b"paceline " + b"\0".join(parts), hashlib.sha256).digest()
