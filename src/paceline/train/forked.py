"""Loaded last by the server that workers are forked from: what it has loaded by then is nobody's garbage.

A worker that ends lets go of its process group, and collects its garbage before. Without this, that collection looks
at all of PyTorch, and so copies it: two tenths of a second of processor time for each worker.
"""

import gc

gc.collect()
gc.freeze()
