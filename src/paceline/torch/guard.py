"""Starts the workers of a script of your own on this machine, in place of torchrun, and outlives them all:

    python -m paceline.torch.guard --workers 4 train.py --lr 0.1

The script makes a ``Pace(model, ..., elastic=True)`` of a plain model, without a process group. It goes on when a
worker is killed, freezes, leaves (``pace.leave()``) or joins.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from paceline.errors import PacelineError
from paceline.torch.elastic.generation import Where
from paceline.torch.elastic.keeper import Keeper
from paceline.torch.elastic.membership import DEAD_SECONDS
from paceline.torch.liveness.patience import last_words

LOOK = 0.005  # seconds between two looks at the workers


class _Process:
    """A worker of the script."""

    def __init__(self, command: Sequence[str], where: Where) -> None:
        beside = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | dict(os.environ)
        self._process = subprocess.Popen(command, env=beside | where.environment())

    def status(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"paceline: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; its exit status: 0 where a worker came to the end."""
    parser = _Parser("python -m paceline.torch.guard", description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="how many")
    parser.add_argument("--max-restarts", type=int, default=3, help="workers started in place of lost ones")
    parser.add_argument(
        "--dead-after", type=float, default=DEAD_SECONDS, help="seconds without a sign of life"
    )
    parser.add_argument("--port", type=int, default=0, help="where the workers meet; 0 takes any")
    parser.add_argument("script", help="of your own, with its arguments behind it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    if asked.workers < 1 or asked.max_restarts < 0 or not asked.dead_after >= 0.2:
        parser.error(
            "expected --workers of at least 1, --max-restarts of 0 or more, --dead-after of at least 0.2"
        )
    if not os.path.exists(asked.script):
        parser.error(f"{asked.script} does not exist; expected a Python script")
    command = [sys.executable, asked.script, *asked.arguments]
    try:
        keeper = Keeper(
            asked.workers,
            lambda where: _Process(command, where),
            asked.max_restarts,
            asked.dead_after,
            asked.port,
        )
    except PacelineError as error:
        parser.error(str(error))
    try:
        return _watch(keeper)
    except KeyboardInterrupt:
        return 130
    finally:
        keeper.close()


def _watch(keeper: Keeper) -> int:
    """Until the last worker has ended."""
    ended = False
    while keeper.workers:
        began = keeper.running
        for loss in keeper.look():
            ended |= loss.words == "ended"
            if loss.lost or loss.words == "left":
                last_words(f"worker {loss.place} {loss.words}")
            if not began and loss.words != "left":  # all are needed to begin
                return 0 if not loss.lost and not keeper.workers else 1
        time.sleep(LOOK)
    if not ended:
        last_words("no worker is left; start the script again from its checkpoint")
    return 0 if ended else 1


if __name__ == "__main__":
    sys.exit(main())
