"""A port that a test asks for is free, and nobody else gets it."""

import socket

from support.ports import RANGE, free_port


def test_free_port_can_be_bound_and_is_never_given_to_a_connection() -> None:
    port = free_port()
    assert port < int(RANGE.read_text().split()[0])
    with socket.create_server(("127.0.0.1", port)):
        pass


def test_free_ports_differ() -> None:
    assert len({free_port() for _ in range(64)}) == 64
