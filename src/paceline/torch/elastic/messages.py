"""What the processes of a run write to one another: proven to come from this run, and read without running code.

A TCPStore lets in whoever reaches its port. So each value that is decoded carries an HMAC under a secret of the run,
over its key and its text, and is refused without one. Words are JSON. What is more than words, such as the state that
a joining rank is given, is read by torch without calling what it names (``weights_only``); other classes are refused
unless the user has allowed them by ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import hmac
import io
import json
import pickle
import re
from typing import Any

import numpy as np
import torch
from torch.serialization import safe_globals

from paceline.errors import WorkerError

DIGITS = 64  # of an HMAC with SHA-256, in hexadecimal
# Of arrays, numbers and states of generators; none of these runs what it is given.
_rebuilds = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGSU"}
_NUMPY: list[Any] = [np.ndarray, np.dtype, *_rebuilds, *_kinds]


class Unread(WorkerError):
    """These bytes are not what ``pack`` gives."""


class Seal:
    """secret: of the run, known to its launchers and workers alone; an empty one protects from accidents only."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret

    def closed(self, key: str, words: Any) -> str:
        """For the store. words: what JSON can tell."""
        text = json.dumps(words)
        return self.proof(key, text.encode()).hex() + text

    def opened(self, key: str, raw: bytes | str, owner: str) -> Any:
        """What ``closed`` was given for this key. owner: who tells it. Raises WorkerError if it was not."""
        whole = raw.encode() if isinstance(raw, str) else bytes(raw)
        tag, text = whole[:DIGITS], whole[DIGITS:]
        if not hmac.compare_digest(tag, self.proof(key, text).hex().encode()):
            raise WorkerError(
                f"what {owner} tells in the run's store, as {key}, was not written by it: something else reaches the "
                "store's port; keep it away, and start the run again from its checkpoint"
            )
        return json.loads(text)

    def proof(self, key: str, text: bytes = b"proof") -> bytes:
        """Shows that whoever says this for this key is of this run, 32 bytes."""
        return hmac.digest(self.secret.encode(), key.encode() + b"\0" + text, "sha256")


def pack(thing: Any) -> memoryview:
    """Tensors, arrays, numbers, texts and containers of them, as bytes."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getbuffer()


def unpack(raw: bytes, what: str) -> Any:
    """What ``pack`` was given. what: whose and where these bytes are. Raises Unread."""
    try:
        with safe_globals(_NUMPY):
            return torch.load(io.BytesIO(raw), weights_only=True)
    except Exception as error:  # torch raises half a dozen kinds for bytes that are damaged
        refused = str(error) if isinstance(error, pickle.UnpicklingError) else ""
        if named := re.search(r"GLOBAL (\S+) w|but got <class '([^']+)'>", refused):
            raise Unread(
                f"{what} holds {named[1] or named[2]}, which is not read, since reading it may run code; "
                "expected tensors, arrays, numbers and texts, or a class that "
                "torch.serialization.add_safe_globals() was given"
            ) from error
        raise Unread(f"{what} cannot be read; another program may have written it") from error
