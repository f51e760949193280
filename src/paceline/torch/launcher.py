"""Starts the workers of a script of your own, in place of torchrun or by it, and outlives them all:

    python -m paceline.torch.launcher --workers 4 train.py --lr 0.1

The script makes a ``Pace(model, ..., elastic=True)`` of a plain model, without a process group. It goes on when a
worker is killed, freezes, leaves (``pace.leave()``) or joins. With several machines, the launcher of the first keeps
the store in which all workers meet, and each of the others has a launcher that joins it:

    python -m paceline.torch.launcher --workers 4 --elsewhere 4 --host 10.0.0.1 --port 29400 --token-file key train.py
    python -m paceline.torch.launcher --workers 4 --join 10.0.0.1:29400 --token-file key train.py

The launchers show each other that they have the same token, see ``docs/faults.md``.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil

from paceline import tokens
from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.gateway import LOOPBACK
from paceline.torch.elastic.membership import DEAD_SECONDS, Where
from paceline.torch.elastic.nodes import NodeAgent
from paceline.torch.elastic.supervisor import Supervisor
from paceline.torch.liveness.stall import last_words

LOOK = 0.005  # seconds between two looks at the workers, and at a file
PATIENCE = 60.0  # seconds for which the store may be away
LONGEST = 1e9  # seconds
PORTS = 65535  # the highest


class _Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"paceline: {message}; see {self.prog} --help\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script; its exit status: 0 if a worker came to the end."""
    whole = _number(int, 0, "a whole number of 0 or more")
    parser = _Parser("python -m paceline.torch.launcher", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--workers",
        type=_number(int, 1, "a whole number of 1 or more"),
        default=2,
        help="how many on this machine",
    )
    parser.add_argument("--max-restarts", type=whole, default=3, help="workers started in place of lost ones")
    parser.add_argument(
        "--dead-after",
        type=_number(float, 0.2, "seconds, 0.2 or more", LONGEST),
        default=DEAD_SECONDS,
        help="seconds without a sign of life until a worker is lost; ten times as many where it has work (Linux)",
    )
    parser.add_argument(
        "--port",
        type=_number(int, 0, f"a whole number from 0 to {PORTS}", PORTS),
        default=0,
        help="where the workers meet; 0 takes any",
    )
    parser.add_argument("--elsewhere", type=whole, default=0, help="how many workers are on other machines")
    parser.add_argument("--host", default="", help="this machine's address, as the others reach it")
    parser.add_argument("--join", default="", metavar="HOST:PORT", help="the launcher of the first machine")
    parser.add_argument(
        "--patience",
        type=_number(float, 0, "seconds, 0 or more", LONGEST),
        default=PATIENCE,
        help="with --join: seconds that the first may be away",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"with other machines: what all launchers must have; default ${tokens.TOKEN}",
    )
    parser.add_argument("script", help="of your own, with its arguments behind it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    script = Path(asked.script)
    if not script.is_file() and not (script / "__main__.py").is_file():
        what = "is a directory" if script.is_dir() else "does not exist"
        parser.error(f"{script} {what}; expected a Python script")
    if asked.elsewhere and asked.join:
        parser.error(
            "--elsewhere is for the launcher of the first machine, and --join for all others; give one"
        )
    if asked.elsewhere and not (asked.host and asked.port):
        parser.error("--elsewhere needs --host and --port, by which the other machines reach this one")
    if asked.join and not (
        re.fullmatch(r".+:\d{1,5}", asked.join) and int(asked.join.rpartition(":")[2]) <= PORTS
    ):
        parser.error(
            f"--join {asked.join}: expected HOST:PORT, as --host and --port of the first machine's launcher"
        )
    command = [sys.executable, asked.script, *asked.arguments]
    try:
        _as_torchrun_says(asked)
        first = asked.join.rpartition(":")[0]
        token = _token(asked, first or asked.host or LOOPBACK)
        network = interface(address_towards(first) if asked.join else asked.host or LOOPBACK)
        return _run(asked, token, lambda where: Process(command, where, network))
    except WorkerError as error:
        last_words(str(error))
        return 1
    except PacelineError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        return 130


def _number(kind: type, least: float, expected: str, most: float = math.inf) -> Callable[[str], Any]:
    """Reads a number of this kind from ``least`` to ``most``."""

    def read(text: str) -> Any:
        with suppress(ValueError):
            if least <= (number := kind(text)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{text} was given; expected {expected}")

    return read


def _run(asked: argparse.Namespace, token: str, start: Callable[[Where], Process]) -> int:
    """Until the run is over, or its last worker has ended: its exit status. SIGTERM has all workers here leave at the
    end of their round."""
    workers, dead = asked.workers, asked.dead_after
    if asked.join:
        first, _, port = asked.join.rpartition(":")
        agent = NodeAgent(first, int(port), workers, start, dead, asked.patience, last_words, token)
        signal.signal(signal.SIGTERM, lambda *_: agent.leave())
        return agent.run()
    places, host = workers + asked.elsewhere, asked.host or LOOPBACK
    supervisor = Supervisor(places, start, asked.max_restarts, dead, asked.port, host, asked.elsewhere, token)
    asked_to_end, status = list[int](), 130
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    try:
        status = watch(supervisor, asked_to_end)
        return status
    finally:
        supervisor.close(status)


def _token(asked: argparse.Namespace, first: str) -> str:
    """What the launchers show one another; empty if there is none, and none is needed. first: the first machine.

    Raises PacelineError if the network could reach what the token protects."""
    if not (asked.join or asked.elsewhere):
        return ""
    chosen = os.environ.get(tokens.TOKEN)
    if chosen and asked.token_file is not None:
        raise PacelineError(f"{tokens.TOKEN} and --token-file exclude each other; give one")
    if chosen:
        return tokens.checked(chosen)
    if asked.token_file is not None:
        return _awaited(asked.token_file, asked.patience) if asked.join else tokens.kept_in(asked.token_file)
    if not address(first).startswith("127."):
        raise PacelineError(
            f"a run at {first} without a token would let the whole network in; give --token-file FILE, or set "
            f"{tokens.TOKEN}, to the same on all machines"
        )
    return ""


def _awaited(path: Path, seconds: float) -> str:
    """The token in a file that the launcher of the first machine may be about to write."""
    until, told = time.monotonic() + seconds, False
    while path.parent.is_dir() and (not path.exists() or (path.is_file() and not path.stat().st_size)):
        if time.monotonic() >= until:
            break
        if not told:
            told = True
            last_words(
                f"{path} does not exist yet; this machine joins when the first launcher has written the token"
            )
        time.sleep(LOOK)
    if (token := tokens.read(path)) is None:
        raise PacelineError(f"{path} does not exist; copy the --token-file of the first machine to it")
    return token


def _as_torchrun_says(asked: argparse.Namespace) -> None:
    """Under torchrun each process is a launcher: that of rank 0 is the first, and the others join it."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks < 2 or asked.join or asked.elsewhere or "MASTER_ADDR" not in os.environ:
        return
    asked.port = asked.port or int(os.environ["MASTER_PORT"]) + 1
    asked.host = asked.host or address(os.environ["MASTER_ADDR"])
    asked.elsewhere = 0 if rank else (ranks - 1) * asked.workers
    asked.join = f"{asked.host}:{asked.port}" if rank else ""


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


def watch(supervisor: Supervisor, asked_to_end: list[int]) -> int:
    """Until the last worker has ended: 0 if one came to the end, else 1. asked_to_end: signals, as they come."""
    ended, told = False, 0
    while supervisor.workers:
        began = supervisor.running
        for loss in supervisor.look():
            ended |= loss.words == "ended"
            if loss.lost or loss.words == "left":
                last_words(f"worker {loss.place} {loss.words}")
            if not began and loss.words != "left":  # all are needed to begin
                return 0 if not loss.lost and not supervisor.workers else 1
        for sentence in supervisor.news[told:]:
            last_words(sentence)
        told = len(supervisor.news)
        if asked_to_end:
            asked_to_end.clear()
            supervisor.leave()
        time.sleep(LOOK)
    if not ended:
        last_words("no worker is left; start the script again from its checkpoint")
    return 0 if ended else 1


def address(name: str) -> str:
    """A machine's own address. Raises PacelineError if there is none."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise PacelineError(
            f"no machine is known by the name {name}; expected a name or an address"
        ) from error


def address_towards(name: str) -> str:
    """This machine's address, by which it reaches another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address(name), 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PacelineError(f"{name} cannot be reached from this machine: {error.strerror}") from error


def interface(host: str) -> str:
    """The network interface with this address. Raises PacelineError if there is none on this machine."""
    found = address(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == found for each in addresses):
            return name
    if found.startswith("127."):
        return "lo"
    raise PacelineError(f"--host {host} is no address of this machine; expected one by which others reach it")


if __name__ == "__main__":
    ended_with = main()
    sys.stdout.flush()
    os._exit(ended_with)  # a thread may be in a call of torch's, to a store that does not answer
