"""Ray's start, which waits on a busy machine: Ray ends it after 15 or 30 s."""

import contextlib
import os
import re
import socket
import time
import types
from collections.abc import Iterator
from typing import Any

AGENTS = ("metrics_agent", "metrics_export", "runtime_env_agent")  # those that Ray has no number for


def patient() -> None:
    """Have the Rays that this process starts from now on wait for their own processes.

    Ray gives a node 30 s to start; by the clock that it reads here it has 300. And a node ends if its agents have not
    told it their ports within 15 s; it does not wait for ports that were chosen before.

    Its monitor, which would start further nodes, and that of its logs have nothing to do here, and do not start.
    """
    from ray._private import node, services
    from ray._private.parameter import RayParams

    slow: Any = types.SimpleNamespace(**vars(time) | {"monotonic": lambda: time.monotonic() / 10})
    init: Any = RayParams.__init__
    start, ports = services.start_ray_process, _ports()

    def init_with_ports(self: Any, *given: Any, **named: Any) -> None:
        init(self, *given, **named)
        self.no_monitor, self.include_log_monitor = True, False
        for agent in AGENTS:
            if getattr(self, f"{agent}_port") is None:
                setattr(self, f"{agent}_port", next(ports))

    def start_with_ports(command: list[str], *given: Any, **named: Any) -> Any:
        # The node's command has its agents' commands. In these is a port that the node is not told.
        if any("--listen-port" in part for part in command):
            port = next(ports)
            command = [re.sub(r"--listen-port=\d+", f"--listen-port={port}", part) for part in command]
            command.append(f"--dashboard_agent_listen_port={port}")
        return start(command, *given, **named)

    node.time = slow
    RayParams.__init__ = init_with_ports
    services.start_ray_process = start_with_ports
    os.environ.update(RAY_agent_register_timeout_ms="400000")


def _ports() -> Iterator[int]:
    """Free ports that the system gives to nobody by itself, nor Ray to its workers; others in each process."""
    while True:
        for port in range(20000 + os.getpid() * 8 % 12000, 32000):
            with contextlib.suppress(OSError):
                with socket.socket() as free:
                    free.bind(("", port))
                yield port
