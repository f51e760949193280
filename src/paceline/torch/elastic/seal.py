"""What is told in the launcher's store, sealed: whoever reads it knows that one of the same run has written it.

A TCPStore lets in whoever reaches its port. So each value that is decoded carries an HMAC under a secret of the run,
over its key and its text, and is refused without one.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

from paceline.errors import WorkerError

DIGITS = 2 * hashlib.sha256().digest_size


class Seal:
    """secret: of the run, known to its launcher, guards and workers alone; where it is empty, a seal protects from
    accidents only."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret

    def closed(self, key: str, words: Any) -> str:
        """For the store. words: what JSON can tell."""
        text = json.dumps(words)
        return self._tag(key, text.encode()) + text

    def opened(self, key: str, raw: bytes | str, owner: str) -> Any:
        """What ``closed`` was given for this key. owner: who tells it. Raises WorkerError where it was not."""
        whole = raw.encode() if isinstance(raw, str) else bytes(raw)
        tag, text = whole[:DIGITS], whole[DIGITS:]
        if not hmac.compare_digest(tag, self._tag(key, text).encode()):
            raise WorkerError(
                f"what {owner} tells in the run's store, as {key}, was not written by it: something else reaches the "
                "store's port; keep it away, and start the run again from its checkpoint"
            )
        return json.loads(text)

    def proof(self, key: str, teller: int, hearer: int) -> bytes:
        """By which one member shows to another that it is of this run. key: of what they meet for."""
        return bytes.fromhex(self._tag(f"{key}/{teller}/{hearer}", b"proof"))

    def _tag(self, key: str, text: bytes) -> str:
        return hmac.new(self.secret.encode(), key.encode() + b"\0" + text, hashlib.sha256).hexdigest()


OPEN = Seal()  # of a run that nobody else can reach
