"""Starts the workers of your own script, in place of torchrun or under it, and outlives them all:

    python -m paceline.torch.launcher --workers 4 train.py --lr 0.1

The script makes an ``ElasticPace(model, ...)`` of a plain model, without a process group. It continues when a
worker is killed, freezes, leaves (``pace.leave()``) or joins. With several machines, the launcher of the first one
keeps the rendezvous store of all workers, and each of the others runs a launcher that joins it:

    python -m paceline.torch.launcher --workers 4 --elsewhere 4 --host 10.0.0.1 --port 29400 --token-file key train.py
    python -m paceline.torch.launcher --workers 4 --join 10.0.0.1:29400 --token-file key train.py

The launchers prove to each other that they have the same token, see ``docs/faults.md``.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import psutil

from paceline import tokens
from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic.gateway import LOOPBACK
from paceline.torch.elastic.messages import Where
from paceline.torch.elastic.nodes import NodeAgent
from paceline.torch.elastic.supervisor import DEAD_SECONDS, Supervisor
from paceline.torch.liveness.stall import last_words

LOOK = 0.005  # seconds between two looks at the workers, and at a file
PATIENCE = 60.0  # seconds for which the store may be away
LONGEST = 1e9  # the largest number of seconds for an option
PORTS = 65535  # the highest port
# Seconds that a killed worker may take to end before the launcher looks after the others again. It takes
# milliseconds, unless the kernel holds it, as in a read from a file server that does not answer.
KILLED_SECONDS = 1.0


class _Parser(argparse.ArgumentParser):
    """Reports an error in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"paceline: {message}; see {self.prog} --help\n")

    def number(self, option: str, default: float, least: float, about: str, most: float = math.inf) -> None:
        """Add an option: a whole number if its default is an int, seconds if it is a float. about: its help."""
        bounds = f"from {least} to {most}" if most < math.inf else f"of {least} or more"
        expected = f"a whole number {bounds}"
        if isinstance(default, float):
            expected, most = f"seconds, {least:g} or more", LONGEST

        def read(text: str) -> float:
            with suppress(ValueError):
                if least <= (number := type(default)(text)) <= most:
                    return number
            raise argparse.ArgumentTypeError(f"{text} was given; expected {expected}")

        self.add_argument(option, type=read, default=default, help=about)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script, and return the exit status: 0 if a worker came to the end."""
    parser = _Parser("python -m paceline.torch.launcher", description=__doc__.splitlines()[0])
    parser.number("--workers", 2, 1, "number of workers on this machine")
    parser.number("--max-restarts", 3, 0, "number of workers started in place of lost ones")
    silent = "seconds without a heartbeat until a worker is lost; ten times as many if it has work (Linux)"
    parser.number("--dead-after", DEAD_SECONDS, 0.2, silent)
    parser.number("--port", 0, 0, "port of the rendezvous store; 0 takes any", PORTS)
    parser.number("--elsewhere", 0, 0, "number of workers on other machines")
    parser.add_argument("--host", default="", help="this machine's address, as the others reach it")
    parser.add_argument("--join", type=_place, metavar="HOST:PORT", help="the launcher of the first machine")
    parser.number("--patience", PATIENCE, 0.0, "with --join: seconds for which the first machine may be away")
    parser.add_argument(
        "--token-file",
        type=Path,
        metavar="FILE",
        help=f"with other machines: the token that all launchers share; default ${tokens.TOKEN}",
    )
    parser.add_argument("script", help="your own script, followed by its arguments")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    asked = parser.parse_args(arguments)
    script = Path(asked.script)
    if not script.is_file() and not (script / "__main__.py").is_file():
        what = "is a directory" if script.is_dir() else "does not exist"
        parser.error(f"{script} {what}; expected a Python script")
    if asked.elsewhere and asked.join:
        parser.error("--elsewhere is for the first machine's launcher, and --join for all others; give one")
    if asked.elsewhere and not (asked.host and asked.port):
        parser.error("--elsewhere needs --host and --port, at which the other machines reach this one")
    command = [sys.executable, asked.script, *asked.arguments]
    try:
        asked = _following_torchrun(asked)
        token = _token(asked, asked.join[0] if asked.join else asked.host or LOOPBACK)
        network = interface(address_towards(asked.join[0]) if asked.join else asked.host or LOOPBACK)
        beside = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": network} | dict(os.environ)
        beside["LOCAL_WORLD_SIZE"] = str(asked.workers)  # torchrun has set it to its number of launchers
        return _run(asked, token, lambda where: Process(command, env=beside | where.environment()))
    except WorkerError as error:
        last_words(str(error))
        return 1
    except PacelineError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        last_words("interrupted, and the workers here were ended; start the script again from its checkpoint")
        return 130


def _place(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if host and port.isdecimal() and int(port) <= PORTS:
        return host, int(port)
    raise argparse.ArgumentTypeError(
        f"{text} was given; expected HOST:PORT, as --host and --port of the first machine's launcher"
    )


def _run(asked: argparse.Namespace, token: str, start: Callable[[Where], Process]) -> int:
    """Wait until the run is over, or its last worker has ended, and return the exit status. SIGTERM makes all workers
    of this machine leave at the end of their round."""
    workers, dead = asked.workers, asked.dead_after
    if asked.join:
        host, port = asked.join
        agent = NodeAgent(host, port, workers, start, dead, asked.patience, last_words, token)
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
    """The token that the launchers share; empty if there is none, and none is needed. first: the first machine.

    Raises PacelineError if the network could reach a run without a token."""
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
            f"{tokens.TOKEN}, with the same token on all machines"
        )
    return ""


def _awaited(path: Path, seconds: float) -> str:
    """The token in a file that the launcher of the first machine may be about to write."""

    def absent() -> bool:
        return path.parent.is_dir() and (not path.exists() or (path.is_file() and not path.stat().st_size))

    until = time.monotonic() + seconds
    if seconds and absent():
        last_words(f"{path} does not exist yet; this machine joins when the first has written the token")
    while absent() and time.monotonic() < until:
        time.sleep(LOOK)
    if (token := tokens.read(path)) is None:
        raise PacelineError(f"{path} does not exist; copy the --token-file of the first machine to it")
    return token


def _following_torchrun(asked: argparse.Namespace) -> argparse.Namespace:
    """The options under torchrun: each process is a launcher, rank 0's is the first, and the others join it."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if ranks < 2 or asked.join or asked.elsewhere or "MASTER_ADDR" not in os.environ:
        return asked
    port = asked.port or int(os.environ["MASTER_PORT"]) + 1
    host = asked.host or address(os.environ["MASTER_ADDR"])
    elsewhere = 0 if rank else (ranks - 1) * asked.workers
    join = (host, port) if rank else None
    found = {"port": port, "host": host, "elsewhere": elsewhere, "join": join}
    return argparse.Namespace(**{**vars(asked), **found})


class Process(subprocess.Popen[bytes]):
    """A worker of the script."""

    def kill(self) -> None:
        """Kill it, and release its process if that ends in time; else ``subprocess`` does so at a later start."""
        super().kill()
        with suppress(subprocess.TimeoutExpired):
            self.wait(KILLED_SECONDS)


def watch(supervisor: Supervisor, asked_to_end: list[int]) -> int:
    """Wait for the last worker to end; 0 if one came to the end, else 1. asked_to_end: signals received so far."""
    ended, reported = False, 0
    while supervisor.workers:
        began, losses = supervisor.running, supervisor.look()
        for loss in losses:
            ended |= loss.words == "ended"
            if loss.lost or loss.words == "left":
                last_words(f"worker {loss.place} {loss.words}")
        if not began and any(loss.words != "left" for loss in losses):  # a run begins only with all workers
            return int(any(loss.lost for loss in losses))
        for sentence in supervisor.news[reported:]:
            last_words(sentence)
        reported = len(supervisor.news)
        if asked_to_end:
            asked_to_end.clear()
            supervisor.leave()
        time.sleep(LOOK)
    if not ended:
        last_words("no worker is left; start the script again from its checkpoint")
    return 0 if ended else 1


def address(name: str) -> str:
    """The address of the machine with this name. Raises PacelineError if there is none."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise PacelineError(f"no machine is known by the name {name}; expected a name or address") from error


def address_towards(name: str) -> str:
    """The address from which this machine reaches another; nothing is sent."""
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
    raise PacelineError(
        f"--host {host} is not an address of this machine; expected one that others can reach"
    )


if __name__ == "__main__":
    ended_with = main()
    sys.stdout.flush()
    os._exit(ended_with)  # a thread may hang in a call to a store that does not answer
