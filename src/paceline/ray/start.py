"""Starts Ray on this machine or joins a running cluster, with a sentence if that fails; makes actors."""

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

from paceline.errors import PacelineError, WorkerError

ANSWER_SECONDS = 20.0
START_SECONDS = 120.0  # in which all workers must start
# Ray itself tries to connect for minutes and cannot be interrupted, so another process tries first. With a version of
# Ray that has no such client, the error comes when it is joined.
ASK = """
import sys
try:
    from ray._raylet import GcsClient
except ImportError:
    sys.exit()
GcsClient(address=sys.argv[1])
"""


def connect(address: str | None, cpus: int) -> bool:
    """Use the Ray of this process, or join the one at ``address``, or start one with this number of CPUs.

    Returns whether Ray was started or joined here, so that the caller must shut it down.
    """
    if ray.is_initialized():
        return False
    if address is not None and address != "auto":
        _ask(address)
    if address is None:
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        init(address="local", num_cpus=max(cpus, os.cpu_count() or 1))  # never join another on this machine
        return True
    try:
        with signals_as_they_are():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise PacelineError(
            f"no Ray cluster answers at {address} ({str(error).splitlines()[0]}); start one with ray start "
            "--head, or leave out --address"
        ) from error
    return True


def init(**options: Any) -> None:
    """Start Ray on this machine; without ``address="local"`` join one that runs there. options: of ``ray.init``.

    Raises WorkerError if Ray does not start: it allows one of its processes 15 s, which a busy machine may exceed."""
    try:
        with signals_as_they_are():
            ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray's own have no class in common
        raise WorkerError(
            f"Ray did not start on this machine ({' '.join(str(error).split()).rstrip('.')}); try again when the "
            "machine is less busy"
        ) from error


class Closing:
    """A base class of objects that are closed at the end of a ``with`` statement."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End everything that this object has started."""


def controlled(kind: type) -> Any:
    """The class as a Ray actor. Methods of the group "control" have their own thread, so they do not wait for a
    computation."""
    return ray.remote(concurrency_groups={"control": 1})(kind)  # type: ignore[call-overload]


@contextlib.contextmanager
def signals_as_they_are() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by one that does not let the program end in order."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
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
