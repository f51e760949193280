"""The messages between the processes of a run: authenticated as coming from this run, and read without running code.

A TCPStore accepts any process that reaches its port. So each value that is decoded carries an HMAC under a secret of
the run, over its key and its text, and is refused without one. Simple values are JSON. Tensors and the like, such as
the state that a joining rank receives, are read by torch without calling what they name (``weights_only``); other
classes are refused unless the user has allowed them with ``torch.serialization.add_safe_globals``.
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
# The classes of arrays, numbers and generator states; none of these runs what it reads.
_rebuilds = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGSU"}
_NUMPY: list[Any] = [np.ndarray, np.dtype, *_rebuilds, *_kinds]


class Unread(WorkerError):
    """An error for bytes that do not come from ``pack``."""


class Seal:
    """Authenticates messages. secret: known only to the run's processes; an empty one only detects accidents."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret

    def closed(self, key: str, words: Any) -> str:
        """The value of ``key`` for the store. words: of types that JSON has."""
        text = json.dumps(words)
        return self.proof(key, text.encode()).hex() + text

    def opened(self, key: str, raw: bytes | str, owner: str) -> Any:
        """The words that ``closed`` was called with for this key. owner: the process that wrote them, for an error.
        Raises WorkerError if the value does not come from ``closed``."""
        whole = raw.encode() if isinstance(raw, str) else bytes(raw)
        tag, text = whole[:DIGITS], whole[DIGITS:]
        if not hmac.compare_digest(tag, self.proof(key, text).hex().encode()):
            raise WorkerError(
                f"{key} in the run's store, which belongs to {owner}, was not written by it: another program reaches "
                "the store's port; keep it away, and start the run again from its checkpoint"
            )
        return json.loads(text)

    def proof(self, key: str, text: bytes = b"proof") -> bytes:
        """The HMAC of ``text`` for this key, 32 bytes, which proves that its sender belongs to the run."""
        return hmac.digest(self.secret.encode(), key.encode() + b"\0" + text, "sha256")


def pack(thing: Any) -> memoryview:
    """Serialize tensors, arrays, numbers, texts and containers of them to bytes."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getbuffer()


def unpack(raw: bytes, what: str) -> Any:
    """Deserialize what ``pack`` was called with. what: the source of these bytes, for an error. Raises Unread."""
    try:
        with safe_globals(_NUMPY):
            return torch.load(io.BytesIO(raw), weights_only=True)
    except Exception as error:  # torch raises many kinds of errors for damaged bytes
        refused = str(error) if isinstance(error, pickle.UnpicklingError) else ""
        if named := re.search(r"GLOBAL (\S+) w|but got <class '([^']+)'>", refused):
            raise Unread(
                f"{what} holds {named[1] or named[2]}, which is not read, since reading it may run code; "
                "expected tensors, arrays, numbers and texts, or a class that "
                "torch.serialization.add_safe_globals() was given"
            ) from error
        raise Unread(f"{what} cannot be read; another program may have written it") from error
