"""Computation that takes seconds of ``time.perf_counter``, which the doctor reads, and no others.

What a busy machine adds to a step is then small beside these seconds.
"""

import time

_real, _taken = time.perf_counter, 0.0


def _now() -> float:
    return _real() + _taken


def compute(seconds: float) -> None:
    """Let this process's clock be this much later."""
    global _taken
    _taken += seconds


time.perf_counter = _now
