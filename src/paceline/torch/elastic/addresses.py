"""Machines by their names and addresses, of IPv4."""

from __future__ import annotations

import socket

import psutil

from paceline.errors import PacelineError


def address(name: str) -> str:
    """A machine's own address. Raises PacelineError where there is none."""
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        raise PacelineError(
            f"no machine is known by the name {name}; expected a name or an address"
        ) from error


def address_towards(name: str) -> str:
    """That of this machine, by which it reaches another; nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address(name), 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise PacelineError(f"{name} cannot be reached from this machine: {error.strerror}") from error


def interface(host: str) -> str:
    """The network interface with this address. Raises PacelineError where there is none on this machine."""
    found = address(host)
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == found for each in addresses):
            return name
    if found.startswith("127."):
        return "lo"
    raise PacelineError(f"--host {host} is no address of this machine; expected one by which others reach it")
