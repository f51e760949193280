"""Programs started as shells and runners start them: with some signals ignored from the beginning.

A program of its own prepares them, not a function between fork and exec: after a plain fork, the threads of a Ray in
the process of the tests may wait for ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

PREPARE = """
import os, signal, sys
ignored = set(map(int, sys.argv[1].split(",") if sys.argv[1] else []))
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
os.execv(sys.argv[2], sys.argv[2:])
"""


def ignoring(signals: Iterable[int], *arguments: str) -> list[str]:
    """The command that runs python with these arguments, of SIGINT, SIGTERM and SIGHUP these ignored."""
    listed = ",".join(str(int(each)) for each in signals)
    return [sys.executable, "-S", "-c", PREPARE, listed, sys.executable, *arguments]
