"""Starts a Ray on this machine, or joins one that stands, and says in a sentence when that fails; makes actors."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any, Self

import ray

from paceline.errors import PacelineError

ANSWER_SECONDS = 20.0
START_SECONDS = 120.0  # that all workers may take to start
# Ray itself tries for minutes, and cannot be told to stop: so another process tries first. A version of Ray that
# cannot be asked like that shows when it is joined.
ASK = """
import sys
try:
    from ray._raylet import GcsClient
except ImportError:
    sys.exit()
GcsClient(address=sys.argv[1])
"""


def connect(address: str | None, cpus: int) -> bool:
    """Join the Ray at ``address``, or the one this process is in, or start one with so many CPUs.

    Returns whether Ray was started or joined here, and so is the caller's to shut down.
    """
    if ray.is_initialized():
        return False
    if address is not None and address != "auto":
        _ask(address)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    with signals_as_they_are():
        if address is None:
            os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
            ray.init(  # "local": another's Ray on this machine is none of ours
                address="local", num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, **quiet
            )
            return True
        try:
            ray.init(address=address, **quiet)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise PacelineError(
                f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}); start one with ray start "
                "--head, or leave out --address"
            ) from error
    return True


class Closing:
    """Is closed at the end of a ``with`` statement."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what was started."""


def controlled(kind: type) -> Any:
    """The class as Ray's actor, whose methods of the group "control" have a thread of their own, so that they pass a
    computation.
    """
    return ray.remote(concurrency_groups={"control": 1})(kind)  # type: ignore[call-overload]


@contextlib.contextmanager
def signals_as_they_are() -> Iterator[None]:
    """Ray takes SIGTERM for itself: it ends the program without letting it end in order."""
    heard = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if heard else None
    try:
        yield
    finally:
        if callable(before):
            signal.signal(signal.SIGTERM, before)


def _ask(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not host or "://" in address:
        raise PacelineError(f"--address {address}: expected HOST:PORT of a Ray cluster's head, or auto")
    try:
        socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        command = [sys.executable, "-c", ASK, address]
        answers = not subprocess.run(command, capture_output=True, timeout=ANSWER_SECONDS).returncode
    except (OSError, OverflowError, ValueError, subprocess.TimeoutExpired):
        answers = False
    if not answers:
        raise PacelineError(
            f"no Ray cluster answers at {address} within {ANSWER_SECONDS:g} s; start one there with ray start "
            "--head, or leave out --address to use this machine"
        )
