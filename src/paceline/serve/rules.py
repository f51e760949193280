"""Which rules decide: a name for the code that turns reports into plans."""

from __future__ import annotations

import hashlib
import inspect
from functools import cache
from pathlib import Path
from typing import Any

import paceline

DECIDE = (
    "balance",
    "forecast",
    "balancer.py",
    "costs.py",
    "options.py",
    "policies.py",
    "rounds.py",
    "shares.py",
    "serve/jobs.py",
    "serve/members.py",
    "serve/rounds.py",
)


def version(policy: object) -> str:
    """The package's version, and a digest of what decides: the same only where the same reports give the same plans.

    policy: the job's; its own code counts, wherever it is.
    """
    kind: Any = type(policy)
    return f"{paceline.__version__}+{_digest(kind)}"


@cache
def _digest(kind: type[Any]) -> str:
    here = Path(paceline.__file__).parent
    hashed = hashlib.blake2b(digest_size=6)
    for name in DECIDE:
        for file in [here / name] if name.endswith(".py") else sorted((here / name).glob("*.py")):
            hashed.update(file.read_bytes() if file.exists() else b"")
    try:
        hashed.update(inspect.getsource(kind).encode())
    except (OSError, TypeError):  # made at run time
        hashed.update(kind.__qualname__.encode())
    return hashed.hexdigest()
