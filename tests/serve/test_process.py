"""The service as a user starts it: in a process of its own, killed, restarted, attacked."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

pytest.importorskip("fastapi")

from paceline import PacelineError, client, runs
from support import fuzz, served
from support.commands import assert_refused, paceline
from support.events import until
from support.guarantees import guarantee
from support.served import TOKEN, Process, process

SIGNALS = guarantee(
    "Signals end the service in order, also at its start and if they were ignored; under `nohup` only "
    "SIGTERM does."
)

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("serve")]
PACES = {"a": 0.0004, "b": 0.0002, "c": 0.0001}


def train(service: Process, name: str, rounds: int, log: list[client.Part], pause: float = 0.0) -> None:
    """A worker's whole life."""
    with client.Worker(service.url, name=name, token=TOKEN) as worker:
        for part in worker.rounds(rounds):
            log.append(part)
            time.sleep(pause)
            worker.report(PACES[name] * part.samples)


def together(
    service: Process, rounds: int, pause: float = 0.0
) -> tuple[dict[str, list[client.Part]], list[threading.Thread]]:
    logs: dict[str, list[client.Part]] = {name: [] for name in PACES}
    threads = [
        threading.Thread(target=train, args=(service, name, rounds, log, pause)) for name, log in logs.items()
    ]
    for thread in threads:
        thread.start()
    return logs, threads


@guarantee(
    "A restart at any moment finds what was answered with 200, also after a kill, a full disk or a failed "
    "commit."
)
def test_workers_that_notice_nothing_of_a_killed_service(tmp_path: Path) -> None:
    with process(tmp_path, "--batch", 700, "--workers", 3) as service:
        logs, threads = together(service, 30, 0.02)
        for kill_at in (8, 16):
            until(lambda at=kill_at: min(map(len, logs.values())) > at)
            assert service.end(signal.SIGKILL) == -signal.SIGKILL
            service.start()
        for thread in threads:
            thread.join(400)
        assert [len(log) for log in logs.values()] == [30] * 3
        for parts in zip(*logs.values(), strict=True):
            assert len({part.round for part in parts}) == 1
            assert sum(part.samples for part in parts) == 700
            # In the order in which they happened to join.
            placed = sorted(parts, key=lambda part: part.offset)
            ends = [part.offset + part.samples for part in placed]
            assert [part.offset for part in placed] == [0, *ends[:-1]], "one after the other"
            assert sum(part.weight for part in parts) == pytest.approx(1.0)
        assert [log[-1].samples for log in logs.values()] == [100, 200, 400]
        state = service.ask("GET", "/v1/jobs/default").content
        assert (state["rounds"], state["reports"], state["present"]) == (30, 90, 0)
        assert service.end(signal.SIGTERM) == 128 + signal.SIGTERM
    run = runs.read(tmp_path / "runs" / "default")
    assert run.round.tolist() == list(range(30))
    assert run.batch.tolist() == [700] * 30
    assert not run.notes


def test_ctrl_c_lets_go_of_those_who_wait(tmp_path: Path) -> None:
    with process(tmp_path, "--batch", 8, "--workers", 2) as service:
        secret = service.ask("POST", "/v1/jobs/default/workers", {"name": "a"}).content["secret"]
        answers: list[served.Answer] = []
        path = "/v1/jobs/default/workers/a/next?wait=60"
        waiting = threading.Thread(target=lambda: answers.append(service.ask("GET", path, secret=secret)))
        waiting.start()
        time.sleep(0.5)
        service.process.send_signal(signal.SIGINT)
        assert service.process.wait(50) == 130, "before the 60 seconds of the request are over"
        waiting.join(400)
        assert answers == [(202, {"waiting": "the service is stopping"})]
        errors = service.process.stderr.read()  # type: ignore[union-attr]
        assert errors.strip() in ("", "paceline: interrupted")


@SIGNALS
@pytest.mark.parametrize(
    ("ignored", "sent", "status"),
    [
        ((), signal.SIGHUP, 129),
        ((signal.SIGINT,), signal.SIGINT, 130),
        ((signal.SIGINT, signal.SIGTERM), signal.SIGTERM, 143),
    ],
)
def test_signals_end_it_however_it_was_started(
    tmp_path: Path, ignored: tuple[int, ...], sent: int, status: int
) -> None:
    with process(tmp_path, "--batch", 8, "--workers", 2, ignored=ignored) as service:
        assert service.ask("GET", "/v1/jobs").status == 200
        assert service.end(sent) == status
        assert "Traceback" not in service.last
    assert not (tmp_path / "service.sqlite-wal").exists(), "closed in order"


@guarantee("More workers than a shell allows open files are served, up to what the system allows.")
def test_more_workers_than_a_shell_allows_files(tmp_path: Path) -> None:
    """Connections stay open for as long as a worker lives."""
    allowed = 64
    with contextlib.ExitStack() as opened:
        service = opened.enter_context(process(tmp_path, files=allowed))
        for _ in range(allowed + 36):
            connection = opened.enter_context(
                socket.create_connection(("127.0.0.1", service.port), timeout=30)
            )
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: x\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")


@SIGNALS
def test_a_signal_at_the_start_is_not_lost(tmp_path: Path) -> None:
    """What a handler raises while Python destroys an object goes nowhere, as in the collection before serving."""
    begin = """
import gc, signal, sys
from paceline.__main__ import main

class Last:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def collect(before=gc.collect):
    Last()
    return before()

gc.collect = collect
main()
"""
    command = [sys.executable, "-c", begin, "serve", "--dir", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 143, done.stderr
    assert "Exception ignored" in done.stderr


@SIGNALS
def test_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    with process(tmp_path, "--batch", 8, "--workers", 2, ignored=(signal.SIGINT, signal.SIGHUP)) as service:
        for sent in (signal.SIGINT, signal.SIGHUP):
            service.process.send_signal(sent)
        time.sleep(0.5)
        assert service.ask("GET", "/v1/jobs").status == 200
        assert service.end(signal.SIGTERM) == 128 + signal.SIGTERM


def test_large_bodies_and_slow_clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with process(tmp_path) as service:
        body = tmp_path / "large"
        body.write_bytes(b" " * 10_000_000)
        done = subprocess.run(
            [
                "curl", "-s", "-o", str(tmp_path / "said"), "-w", "%{http_code} %{size_upload}", "-T", str(body),
                "-X", "PUT", "-H", f"Authorization: Bearer {TOKEN}", "-H", "Expect:", f"{service.url}/v1/jobs/j",
            ],
            capture_output=True, text=True, timeout=400,
        )  # fmt: skip
        status, sent = done.stdout.split()
        assert status == "413"
        assert int(float(sent)) < 9_000_000, "not read to its end"
        assert "too large" in (tmp_path / "said").read_text()
        for headers, words in ((f"Authorization: Bearer {TOKEN}", b"413"), ("X-None: 1", b"401")):
            with socket.create_connection(("127.0.0.1", service.port), timeout=30) as eager:
                eager.sendall(f"PUT /v1/jobs/j HTTP/1.1\r\nhost: x\r\n{headers}\r\n".encode())
                eager.sendall(b"content-length: 8000000\r\n\r\n")
                for _ in range(80):  # as most clients do: all is sent before anything is read
                    eager.sendall(b" " * 100_000)
                assert eager.recv(1000).startswith(b"HTTP/1.1 " + words)
        began = time.monotonic()
        slow = [socket.create_connection(("127.0.0.1", service.port), timeout=30) for _ in range(2)]
        slow[1].sendall(b"GET /v1/jobs HTTP/1.1\r\nhost: x\r\n")
        for each in slow:
            assert service.ask("GET", "/v1/jobs").status == 200, "others are served meanwhile"
            assert each.recv(100) == b"", "cut off"
            assert time.monotonic() - began > 5
            each.close()
        with socket.create_connection(("127.0.0.1", service.port)) as broken:
            broken.sendall(b"this is no HTTP\r\n\r\n")
            assert b'{"error":"Invalid HTTP request received"}' in broken.recv(1000)


def test_mistakes_at_the_start(tmp_path: Path) -> None:
    with process(tmp_path / "one", "--batch", 8, "--workers", 2) as service:
        taken = paceline("serve", "--dir", tmp_path / "two", "--port", service.port)
        assert_refused(taken, "is in use; choose another with --port")
        assert not (tmp_path / "two").exists()
        assert_refused(paceline("serve", "--dir", tmp_path / "one", "--port", 0), "in use by another service")
        service.end()
    again = paceline("serve", "--dir", tmp_path / "one", "--port", 0, "--batch", 16, "--workers", 2)
    assert_refused(again, "job 'default' exists with other settings")
    for words, *options in (
        ("give both or neither", "--batch", 8),
        ("policy 'levle' is unknown", "--batch", 8, "--workers", 2, "--policy", "levle"),
        ("entry '1'", "--batch", 8, "--workers", 2, "--limits", "1,2"),
        ("would let the whole network in", "--no-token", "--host", "0.0.0.0"),
        ("exclude each other", "--no-token", "--token", "x" * 20),
        ("5 characters: expected 16 or more", "--token", "short"),
        ("cannot listen on 192.0.2.1", "--host", "192.0.2.1"),
        ("--job 'a b': expected at most 64 letters", "--batch", 8, "--workers", 2, "--job", "a b"),
        ("batch=-5: expected 1 or more", "--batch", -5, "--workers", 2),
        ("--port=70000: expected a whole number, 0 to 65,535", "--port", 70000),
    ):
        port = [] if "--port" in options else ["--port", 0]
        assert_refused(paceline("serve", "--dir", tmp_path / "three", *port, *options), words)
    (tmp_path / "file").write_text("")
    refused = paceline("serve", "--dir", tmp_path / "file" / "x", "--port", 0)
    assert_refused(refused, "cannot make .*choose another --dir")


@pytest.mark.parametrize(
    "option", [["--policy", "level"], ["--limits", "1:,1:"], ["--grace", 5], ["--at-once"]]
)
def test_job_options_without_batch_and_workers_raise(tmp_path: Path, option: list[object]) -> None:
    refused = paceline("serve", "--dir", tmp_path / "state", "--port", 0, *option)
    assert_refused(refused, f"{option[0]} is for the job made at the start: expected --batch and --workers")
    assert not (tmp_path / "state").exists()


def test_fuzzed_for_a_moment() -> None:
    pytest.importorskip("schemathesis")
    assert fuzz.main(2) == 0


def test_a_token_is_made_and_kept(tmp_path: Path) -> None:
    printed = []
    for _ in range(2):
        with process(tmp_path, PACELINE_TOKEN="") as service:
            token = service.process.stdout.readline().removeprefix("token: ").strip()  # type: ignore[union-attr]
            assert service.ask("GET", "/v1/jobs", token=token).status == 200
            assert service.ask("GET", "/v1/jobs", token=TOKEN).status == 401
            printed.append(token)
            service.end()
    assert printed[0] == printed[1] == (tmp_path / "token").read_text().strip()
    assert len(printed[0]) > 40
    assert (tmp_path / "token").stat().st_mode & 0o77 == 0


def test_messages_of_the_client(tmp_path: Path) -> None:
    for wrong, words in (
        ({"patience": float("nan")}, "patience=nan: expected"),
        ({"name": 3}, "name=3"),
        ({"token": 3}, "the token"),
        ({"token": "Schlüssel-für-Ω"}, "the token is no printable ASCII"),
        ({"token": "two\nlines-of-a-token"}, "the token is no printable ASCII"),
        ({"url": 3}, "3 is no service's"),
        ({"url": "ftp://x"}, "'ftp://x' is no service's address"),
    ):
        with pytest.raises(PacelineError, match=words):
            client.Worker(**{"url": "http://127.0.0.1:9", "name": "a"} | wrong)  # type: ignore[arg-type]
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        for address in (f"{'a' * 70}:7070", f"127.0.0.1:{closed.getsockname()[1]}"):
            with pytest.raises(PacelineError, match=r"does not answer .*is it running"):
                client.Worker(f"http://{address}", name="a", patience=0.1).join()
    with process(tmp_path, "--batch", 8, "--workers", 1, "--grace", 0.2) as service:
        for wrong, words in (
            ({"token": "wrong"}, "refuses: the token is missing or wrong"),
            ({"name": "gpu-\udcff"}, "refuses: "),
            ({"job": "x"}, "job 'x' is unknown here"),
        ):
            with pytest.raises(PacelineError, match=words):
                client.Worker(service.url, **{"name": "a", "token": TOKEN} | wrong).join()  # type: ignore[arg-type]
        with client.Worker(service.url, name="a", token=TOKEN) as worker:
            with pytest.raises(PacelineError, match="there is no round to report"):
                worker.report(1.0)
            rounds = worker.rounds()
            part = next(rounds)
            assert part == client.Part(0, 8, 0, 8, 1, 1.0, 1.0)
            with pytest.raises(PacelineError, match="round 0 was not reported: call report"):
                next(rounds)
            with pytest.raises(PacelineError, match="not a finite number"):
                worker.report(float("nan"))
            with pytest.raises(PacelineError, match="expected 1e-09 or more"):
                worker.report(0.0)
            worker.report(0.01)
            worker.next()
            until(lambda: service.ask("GET", "/v1/jobs/default").content["dropped"])
            with pytest.raises(client.Dropped, match=r"'a' was dropped in round 1 after .*join again"):
                worker.report(1.0)
            worker.join()
            assert worker.next().samples == 8
            worker.report(0.01)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no command mount: run as root on Linux")
def test_a_full_disk(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(small)], capture_output=True
    ).returncode:
        pytest.skip("may not mount a file system: run as root, or in a user namespace (unshare -rm)")
    try:
        options = ("--batch", 8, "--workers", 2, "--start", 1, "--no-record", "--grace", 100)
        with process(small, *options) as service:
            workers = "/v1/jobs/default/workers"
            secret = service.ask("POST", workers, {"name": "a"}).content["secret"]
            counted = round = 0

            def part() -> served.Answer:
                return service.ask("GET", f"{workers}/a/next", secret=secret)

            def reported() -> served.Answer:
                report = {"round": round, "samples": 8, "seconds": 1.0}
                return service.ask("POST", f"{workers}/a/reports", report, secret)

            for _ in range(2):  # full, free, killed; and all of it again
                assert part().content["round"] == round
                ballast = small / "ballast"
                with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                    while file.write(bytes(1024)):
                        pass
                for _ in range(100):  # the log's file may have room for a few more
                    if (answer := reported()).status == 507:
                        break
                    counted += 1
                    if (answer := part()).status == 507:
                        break
                    round = answer.content["round"]
                assert answer.status == 507
                assert "the disk is full, nothing was changed" in answer.content["error"]
                assert service.ask("POST", workers, {"name": "b"}).status == 507
                assert service.ask("GET", "/v1/jobs").content["storing"]
                assert service.ask("GET", "/v1/jobs/default").content["reports"] == counted
                ballast.unlink()
                until(lambda: part().status == 200)
                round = part().content["round"]
                until(lambda: reported().status == 200)
                counted, round = counted + 1, round + 1
                service.end(signal.SIGKILL)
                lines = service.last.splitlines()
                assert all("the disk is full" in line for line in lines), "said, and nothing else"
                service.start()
                assert service.ask("GET", "/v1/jobs/default").content["reports"] == counted
    finally:
        subprocess.run(["umount", str(small)], check=True)
