"""Others who reach the ports of an elastic run: what they write is refused, and nothing of it is run."""

from __future__ import annotations

import asyncio
import base64
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from paceline.errors import PacelineError, WorkerError
from paceline.torch.elastic import gateway, group, messages, nodes
from paceline.torch.elastic.gateway import Forwarder, Relay, both_ways
from paceline.torch.elastic.group import ConnectionPool
from paceline.torch.elastic.handover import Handover
from paceline.torch.elastic.link import LauncherLink
from paceline.torch.elastic.messages import MembershipEpoch, Signer, Where, WorkerId
from paceline.torch.elastic.nodes import COUNT, FIRST, REPORT, NodeAgent, OtherMachines
from paceline.torch.elastic.supervisor import Supervisor, _store
from support.guarantees import guarantee
from support.ports import free_port, locks
from support.stands import Stands


def descriptors() -> list[str]:
    """What this process has open, except for the locks of ports."""
    found = []
    for name in {*os.listdir("/proc/self/fd")} - {*map(str, locks())}:
        with suppress(OSError):  # that of the folder itself
            found.append(os.readlink(f"/proc/self/fd/{name}"))
    return found


@pytest.fixture(scope="module")
def _first_store() -> None:
    """The first one of a process opens a pipe for all of them, which stays."""
    _store(0)


@pytest.fixture(autouse=True)
def _nothing_stays_open(_first_store: None) -> Iterator[None]:
    """A run that is over keeps no connection, port or thread."""
    before, threads = descriptors(), threading.active_count()
    yield
    end = time.monotonic() + 400  # gloo's groups are closed by threads
    while len(descriptors()) > len(before) or threading.active_count() > threads:
        left = [each for each in descriptors() if each not in before]
        assert time.monotonic() < end, (left, threading.enumerate())
        group.let_go()
        gc.collect()
        time.sleep(0.05)


class Runs:
    """What pickle would run on reading it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@guarantee(
    "Nothing that is read from the store is run as code; a state that would need it raises in "
    "`pace.register()`."
)
def test_nothing_that_is_read_is_run(tmp_path: Path) -> None:
    given = {
        "array": np.arange(3.0),
        "numbers": (np.float64(2.5), np.int64(3), None, True, "x", b"y"),
        "generator": np.random.default_rng(3).bit_generator.state,
        "tensor": torch.ones(2, dtype=torch.float16),
    }
    read = messages.unpack(bytes(messages.pack(given)), "it")
    assert read["numbers"] == given["numbers"]
    assert read["generator"] == given["generator"]
    assert np.array_equal(read["array"], given["array"])
    assert torch.equal(read["tensor"], given["tensor"])
    whole = bytes(messages.pack(given))
    for raw in (b"", b"garbage", whole[: len(whole) // 2], whole[:-1]):
        with pytest.raises(WorkerError, match="a message of worker 3 cannot be read; another program"):
            messages.unpack(raw, "a message of worker 3")
    with pytest.raises(WorkerError, match=r"a message of worker 3 holds posix\.mkdir, which is not read"):
        messages.unpack(bytes(messages.pack(Runs(tmp_path / "run"))), "a message of worker 3")
    assert not (tmp_path / "run").exists()


@guarantee(
    "Nothing that is read from the store is run as code; a state that would need it raises in "
    "`pace.register()`."
)
def test_a_state_that_no_joiner_could_read_is_told_at_once() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

        def load_state_dict(self, state: Any) -> None: ...

    handover = Handover(dict, print, dict, print)
    with pytest.raises(PacelineError, match=r"pace.register\(\): the state of a Odd holds pathlib"):
        handover.register([Odd()])
    with torch.serialization.safe_globals([type(Path("x")), Path]):
        handover.register([Odd()])


@guarantee(
    "Strangers and wrong tokens are refused with an error message; a stranger takes part in no sum, and the "
    "run continues."
)
def test_what_a_stranger_writes_into_the_store_is_refused(tmp_path: Path) -> None:
    started: list[Stands] = []

    def start(where: Where) -> Stands:
        started.append(Stands(where))
        return started[-1]

    keeper = Supervisor(2, start)
    try:
        link, other = (LauncherLink(worker.where) for worker in started)
        stranger = dist.TCPStore("127.0.0.1", keeper.store.port, None, False, timedelta(seconds=20))
        bomb = base64.b64encode(messages.pack(Runs(tmp_path / "run"))).decode()
        stranger.set("said/0/1", bomb)
        with pytest.raises(
            WorkerError, match="said/0/1 in the run's store, which belongs to worker 1, was not"
        ):
            link.gather("word")
        stranger.set("said/1/1", Signer("another secret").signed("said/1/1", bomb))
        with pytest.raises(WorkerError, match="another program reaches the store's port; keep it away"):
            link.gather("word")
        stranger.set("said/2/1", other.signer.signed("said/0/1", bomb))  # of another key
        with pytest.raises(WorkerError, match=r"said/2/1 .* was not written by it"):
            link.gather("word")

        both = MembershipEpoch(0, (WorkerId(0, 0), WorkerId(1, 1)), True)
        stranger.set("word/0/1", '{"has": true, "done": 99}')
        stranger.add("arrived/0", 1)
        with pytest.raises(WorkerError, match="word/0/1 in the run's store, which belongs to worker 1"):
            link.meet(both, {"has": True, "done": 0}, "round 0")

        stranger.set("membership/0", "[0, [[0, 0], [7, 1]], true]")
        for ident in (0, 1):
            stranger.set(f"notice/0/{ident}", "")
        with pytest.raises(
            WorkerError, match="membership/0 in the run's store, which belongs to the launcher"
        ):
            link.next(-1)
        link.close()
        other.close()
    finally:
        keeper.close()
    assert not (tmp_path / "run").exists()

    known = OtherMachines(keeper.store, 1.0, Signer("the run's"))
    stranger.add(COUNT, 1)
    stranger.set(REPORT(FIRST), "[0, 1000]")
    with pytest.raises(WorkerError, match="belongs to the launcher of machine 2, was not written"):
        known.look()


def connected(signers: list[Signer]) -> list[group.Group | None]:
    """What comes of members with these signers who meet."""
    store, found = dist.HashStore(), dict[int, Any]()

    def meet(index: int, signer: Signer) -> None:
        stores = ConnectionPool(lambda: store)
        found[index] = group.connect(stores, "group/3", index, len(signers), lambda: False, signer)

    threads = [threading.Thread(target=meet, args=each) for each in enumerate(signers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(400)
    return [found[index] for index in range(len(signers))]


def test_who_answers_in_the_place_of_a_member_must_be_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    ours = Signer("of this run")
    assert all(connected([ours, ours, ours]))
    assert connected([ours, ours, Signer("of another")]) == [None, None, None]
    assert all(connected([ours]))


def listening_ports() -> set[int]:
    connections = psutil.Process().net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


@guarantee(
    "Strangers and wrong tokens are refused with an error message; a stranger takes part in no sum, and the "
    "run continues."
)
def test_who_guesses_gloo_s_numbers_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gloo takes whoever first sends the number of a member for that member."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(group, "PROOFS", timedelta(seconds=0.5))
    # A member whose place the stranger has may wait for as long as this.
    monkeypatch.setattr(group, "TIMEOUT", timedelta(seconds=10))
    ours, got_in = Signer("of this run"), False
    for _ in range(30):  # where the late member is the one that is connected to, the stranger gets no place
        before, store, found = listening_ports(), dist.HashStore(), dict[int, Any]()

        def meet(index: int, store: Any = store, found: dict[int, Any] = found) -> None:
            stores = ConnectionPool(lambda: store)
            found[index] = group.connect(stores, "group/3", index, 2, lambda: False, ours)

        members = [threading.Thread(target=meet, args=(index,)) for index in (0, 1)]
        members[0].start()
        end = time.monotonic() + 400
        while not (new := listening_ports() - before):
            assert time.monotonic() < end
        strangers = []
        for port in new:
            for number in range(4):
                strangers.append(socket.create_connection(("127.0.0.1", port), 20))
                strangers[-1].sendall(struct.pack("<q", number))
        time.sleep(0.05)  # else the member may be before them
        members[1].start()
        for member in members:
            member.join(400)
        if found[0] is not None and found[1] is not None:  # then these are members
            parts = [torch.full((3,), index + 1.0) for index in (0, 1)]
            works = [found[index].sum(parts[index]) for index in (0, 1)]
            until = time.monotonic() + 400

            def late(until: float = until) -> bool:
                return time.monotonic() > until

            assert all(found[i].all_done([works[i]], late) for i in (0, 1))
            assert [part.tolist() for part in parts] == [[3.0] * 3] * 2
        else:
            got_in = True
        for stranger in strangers:
            stranger.close()
        if got_in:
            return
    raise AssertionError("no stranger came as far as to be asked")


def test_a_relay_that_is_closed_drops_every_connection(caplog: pytest.LogCaptureFixture) -> None:
    """Also one to somebody who reads no more; and nothing is told of it."""

    class Sends(Relay):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            here = await asyncio.open_connection("127.0.0.1", there.getsockname()[1])
            await both_ways((reader, writer), here)

    with gateway.socket_at("127.0.0.1", 0) as there:
        relay = Sends("127.0.0.1", 0)
        talks, waits = (socket.create_connection(("127.0.0.1", relay.port), 20) for _ in range(2))
        with talks, waits, there.accept()[0] as one, there.accept()[0] as two:
            talks.settimeout(0.2)
            with suppress(TimeoutError):
                while True:
                    talks.sendall(b"x" * (1 << 20))  # which nobody reads, until no more has room on the way
            relay.close()
            relay.close()
            for each in (one, two, talks, waits):
                each.settimeout(20)
                with suppress(ConnectionResetError):
                    while each.recv(1 << 20):
                        pass
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", relay.port), 20)
    assert not caplog.records


TOKEN = "a token of these tests"


def spoken(port: int, *words: bytes) -> bytes:
    """What a stranger who says this hears, all of it until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), 20) as there:
        with suppress(OSError):
            for each in words:
                there.sendall(each)
        heard = b""
        with suppress(ConnectionResetError):
            while more := there.recv(4096):
                heard += more
        return heard


def joined(port: int, token: str, said: list[str], started: list[Stands]) -> threading.Thread:
    """A launcher that joins; how it ended is among what it said."""

    def start(where: Where) -> Stands:
        started.append(Stands(where))
        return started[-1]

    def run() -> None:
        station = NodeAgent("127.0.0.1", port, 1, start, 2.0, 1.0, said.append, token)
        try:
            said.append(f"ended with {station.run()}")
        except PacelineError as error:
            said.append(str(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_a_launcher_that_nobody_answers_gives_up(token: str) -> None:
    """It tries again and again, and keeps nothing of what it has tried."""
    port, said, threads = free_port(), list[str](), threading.active_count()
    launcher = joined(port, token, said, [])
    time.sleep(0.9)  # of a second
    assert threading.active_count() <= threads + 3  # the launcher, its forwarder, and its call to the store
    launcher.join(400)
    assert said[0] == f"no answer at 127.0.0.1:{port}; this machine joins when it answers"
    assert said[1].endswith("has not answered for 1 s; start the script again from its checkpoint")


@guarantee(
    "Strangers and wrong tokens are refused with an error message; a stranger takes part in no sum, and the "
    "run continues."
)
def test_a_stranger_is_turned_away(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(gateway, "SECONDS", 1.0)
    port, here, there, said = free_port(), list[Stands](), list[Stands](), list[str]()

    def start(where: Where) -> Stands:
        here.append(Stands(where))
        return here[-1]

    def until(true: Callable[[], bool]) -> None:
        end = time.monotonic() + 400
        while not true():
            assert time.monotonic() < end, said
            keeper.look()
            time.sleep(0.005)

    with gateway.socket_at("127.0.0.1", port), pytest.raises(PacelineError, match=f"{port} cannot be used"):
        Supervisor(2, start, port=port, elsewhere=1, token=TOKEN)
    keeper = Supervisor(2, start, port=port, elsewhere=1, token=TOKEN)
    try:
        greeting = len(gateway.MARK) + gateway.NONCE
        assert len(spoken(port, b"GET / HTTP/1.1\r\n\r\n" + b"x" * 10**6)) in (0, greeting, greeting + 1)
        assert spoken(port, b"x" * 64)[greeting:] == gateway.NO
        assert len(spoken(port)) == greeting  # says nothing, and is not waited for
        assert keeper.news == ["a program at 127.0.0.1 does not have the token, and was turned away"]
        other = joined(port, "another token of theirs", said, there)
        other.join(400)
        assert (
            said.pop()
            == f"the launcher at 127.0.0.1:{port} has another token; give all launchers of a run the same"
        )
        joined(port, "", said, there).join(400)
        assert said.pop().startswith(
            f"the launcher at 127.0.0.1:{port} asks for a token; give --token-file FILE, or"
        )
        assert not there

        launcher = joined(port, TOKEN, said, there)
        until(lambda: bool(there))
        assert said == [f"machine 2 of the run at 127.0.0.1:{port}"]
        (mine,), (theirs,) = here, there
        assert mine.where.secret == theirs.where.secret == keeper._signer.secret
        assert theirs.where.port not in (port, mine.where.port)  # its own machine's
        links = [LauncherLink(worker.where) for worker in (mine, theirs)]
        words = dict[int, Any]()

        def gather(at: int) -> None:
            words[at] = links[at].gather(at)

        both = [threading.Thread(target=gather, args=(at,)) for at in (0, 1)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join(400)
        assert words == {0: [0, 1], 1: [0, 1]}
        for link in links:
            link.close()
    finally:
        monkeypatch.setattr(nodes, "BYE_SECONDS", 60.0)  # that a busy machine does not take
        began = time.monotonic()
        keeper.close(3)
    assert time.monotonic() - began < nodes.BYE_SECONDS, "the other launcher has said that it knows"
    launcher.join(400)
    assert said[1:] == ["the first machine has ended the run with status 3", "ended with 3"]
    assert not caplog.records


@guarantee(
    "Strangers and wrong tokens are refused with an error message; a stranger takes part in no sum, and the "
    "run continues."
)
def test_a_first_machine_that_is_a_stranger_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not given what would let it in elsewhere, and nothing that it says is taken."""
    monkeypatch.setattr(gateway, "SECONDS", 1.0)

    def answers(words: bytes) -> str:
        with gateway.socket_at("127.0.0.1", 0) as there:
            port = there.getsockname()[1]

            def talk() -> None:
                with suppress(OSError), there.accept()[0] as accepted:
                    accepted.sendall(words)
                    accepted.recv(4096)

            threading.Thread(target=talk, daemon=True).start()
            try:
                with closing(Forwarder("127.0.0.1", port, TOKEN)) as forwarder:
                    return forwarder.authenticate()
            except (PacelineError, OSError) as error:
                return str(error) or type(error).__name__

    assert "is no launcher that asks for a token" in answers(b"HTTP/1.1 400 Bad Request" * 4)
    assert "does not have the token" in answers(gateway.MARK + b"n" * 32 + gateway.YES + b"x" * 64)
    assert answers(gateway.MARK) == "TimeoutError"  # and is asked again later
