"""What the processes of a run tell each other: membership epochs, a launcher's settings for its workers, store keys.

Messages are authenticated as coming from this run, and read without running code. A TCPStore accepts any process that
reaches its port. So each value that is decoded carries an HMAC under a secret of the run, over its key and its text,
and is refused without one. Simple values are JSON. Tensors and the like, such as the state that a joining rank
receives, are read by torch without calling what they name (``weights_only``); other classes are refused unless the
user has allowed them with ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import hmac
import io
import json
import os
import pickle
import re
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.serialization import safe_globals

from paceline.errors import PacelineError, WorkerError

WHERE = "PACELINE_WHERE"  # the environment variable with a ``Where``


class WorkerId(NamedTuple):
    """A process that may take part. ident: unique among all processes of the run; place: its index in all arrays,
    which the process that replaces it takes over."""

    ident: int
    place: int


class MembershipEpoch(NamedTuple):
    """The members between two changes, by place. hard: a member was lost, so that no one waits for the sums of the
    epoch before; otherwise the change waits for the end of a round."""

    number: int
    members: tuple[WorkerId, ...]
    hard: bool

    @property
    def places(self) -> tuple[int, ...]:
        return tuple(member.place for member in self.members)

    @classmethod
    def of(cls, words: Any) -> MembershipEpoch:
        """The membership epoch that was serialized to these words by JSON."""
        number, members, hard = words
        return cls(number, tuple(WorkerId(*member) for member in members), hard)


class Where(NamedTuple):
    """A launcher's settings for a worker: the address of the store, the worker's ident and place, the number of
    places, and the run's secret (``Signer``)."""

    host: str
    port: int
    ident: int
    place: int
    places: int
    secret: str = ""

    def environment(self) -> dict[str, str]:
        """The variable that ``settings`` reads."""
        return {WHERE: json.dumps(self)}


def settings() -> Where:
    """The launcher's settings for this process. Raises PacelineError if no launcher of Paceline has started it."""
    try:
        return Where(*json.loads(os.environ[WHERE]))
    except (KeyError, ValueError, TypeError):
        raise PacelineError(
            "a run that loses and gains ranks needs a launcher that outlives the ranks; start the script with "
            "python -m paceline.torch.launcher, or use paceline train"
        ) from None


# Keys in the store for the worker with an ident: its heartbeats; that its program ends, so that it gives no more
# of them; that it has the model.
BEAT, ENDING, HAS = "beat/{}".format, "ending/{}".format, "has/{}".format
# The notice that the membership epoch of a number exists, for one worker, which may set it itself to wake up.
COMES = "notice/{}/{}".format

DIGITS = 64  # of an HMAC with SHA-256, in hexadecimal
# The classes of arrays, numbers and generator states; none of these runs what it reads.
_rebuilds = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_kinds = {type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGSU"}
_NUMPY: list[Any] = [np.ndarray, np.dtype, *_rebuilds, *_kinds]


class Unread(WorkerError):
    """An error for bytes that do not come from ``pack``."""


class Signer:
    """Authenticates messages. secret: known only to the run's processes; an empty one only detects accidents."""

    def __init__(self, secret: str = "") -> None:
        self.secret = secret

    def signed(self, key: str, words: Any) -> str:
        """The value of ``key`` for the store. words: of types that JSON has."""
        text = json.dumps(words)
        return self.mac(key, text.encode()).hex() + text

    def verified(self, key: str, raw: bytes | str, owner: str) -> Any:
        """The words that ``signed`` was called with for this key. owner: the process that wrote them, for an error.
        Raises WorkerError if the value does not come from ``signed``."""
        whole = raw.encode() if isinstance(raw, str) else bytes(raw)
        tag, text = whole[:DIGITS], whole[DIGITS:]
        if not hmac.compare_digest(tag, self.mac(key, text).hex().encode()):
            raise WorkerError(
                f"{key} in the run's store, which belongs to {owner}, was not written by it: another program reaches "
                "the store's port; keep it away, and start the run again from its checkpoint"
            )
        return json.loads(text)

    def mac(self, key: str, text: bytes = b"proof") -> bytes:
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
