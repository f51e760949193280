"""On PYTHONPATH, sets a process's clock every half second, by a day and back; not the monotonic one."""

import time

STEPS = (0.0, 86400.0, -86400.0, 3600.0, -5.0)
real, began = time.time, time.monotonic()


def moved() -> float:
    return real() + STEPS[int((time.monotonic() - began) / 0.5) % len(STEPS)]


time.time = moved
