"""A socket that listens."""

from __future__ import annotations

import socket

from paceline.errors import PacelineError

LOOPBACK = "127.0.0.1"


def socket_at(host: str, port: int) -> socket.socket:
    """One of IPv4, at this machine's address ``host``; port: 0 for any. Raises PacelineError where it cannot be."""
    listening = socket.socket(socket.AF_INET)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
        listening.listen(1024)
    except OSError as error:
        listening.close()
        raise PacelineError(
            f"port {port} cannot be used on this machine; choose another, or 0 for any"
        ) from error
    return listening
