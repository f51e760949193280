"""A script of one's own under ``python -m paceline.torch.launcher``: workers are lost, and the run goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.torch import launcher
from paceline.torch.elastic.messages import Where
from paceline.torch.elastic.supervisor import Supervisor
from paceline.torch.liveness.detector import Threads
from support.guarantees import guarantee
from support.stands import Stands

pytestmark = [pytest.mark.usefixtures("warm")]

SCRIPT = """
import os, signal, sys, threading, time
import torch
from paceline.errors import PacelineError
from paceline.torch import ElasticPace
from paceline.torch.elastic import member

member.TOGETHER_SECONDS = 90.0

torch.set_num_threads(1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
pace = ElasticPace(model, 24)
with pace:
    loader = pace.loader(data, seed=1)
    pace.register(optimizer)
    for epoch in range(pace.epoch, 3):
        for batch in loader:
            if pace.rank == 2 and pace.rounds == 15:
                raise ValueError("what is wrong in a script")
            pace.round(batch, lambda x, y: (model(x) - y).square().mean())
            if pace.rounds == 0:
                try:
                    pace.step(torch.optim.SGD(model.parameters(), lr=0.1))
                except PacelineError as error:
                    print(error, file=sys.stderr, flush=True)
            pace.step(optimizer)
            if pace.rounds == 10 and pace.rank == 1:  # while it waits for the others at the end of the epoch
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
            if pace.rounds == 10 and pace.rank == 2:
                time.sleep(2)
            if pace.rounds == 10:
                began = time.monotonic()
            if pace.rounds == 11:
                held = time.monotonic() - began
    print("end", pace.rounds, held, *model.weight.flatten().tolist(), flush=True)
"""


def plain() -> list[float]:
    """What PyTorch alone comes to, in one process."""
    torch.manual_seed(0)
    x, y = torch.randn(240, 4), torch.randn(240, 1)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        for rows in torch.from_numpy(np.random.default_rng((1, epoch)).permutation(240)).split(24):
            optimizer.zero_grad()
            (model(x[rows]) - y[rows]).square().mean().backward()
            optimizer.step()
    return [float(each) for each in model.weight.detach().flatten()]


@guarantee(
    "Under the launcher, a script continues at once after killed workers or a lost machine, which may come "
    "back."
)
def test_a_script_goes_on_without_its_workers(tmp_path: Path) -> None:
    """One is killed at the end of an epoch, where nobody waits for it, and one ends with an error. An optimizer is
    refused whose state nobody who joins would be given."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "paceline.torch.launcher", "--workers", "3", "--max-restarts", "0"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "paceline: worker 1 was killed by SIGKILL" in done.stderr
    assert "ValueError: what is wrong in a script" in done.stderr
    assert done.stderr.count("the SGD that steps the model was not given to pace.register()") == 3
    assert "paceline: worker 2 ended with status 1" in done.stderr  # and not by a signal of its own
    end, rounds, held, *weights = done.stdout.split()
    assert (end, rounds) == ("end", "30")
    assert float(held) < 60
    assert [float(each) for each in weights] == pytest.approx(plain(), abs=1e-5)


def test_a_run_whose_last_worker_ends_with_an_error_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    started: list[Stands] = []

    def start(where: Where) -> Stands:
        started.append(Stands(where))
        return started[-1]

    keeper = Supervisor(1, start)
    keeper.store.set("join/0", "1")
    keeper.look()
    assert keeper.running
    started[0].over = 1
    try:
        assert launcher.watch(keeper, []) == 1
    finally:
        keeper.close()
    assert capsys.readouterr().err.splitlines() == [
        "paceline: worker 0 ended with status 1",
        "paceline: no worker is left; start the script again from its checkpoint",
    ]


EPOCHS = """
import os, signal, sys, time
import torch
from paceline.torch import ElasticPace

torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pace = ElasticPace(model, 24)
with pace:
    loader = pace.loader(data, seed=1)
    pace.register(optimizer)
    joined = pace.rounds
    first = 0 if sys.argv[1] == "wrong" else pace.epoch
    for epoch in range(first, 4):
        for batch in loader:
            if pace.rank == 1 and pace.rounds == 3 and not joined:
                os.kill(os.getpid(), signal.SIGKILL)
            while pace.rank == 0 and pace.rounds == 5 and len(pace._member._link.known.members) < 2:
                time.sleep(0.01)
            pace.round(batch, lambda x, y: (model(x) - y).square().mean())
            pace.step(optimizer)
print(f"end {pace.rounds}\\n", end="", flush=True)  # in one piece, also beside the other worker's
"""


@guarantee(
    "A joiner that trains more epochs than the first ranks ends with an "
    "error, and their model and checkpoint stay as they are."
)
@pytest.mark.parametrize("loop", ["wrong", "right"])
def test_one_that_joined_trains_no_longer_than_those_who_were_there(loop: str, tmp_path: Path) -> None:
    """One whose loop begins with epoch 0 again is told so, when all others have ended."""
    script = tmp_path / "train.py"
    script.write_text(EPOCHS)
    command = [sys.executable, "-m", "paceline.torch.launcher", "--workers", "2", "--max-restarts", "1"]
    done = subprocess.run([*command, str(script), loop], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()) == {"end 8"}
    told = "this rank joined, and begins an epoch though the loops of all who were there before have ended"
    assert done.stderr.count(told) == (loop == "wrong")
    assert ("range(pace.epoch, epochs)" in done.stderr) == (loop == "wrong")


HOLDS = """
import os, signal, time
import torch
from paceline.torch import ElasticPace

torch.set_num_threads(1)
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(240, 4), torch.randn(240, 1))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pace = ElasticPace(model, 24)
held = {}
with pace:
    loader = pace.loader(data, seed=1)
    pace.register(optimizer)
    for epoch in range(pace.epoch, 2):
        for batch in loader:
            began, number = time.monotonic(), pace.rounds
            if pace.rank == 1 and number == 5:  # no byte code runs until the time is over, so the lock is held
                next(filter((began + 4.0).__lt__, iter(time.monotonic, None)))
            if pace.rank == 1 and number == 12:
                os.kill(os.getpid(), signal.SIGSTOP)
            pace.round(batch, lambda x, y: (model(x) - y).square().mean())
            pace.step(optimizer)
            held[number] = time.monotonic() - began
print("end", pace.rounds, held[5], held[12], flush=True)
"""


def test_a_worker_that_holds_pythons_lock_lives_and_one_that_is_stopped_does_not(tmp_path: Path) -> None:
    """The first is silent for four times as long as the second may be. Worker 0, which may begin the round later,
    prints how long it waited for each."""
    script = tmp_path / "train.py"
    script.write_text(HOLDS)
    command = [sys.executable, "-m", "paceline.torch.launcher", "--workers", "2", "--max-restarts", "0"]
    done = subprocess.run(
        [*command, "--dead-after", "1", str(script)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    lost = [line for line in done.stderr.splitlines() if "worker" in line]
    assert lost == ["paceline: worker 1 gave no heartbeat for 1 s"]
    end, rounds, held, stopped = done.stdout.split()
    assert (end, rounds) == ("end", "20")
    assert float(held) >= 3
    assert float(stopped) < 2


def test_a_worker_that_has_work_for_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten times as long as one that has none."""
    from paceline.torch.elastic.messages import BEAT

    stands = list[Stands]()

    def start(where: Where) -> Stands:
        stands.append(Stands(where))
        return stands[-1]

    keeper = Supervisor(3, start, dead=0.2)
    monkeypatch.setattr(keeper._starved, "_see", lambda pid: Threads(pid == 1, False, {}))
    for ident, each in enumerate(stands):
        each.pid = ident
        keeper.store.set(f"join/{ident}", "1")
        keeper.store.set(BEAT(ident), "1")
    beats, began, lost = 1, time.monotonic(), dict[int, tuple[str, float]]()
    try:
        while len(lost) < 2:
            assert time.monotonic() - began < 400
            beats += 1
            keeper.store.set(BEAT(0), str(beats))
            for loss in keeper.look():
                lost[loss.ident] = loss.words, time.monotonic() - began
            time.sleep(0.01)
    finally:
        keeper.close()
    assert list(lost) == [2, 1]
    assert lost[2][0] == "gave no heartbeat for 0.2 s"
    assert lost[1][0] == "was busy and gave no heartbeat for 2 s"
    assert lost[1][1] >= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "arguments are required: script"),
        (["nothing.py"], "nothing.py does not exist"),
        ([__file__[: -len("test_launcher.py")]], "is a directory"),
        (["--workers", "0", __file__], "--workers: 0 was given; expected a whole number of 1 or more"),
        (["--workers", "x", __file__], "--workers: x was given; expected a whole number of 1 or more"),
        (["--max-restarts", "-1", __file__], "--max-restarts: -1 was given"),
        (["--dead-after", "0.1", __file__], "--dead-after: 0.1 was given; expected seconds, 0.2 or more"),
        (["--dead-after", "inf", __file__], "--dead-after: inf was given"),
        (["--patience", "nan", __file__], "--patience: nan was given"),
        (["--port", "99999", __file__], "--port: 99999 was given; expected a whole number from 0 to 65535"),
        (["--port", "-1", __file__], "--port: -1 was given"),
        (["--elsewhere", "1", __file__], "--elsewhere needs --host and --port"),
        (["--elsewhere", "1", "--join", "127.0.0.1:1", __file__], "give one"),
        (["--join", "127.0.0.1", __file__], "expected HOST:PORT"),
        (["--join", "127.0.0.1:99999", __file__], "expected HOST:PORT"),
        (["--join", "nosuchhost.invalid:80", __file__], "no machine is known by the name nosuchhost.invalid"),
        (
            ["--join", "192.0.2.1:80", __file__],
            "a run at 192.0.2.1 without a token would let the whole network in",
        ),
        (
            ["--elsewhere", "1", "--host", "192.0.2.1", "--port", "9", __file__],
            "give --token-file FILE, or set PACELINE_TOKEN, with the same token on all machines",
        ),
        (
            ["--join", "192.0.2.1:80", "--token-file", "nowhere", "--patience", "0", __file__],
            "nowhere does not exist",
        ),
        (["--join", "192.0.2.1:80", "--token-file", __file__, __file__], "the token in "),
        (["--host", "192.0.2.1", __file__], "--host 192.0.2.1 is not an address of this machine"),
    ],
)
def test_a_wrong_call_is_told(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        launcher.main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.startswith("paceline: ")
    assert said.count("\n") == 1


def test_workers_are_told_how_many_share_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is divided among them; torchrun has told the launcher how many launchers there are."""
    told = dict[str, str]()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(launcher, "Process", lambda command, env: told.update(env))
    monkeypatch.setattr(launcher, "_run", lambda asked, token, start: start(Where("", 0, 0, 0, 4)) or 0)
    assert launcher.main(["--workers", "4", __file__]) == 0
    assert told["LOCAL_WORLD_SIZE"] == "4"


def test_killed_worker_that_does_not_end_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may hold it, as in a read from a file server that does not answer: here no signal reaches it."""
    monkeypatch.setattr(launcher, "KILLED_SECONDS", 0.01)
    worker = launcher.Process(["sleep", "60"])
    with monkeypatch.context() as held:
        held.setattr(subprocess.Popen, "kill", lambda self: None)
        worker.kill()
    assert worker.poll() is None
    worker.kill()
    assert worker.wait() == -signal.SIGKILL


def test_a_first_machine_that_is_not_there_is_told_in_sentences() -> None:
    command = [sys.executable, "-m", "paceline.torch.launcher", "--join", "127.0.0.1:1", "--patience", "0"]
    done = subprocess.run([*command, __file__], capture_output=True, text=True, timeout=400)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "paceline: no answer at 127.0.0.1:1; this machine joins when it answers",
        "paceline: the machine at 127.0.0.1:1, which keeps the run together, has not answered for 0 s; "
        "start the script again from its checkpoint",
    ]


def test_a_program_that_ends_slowly_is_not_taken_for_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no member any more, but nothing kills it, for a while."""
    from paceline.torch.elastic import supervisor
    from paceline.torch.elastic.messages import BEAT, ENDING

    monkeypatch.setattr(supervisor, "ENDING_SECONDS", 1.0)
    keeper, stands = kept(2, restarts=0, dead=0.2)
    for number, many in ((0, 2), (1, 1)):
        keeper.store.add(f"entered/{number}", many)
    found, beats, began = list[supervisor.Loss](), 1, time.monotonic()
    try:
        while not found:
            beats += 1
            # Worker 1 gives one heartbeat, and then says that it ends.
            keeper.store.set(BEAT(0), str(beats))
            keeper.store.set(BEAT(1), "1")
            keeper.store.set(ENDING(1), "1")
            found = keeper.look()
            if time.monotonic() - began > 0.9 and not found:
                assert [member.ident for member in keeper.members] == [0]
                assert not stands[1].told
            assert time.monotonic() - began < 400
            time.sleep(0.01)
    finally:
        keeper.close()
    assert [(loss.ident, loss.words) for loss in found] == [(1, "gave no heartbeat for 0.2 s")]
    assert stands[1].told == ["kill"]
    assert keeper.newest == 1, "it was let in again"
    assert time.monotonic() - began > 1.2


def test_a_frozen_worker_is_killed_though_the_launcher_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.torch.elastic.messages import BEAT

    keeper, stands = kept(2, restarts=0, dead=0.2)
    keeper.store.set(BEAT(1), "1")

    def change(now: float, gone: set[int]) -> None:
        if gone:
            raise KeyboardInterrupt

    def look_for_long() -> None:
        until = time.monotonic() + 400
        while time.monotonic() < until:
            keeper.look()
            time.sleep(0.01)

    monkeypatch.setattr(keeper, "_change_members", change)
    with pytest.raises(KeyboardInterrupt):
        look_for_long()
    keeper.close()
    assert [each.told for each in stands] == [["kill"], ["kill"]]


def kept(places: int, restarts: int, dead: float = 100.0) -> tuple[Supervisor, list[Stands]]:
    """A keeper of workers that have met, and are no processes."""
    stands = list[Stands]()

    def start(where: Where) -> Stands:
        stands.append(Stands(where))
        return stands[-1]

    keeper = Supervisor(places, start, restarts, dead)
    for ident in range(places):
        keeper.store.set(f"join/{ident}", "1")
    keeper.look()
    assert keeper.running
    return keeper, stands


def test_one_that_is_about_to_join_when_the_run_ends_is_told_nothing() -> None:
    """The last member that has the model ends in good order: no generation follows in which it would be missed."""
    from paceline.torch.elastic.messages import HAS

    keeper, stands = kept(2, restarts=1)
    for ident in (0, 1):
        keeper.store.set(HAS(ident), "1")
    keeper.store.add("entered/0", 2)
    stands[1].over = -9
    assert [loss.ident for loss in keeper.look()] == [1]
    assert len(stands) == 3
    keeper.store.add("entered/1", 1)
    keeper.store.set("join/2", "1")
    keeper.store.add("bell", 1)
    keeper.look()
    assert [member.ident for member in keeper.members] == [0, 2]
    newest = keeper.newest
    stands[0].over = 0
    (loss,) = keeper.look()
    assert (loss.words, stands[2].told, keeper.workers) == ("ended", ["kill"], {})
    assert keeper.newest == newest
    keeper.close()


@guarantee(
    "A worker that raises an error ends `paceline train` with its name and the error; no replacement is "
    "started."
)
def test_nobody_takes_the_place_of_one_that_failed() -> None:
    """Its error would come again; what a signal has ended is started again."""
    keeper, stands = kept(3, restarts=5)
    try:
        stands[1].over = 1
        (loss,) = keeper.look()
        assert (loss.place, loss.words, loss.lost, loss.failed) == (1, "ended with status 1", True, True)
        assert (len(stands), keeper.restarts) == (3, 5)
        stands[2].over = -9
        (loss,) = keeper.look()
        assert (loss.place, loss.words, loss.lost, loss.failed) == (2, "was killed by SIGKILL", True, False)
        assert [each.where.place for each in stands] == [0, 1, 2, 2]
        stands[3].over = -36  # one of those in real time that have no name
        assert [loss.words for loss in keeper.look()] == ["was killed by 36"]
        assert [member.place for member in keeper.members] == [0]
    finally:
        keeper.close()


def test_who_has_not_begun_ends_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """The workers of a run that needs them all never do; those that were killed are told first. Others have a script
    that trains nothing, and is over with the first of them."""
    stands = list[Stands]()

    def start(where: Where) -> Stands:
        stands.append(Stands(where))
        return stands[-1]

    keeper = Supervisor(4, start, 3)
    try:
        stands[1].over = 0
        assert [loss.words for loss in keeper.look()] == ["ended"]
        stands[0].over, stands[2].over = 2, -9
        found = [(loss.ident, loss.words) for loss in keeper.look()]
        assert found == [(2, "was killed by SIGKILL"), (0, "ended with status 2")]
        assert (len(stands), stands[3].told) == (4, [])
        stands[3].over = 0
        assert launcher.watch(keeper, []) == 0
    finally:
        keeper.close()
    assert not capsys.readouterr().err


def test_an_error_is_told_where_another_ends_in_the_same_instant(capsys: pytest.CaptureFixture[str]) -> None:
    stands = list[Stands]()

    def start(where: Where) -> Stands:
        stands.append(Stands(where))
        return stands[-1]

    keeper = Supervisor(2, start)
    try:
        stands[0].over, stands[1].over = 3, 0
        assert launcher.watch(keeper, []) == 1
    finally:
        keeper.close()
    assert capsys.readouterr().err == "paceline: worker 0 ended with status 3\n"
