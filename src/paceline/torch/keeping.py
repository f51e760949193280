"""A guard at work: the processes of a script of your own, from their start until the last of them has ended."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

from paceline.torch.elastic.generation import Where
from paceline.torch.elastic.keeper import Keeper
from paceline.torch.elastic.station import Station
from paceline.torch.liveness.patience import last_words

LOOK = 0.005  # seconds between two looks at the workers


class Process:
    """A worker of the script. interface: of the network, by which it reaches the others."""

    def __init__(self, command: Sequence[str], where: Where, interface: str) -> None:
        beside = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface} | dict(os.environ)
        self._process = subprocess.Popen(command, env=beside | where.environment())
        self.pid = self._process.pid

    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def leave(self) -> None:
        with suppress(ProcessLookupError):
            self._process.terminate()


def keep(keeper: Keeper) -> int:
    """As the guard of the first machine, until the last worker has ended; its exit status. SIGTERM has all workers
    leave at the end of their round."""
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    status = 130
    try:
        status = watch(keeper, asked_to_end)
        return status
    finally:
        keeper.close(status)


def join(station: Station) -> int:
    """As the guard of another machine, until the run is over; its exit status. SIGTERM has the workers here leave.

    Raises as ``Station.run``."""
    signal.signal(signal.SIGTERM, lambda *_: station.leave())
    return station.run()


def watch(keeper: Keeper, asked_to_end: list[int]) -> int:
    """Until the last worker has ended: 0 where one came to the end, else 1. asked_to_end: signals, as they come."""
    ended, told = False, 0
    while keeper.workers:
        began = keeper.running
        for loss in keeper.look():
            ended |= loss.words == "ended"
            if loss.lost or loss.words == "left":
                last_words(f"worker {loss.place} {loss.words}")
            if not began and loss.words != "left":  # all are needed to begin
                return 0 if not loss.lost and not keeper.workers else 1
        for sentence in keeper.news[told:]:
            last_words(sentence)
        told = len(keeper.news)
        if asked_to_end:
            asked_to_end.clear()
            keeper.leave()
        time.sleep(LOOK)
    if not ended:
        last_words("no worker is left; start the script again from its checkpoint")
    return 0 if ended else 1
