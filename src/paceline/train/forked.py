"""Exempts the modules of the server that workers are forked from from garbage collection. It is imported last.

A worker that ends collects its garbage before it releases its process group. Without this module, that collection
visits all objects of PyTorch, and so copies their pages: 0.2 s of processor time for each worker.
"""

import atexit
import gc
import os

gc.collect()
gc.freeze()

_SERVER = os.getpid()


@atexit.register
def _end() -> None:
    """End the server without destroying the frozen objects, all of which Triton would report as leaked."""
    if os.getpid() == _SERVER:  # not in a worker, whose exit status matters
        os._exit(0)
