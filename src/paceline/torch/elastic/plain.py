"""What members hand one another as bytes: tensors, arrays, numbers and containers of them, read without running code.

Whoever sends may not be who it should be. torch reads such bytes without calling what they name (``weights_only``);
other classes are refused unless the user has allowed them by ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import Any

import numpy as np
import torch
from torch.serialization import safe_globals

from paceline.errors import WorkerError

# Of arrays, numbers and states of generators; none of these runs what it is given.
_rebuilds = np.zeros(0).__reduce__()[0], np.float64(0).__reduce__()[0]
_NUMPY: list[Any] = [
    np.ndarray,
    np.dtype,
    *_rebuilds,
    *{type(np.dtype(kind)) for kind in "?bBhHiIlLqQefdgFDGSU"},
]


class Unread(WorkerError):
    """These bytes are not what ``pack`` gives."""


def pack(thing: Any) -> memoryview:
    """As bytes."""
    buffer = io.BytesIO()
    torch.save(thing, buffer)
    return buffer.getbuffer()


def unpack(raw: bytes, what: str) -> Any:
    """What ``pack`` was given. what: whose and where these bytes are. Raises Unread."""
    try:
        with safe_globals(_NUMPY):
            return torch.load(io.BytesIO(raw), weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+) w|but got <class '([^']+)'>", str(error))
        if named is not None:
            raise Unread(
                f"{what} holds {named[1] or named[2]}, which is not read, since reading it may run code; "
                "expected tensors, arrays, numbers and texts, or a class that "
                "torch.serialization.add_safe_globals() was given"
            ) from error
        raise Unread(f"{what} cannot be read; another program may have written it") from error
    except Exception as error:  # torch raises half a dozen kinds for bytes that are damaged
        raise Unread(f"{what} cannot be read; another program may have written it") from error
