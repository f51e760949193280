"""Garbage is not collected while the modules after this one are loaded: all of it stays. ``collapsed`` ends that."""

import gc

gc.disable()
