"""Launchers of several machines: one disappears and comes back; the one that keeps the store is lost.

The machines are network namespaces with a cable between them. Where they may not be made, they are addresses of one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from paceline.torch.elastic.gateway import Gateway
from paceline.torch.elastic.messages import Signer, Where
from paceline.torch.elastic.nodes import COUNT, GONE, Lost, NodeAgent
from paceline.torch.elastic.nodes import OtherMachines as Known
from paceline.torch.elastic.supervisor import _store
from support.elastic_runs import alone, network
from support.forks import Program, below
from support.guarantees import guarantee
from support.ports import free_port
from support.stands import Stands

SCRIPT = Path(__file__).with_name("own_script.py")

GUARANTEES = (
    "Under the launcher, a script continues at once after killed workers or a lost machine, which may "
    "come back.",
    "If all ranks with the model or the machine with the store are lost, the run ends with an error; a "
    "checkpoint resumes it exactly.",
)


def ip(*words: str) -> bool:
    try:
        return subprocess.run(["ip", *words], capture_output=True).returncode == 0
    except OSError:
        return False


class Machines:
    """Two of them, "a" and "b", each with an address, and commands that run there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launchers = folder, dict[str, Program]()
        self.port = free_port()
        self.names = {which: f"pace{os.getpid()}{which}" for which in "ab"}
        self.apart = all(ip("netns", "add", name) for name in self.names.values())
        a, b = self.names.values()
        self.apart &= ip("link", "add", a, "netns", a, "type", "veth", "peer", "name", b, "netns", b)
        self.address = {
            which: f"10.77.0.{n}" if self.apart else f"127.0.0.{n}" for n, which in enumerate("ab", 1)
        }
        for which, name in self.names.items() if self.apart else ():
            assert ip("-n", name, "addr", "add", f"{self.address[which]}/24", "dev", name)
            assert ip("-n", name, "link", "set", name, "up")
            assert ip("-n", name, "link", "set", "lo", "up")

    def start(self, which: str, *words: str, rounds: int = 10**6, **told: str) -> None:
        """A launcher on this machine. told: variables of a launcher, such as torchrun."""
        program = ["-m", "paceline.torch.launcher", *words, SCRIPT, self.folder, rounds]
        network = self.names[which] if self.apart else ""
        # This process has an interface of its own, which the machines do not share.
        self.launchers[which] = Program(
            program, self.folder, {"GLOO_SOCKET_IFNAME": None} | told, network=network
        )

    def cut(self, which: str) -> None:
        """Nothing reaches this machine any more: its link is down, or all of its processes stand still."""
        if self.apart:
            assert ip("-n", self.names[which], "link", "set", self.names[which], "down")
        else:
            self.signal(which, signal.SIGSTOP)

    def mend(self, which: str) -> None:
        if self.apart:
            assert ip("-n", self.names[which], "link", "set", self.names[which], "up")
        else:
            self.signal(which, signal.SIGCONT)

    def signal(self, which: str, number: int) -> None:
        """To the launcher there and all of its workers."""
        launcher = self.launchers[which]
        for process in [psutil.Process(launcher.pid), *below(launcher.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def said(self, which: str) -> str:
        return self.launchers[which].said()[1]

    def until(self, true: Callable[[], bool], seconds: float = 240.0) -> None:
        end = time.monotonic() + seconds
        while not true():
            said = {which: self.said(which) for which in self.launchers}
            assert all(launcher.poll() in (None, 0) for launcher in self.launchers.values()), said
            assert time.monotonic() < end, said
            time.sleep(0.02)

    def rounds(self, rank: int) -> list[list[int]]:
        """That each worker in this place has run."""
        files = sorted(self.folder.glob(f"rounds-{rank}-*"), key=lambda path: path.stat().st_mtime)
        return [[int(line) for line in path.read_text().split("\n")[:-1]] for path in files]

    def goes_on(self) -> None:
        since = self.newest()
        self.until(lambda: self.newest() > since + 10)

    def newest(self) -> int:
        return max((numbers[-1] for numbers in self.rounds(0) if numbers), default=0)

    def end(self) -> None:
        for which, launcher in self.launchers.items():
            if launcher.poll() is None:
                self.signal(which, signal.SIGKILL)
            launcher.wait()
        for name in self.names.values():
            ip("netns", "del", name)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.end()


def test_lost_machine_rejoins_and_a_lost_store_ends_the_run(machines: Machines) -> None:
    address = machines.address["a"]
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(machines.port - 1)}
    token = f"--token-file={machines.folder / 'token'}"  # made by the first
    join = [f"--join={address}:{machines.port}", token, "--workers=1", "--dead-after=2", "--patience=20"]
    machines.start("b", *join)
    machines.start("a", token, "--workers=1", "--dead-after=2", **torchrun)
    machines.until(lambda: machines.newest() > 10)
    assert len(machines.rounds(1)) == 1

    machines.cut("b")
    machines.until(lambda: "no heartbeat for 2 s" in machines.said("a"))
    machines.goes_on()
    machines.mend("b")
    machines.until(lambda: len(back := machines.rounds(1)) == 2 and len(back[1]) > 10)
    assert "the workers here end, and this machine joins again" in machines.said("b")
    before, after = machines.rounds(1)
    assert before[-1] < after[0]

    (every,) = machines.rounds(0)
    assert every == list(range(1, every[-1] + 1))  # the worker of the first machine was never started again

    machines.signal("a", signal.SIGKILL)
    assert machines.launchers["b"].wait(400) == 1
    last = machines.said("b").split("paceline: ")[-1].strip()  # its worker may have ended within a line
    del machines.launchers["b"]
    assert last.startswith(f"the machine at {address}:{machines.port}, which keeps the run together, has")
    assert last.endswith("start the script again from its checkpoint")
    done = torch.load(machines.folder / "checkpoint.pt", weights_only=False)["pace"]["rounds"]
    machines.start("a", "--workers=1")
    machines.until(lambda: machines.newest() > done + 10)
    machines.launchers["a"].terminate()  # as where the machine is taken away: the round is run to its end
    assert machines.launchers["a"].wait(400) == 1
    assert "worker 0 left" in machines.said("a")
    kept = torch.load(machines.folder / "checkpoint.pt", weights_only=False)
    model = network()
    model.load_state_dict(kept["model"])
    found = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    assert (found - alone(kept["pace"]["rounds"])).abs().max() < 1e-12


@guarantee(
    "Ctrl-C at one launcher or all of them ends all with status 130 and a message, and leaves no worker."
)
@pytest.mark.parametrize("which", ["a", "ba"])
def test_ctrl_c_ends_all_machines(which: str, machines: Machines) -> None:
    """At the first of them, and at the other before. Each launcher says so, and no worker is left."""
    address, token = machines.address["a"], f"--token-file={machines.folder / 'token'}"
    join = f"--join={address}:{machines.port}"
    machines.start("b", join, token, "--workers=1")
    machines.start("a", token, "--workers=1", "--elsewhere=1", f"--host={address}", f"--port={machines.port}")
    machines.until(lambda: machines.newest() > 3)
    workers = [worker for each in machines.launchers.values() for worker in below(each.pid)]
    for each in which:
        machines.launchers[each].send_signal(signal.SIGINT)
    assert {each: launcher.wait(400) for each, launcher in machines.launchers.items()} == {"a": 130, "b": 130}
    for each in which:
        assert machines.said(each).count("paceline: interrupted, and the workers here were ended") == 1
    assert which == "ba" or "paceline: the first machine has ended the run with status 130" in machines.said(
        "b"
    )
    assert not psutil.wait_procs(workers, 20)[1]
    assert torch.load(machines.folder / "checkpoint.pt", weights_only=False)["pace"]["rounds"] > 2


def _until(true: Callable[[], bool], said: list[str], meanwhile: Callable[[], None] = lambda: None) -> None:
    """said: what is printed if that takes longer than a minute."""
    end = time.monotonic() + 400
    while not true():
        assert time.monotonic() < end, said
        meanwhile()
        time.sleep(0.005)


def test_node_agent_starts_ends_and_reports_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers wait for a machine with room; each end is told; a machine leaves after its workers, and a silent one is
    gone on without, but not before the run has begun."""
    store, said, begun = _store(0), list[str](), False
    gateway = Gateway("127.0.0.1", 0, "", store.port, said.append)
    known, workers = Known(store, 0.5, Signer(gateway.secret)), list[Stands]()

    def start(where: Where) -> Stands:
        workers.append(Stands(where))
        return workers[-1]

    def until(true: Callable[[], bool]) -> None:
        _until(true, said, lambda: said.extend(known.look(begun)))

    def joined() -> tuple[NodeAgent, threading.Thread, list[int]]:
        station, status = NodeAgent("127.0.0.1", gateway.port, 2, start, 5.0, 5.0, said.append), list[int]()
        thread = threading.Thread(target=lambda: status.append(station.run()), daemon=True)
        thread.start()
        return station, thread, status

    three = [known.start(Where("127.0.0.1", store.port, ident, ident, 3)) for ident in range(3)]
    station, thread, status = joined()
    until(lambda: len(workers) == 2)
    workers[0].over = 7
    until(lambda: three[0].poll() == 7 and len(workers) == 3)  # which waited for room
    three[2].kill()
    until(lambda: three[2].poll() == -9)
    station.leave()
    assert workers[1].told == ["leave"]
    workers[1].over = 0
    until(lambda: three[1].poll() == 0 and "machine 2 has left" in said)
    thread.join(400)
    assert status == [0]

    last = known.start(Where("127.0.0.1", store.port, 3, 0, 3))
    station, thread, status = joined()
    until(lambda: len(workers) == 4)
    monkeypatch.setattr("paceline.torch.elastic.nodes.LOOK", 3.0)  # it stands still
    stood = time.monotonic()
    until(lambda: time.monotonic() - stood > 1.5)
    assert last.poll() is None
    begun = True
    until(lambda: last.poll() == GONE)
    assert "machine 3 gave no heartbeat for 0.5 s" in said
    monkeypatch.setattr("paceline.torch.elastic.nodes.LOOK", 0.01)
    until(lambda: "machine 4 has joined" in said)  # it hears that the others went on, and comes again
    assert workers[3].told == ["kill"]
    known.close(3)
    thread.join(400)
    assert status == [3]
    gateway.close()


def test_first_machine_with_another_run_receives_the_workers() -> None:
    """Their numbers are those of the run before; and who is told to leave while the first is away waits no longer."""
    said, workers, status = list[str](), list[Stands](), list[int]()

    def start(where: Where) -> Stands:
        workers.append(Stands(where))
        return workers[-1]

    def begins(port: int, many: int) -> Gateway:
        store = _store(0)
        gateway = Gateway("127.0.0.1", port, "", store.port, said.append)
        known = Known(store, 5.0, Signer(gateway.secret))
        known.start(Where("127.0.0.1", store.port, 0, 0, 1))
        if many == 1:
            thread.start()
        _until(lambda: known.look() is not None and len(workers) == many, said)
        return gateway

    port = free_port()
    station = NodeAgent("127.0.0.1", port, 1, start, 0.5, 600.0, said.append)
    thread = threading.Thread(target=lambda: status.append(station.run()), daemon=True)
    for many in (1, 2):
        begins(port, many).close()
        _until(lambda: workers[-1].told == ["kill"], said)
    station.leave()
    thread.join(400)
    assert status == [0]


def test_machine_that_ends_while_it_joins_keeps_no_other_out() -> None:
    """It has a number and gives no report: it is neither waited for nor counted."""
    store, said, workers, status = _store(0), list[str](), list[Stands](), list[int]()
    gateway = Gateway("127.0.0.1", 0, "", store.port, said.append)
    known = Known(store, 5.0, Signer(gateway.secret))

    def start(where: Where) -> Stands:
        workers.append(Stands(where))
        return workers[-1]

    store.add(COUNT, 1)
    assert not known.look()
    store.add(COUNT, 1)
    known.start(Where("127.0.0.1", store.port, 0, 0, 1))
    station = NodeAgent("127.0.0.1", gateway.port, 2, start, 5.0, 5.0, said.append)
    thread = threading.Thread(target=lambda: status.append(station.run()), daemon=True)
    thread.start()
    _until(lambda: bool(workers), said, lambda: said.extend(known.look()))
    assert "machine 4 has joined" in said
    assert known.free == 1, "of the machine with room for 2, which has one worker"
    known.close(0)
    thread.join(400)
    assert status == [0]
    gateway.close()


def test_machine_that_fails_to_join_counts_once_when_it_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store does not answer in time when the machine has its number."""
    store, said, status, failed = _store(0), list[str](), list[int](), list[str]()
    gateway = Gateway("127.0.0.1", 0, "", store.port, said.append)
    known, ask = Known(store, 5.0, Signer(gateway.secret)), NodeAgent._ask

    def ask_late(agent: NodeAgent, name: str, *arguments: Any) -> Any:
        answer = ask(agent, name, *arguments)
        if name == "set" and not failed:
            failed.append(arguments[0])
            raise Lost("the store has not answered for 5 s")
        return answer

    monkeypatch.setattr(NodeAgent, "_ask", ask_late)
    station = NodeAgent("127.0.0.1", gateway.port, 2, Stands, 5.0, 5.0, said.append)
    thread = threading.Thread(target=lambda: status.append(station.run()), daemon=True)
    thread.start()
    _until(lambda: "machine 3 has joined" in said, said, lambda: said.extend(known.look()))
    assert failed == ["machine/2/orders"]
    assert known.free == 2
    known.close(0)
    thread.join(400)
    assert status == [0]
    gateway.close()


def test_sigterm_while_a_worker_starts_reaches_it() -> None:
    """The signal's handler runs while the process is started, before the agent has it."""
    store, said, workers, status = _store(0), list[str](), list[Stands](), list[int]()
    gateway = Gateway("127.0.0.1", 0, "", store.port, said.append)
    known = Known(store, 5.0, Signer(gateway.secret))

    def start(where: Where) -> Stands:
        station.leave()
        workers.append(Stands(where))
        return workers[-1]

    known.start(Where("127.0.0.1", store.port, 0, 0, 1))
    station = NodeAgent("127.0.0.1", gateway.port, 1, start, 5.0, 5.0, said.append)
    thread = threading.Thread(target=lambda: status.append(station.run()), daemon=True)
    thread.start()
    _until(lambda: bool(workers and workers[0].told), said, lambda: said.extend(known.look()))
    assert workers[0].told == ["leave"]
    workers[0].over = 0
    _until(lambda: "machine 2 has left" in said, said, lambda: said.extend(known.look()))
    thread.join(400)
    assert status == [0]
    gateway.close()
