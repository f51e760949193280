"""Loaded last by the server that workers are forked from: what it has loaded by then is nobody's garbage.

A worker that ends lets go of its process group, and collects its garbage before. Without this, that collection looks
at all of PyTorch, and so copies it: two tenths of a second of processor time for each worker.
"""

import atexit
import gc
import os

gc.collect()
gc.freeze()

_SERVER = os.getpid()


@atexit.register
def _end() -> None:
    """The server ends without tearing down what is frozen: Triton would list all of it as leaked."""
    if os.getpid() == _SERVER:  # and not in a worker, whose exit status counts
        os._exit(0)
