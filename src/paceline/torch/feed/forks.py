"""What a process forked from a rank, such as a DataLoader's worker, inherits of stores and groups is let alone there.

Their threads do not exist in the child. If its garbage collector finds one that the rank has let go of, the
destructor waits for such a thread and ends the child with a segmentation fault.
"""

from __future__ import annotations

import gc
import os

_armed = False


def arm() -> None:
    """From now on a forked child never collects what existed before the fork."""
    global _armed
    if not _armed:
        _armed = True
        os.register_at_fork(after_in_child=gc.freeze)
