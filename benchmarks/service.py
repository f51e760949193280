"""How fast does ``paceline serve`` answer, when 1,000 workers report each second?

Every worker has a connection of its own and reports once a second; the answer comes when the report is on disk, and
in the mode "at once" with the worker's next part. "spread": the reports come evenly over the second, as from many
jobs or unequal workers. "together": all in the same instant, as balanced workers do; here the service has to answer
1,000 requests, and the last one waits for all others. "waiting": as together, and every answer waits for the next
part, which is planned when the last report is in: from when that was sent to when a worker has its part.

"bare": as together, from an application without any job that only reads each report and sends an answer of the same
size: what the server under the service, and these clients beside it, take by themselves.

CPU: of the service, of one core. lost: answered reports that it did not count. killed, same: after each, the
service is killed (SIGKILL) and started again; answered reports that it then no longer counts, and whether workers
are told the same part as before. back: seconds until it answers again, the start of Python included.

    python benchmarks/service.py [--workers 1000] [--seconds 10] [--processes 2]

On a busy machine, `chrt -f 10 python benchmarks/service.py` runs it before all others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from scaffold import command_line

TOKEN = "benchmark-token-0123456789"
MODES = ("spread", "together", "waiting", "bare")


class Connection(asyncio.Protocol):
    """One worker's connection: a request at a time."""

    def __init__(self) -> None:
        self.buffer = b""
        self.answer: asyncio.Future[tuple[int, Any]] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if found:
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            if len(body) >= length:
                self.buffer = b""
                self.answer.set_result((int(head[9:12]), json.loads(body)))  # type: ignore[union-attr]

    def connection_lost(self, error: Exception | None) -> None:
        if self.answer is not None and not self.answer.done():
            self.answer.set_exception(ConnectionError("the service closed a connection"))

    async def ask(self, method: str, path: str, secret: str, body: Any = None) -> tuple[int, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        self.answer = asyncio.get_running_loop().create_future()
        self.transport.write(
            f"{method} /v1/jobs/default/workers{path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\n"
            f"x-worker-secret: {secret}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\n\r\n".encode()
            + data
        )
        return await self.answer


async def client(
    port: int, first: int, count: int, workers: int, seconds: int, mode: str, start: float
) -> None:
    """Some of the workers; prints what it measured as JSON."""
    loop = asyncio.get_running_loop()
    took: list[tuple[int, float, float]] = []  # turn, report sent, answer there
    parts: dict[str, Any] = {}
    wait = 30 if mode == "waiting" else 0

    async def worker(number: int) -> None:
        name, secret = f"w{number}", f"secret-of-worker-{number:06d}"
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        status, answer = await connection.ask(
            "POST", "", secret, {"name": name, "place": number, "secret": secret}
        )
        assert status == 201, answer
        status, part = await connection.ask("GET", f"/{name}/next?wait=60", secret)
        assert status == 200, part
        pace = 0.5 / part["samples"] * (1 + number % 4) / 2.5
        for turn in range(seconds):
            due = start + turn + (number / workers if mode == "spread" else 0.0)
            await asyncio.sleep(max(due - time.time(), 0.0))
            report = {
                "round": part["round"],
                "samples": part["samples"],
                "seconds": pace * max(part["samples"], 1),
            }
            began = time.time()
            status, answer = await connection.ask("POST", f"/{name}/reports?wait={wait}", secret, report)
            assert status == 200, answer
            part = answer["next"]
            took.append((turn, began, time.time()))
        parts[name] = part
        connection.transport.close()

    await asyncio.gather(*(worker(number) for number in range(first, first + count)))
    print(json.dumps({"took": took, "parts": parts}))


def serve(directory: Path, options: list[str]) -> tuple[subprocess.Popen[str], int]:
    """The service, and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", "serve", "--dir", str(directory), "--port", "0", *options],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PACELINE_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.split(" at ")[1].split()[0].rsplit(":", 1)[1])


async def bare(scope: Any, receive: Any, send: Any) -> None:
    """Answers each request of a worker at once, and knows nothing of it."""
    if scope["type"] != "http":
        return
    body = (await receive()).get("body", b"")
    report = json.loads(body) if body else {}
    part = {"round": report.get("round", 0), "samples": 64, "offset": 0, "batch": 64, "weight": 0.5}
    joins, asks = scope["path"].endswith("/workers"), scope["method"] == "GET"
    said = json.dumps(
        part if joins or asks else {"round": part["round"], "next": part, "waiting": ""}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(said)).encode())]
    await send({"type": "http.response.start", "status": 201 if joins else 200, "headers": headers})
    await send({"type": "http.response.body", "body": said})


def serve_bare() -> tuple[subprocess.Popen[str], int]:
    """The bare application in a process of its own, and its port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, "--bare", str(port)], text=True)
    until = time.time() + 30
    while time.time() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process, port
        time.sleep(0.05)
    raise SystemExit("the bare application did not start")


def read(port: int, path: str, secret: str = "") -> Any:
    """One answer."""
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Worker-Secret": secret}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/jobs/default{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def measure(mode: str, given: argparse.Namespace) -> None:
    """One line of the table."""
    n = given.workers
    with tempfile.TemporaryDirectory(prefix="paceline-service-", dir=given.directory) as scratch:
        options = ["--batch", str(64 * n), "--workers", str(n)]
        options += [] if mode == "waiting" else ["--at-once"]
        options += ["--sync"] if given.sync else []
        service, port = serve_bare() if mode == "bare" else serve(Path(scratch), options)
        try:
            start = time.time() + 3.0 + n / 300
            cuts = [n * k // given.processes for k in range(given.processes + 1)]
            clients = [
                subprocess.Popen(
                    [
                        sys.executable, __file__, "--client", str(port), str(low), str(high - low), mode, str(start),
                        "--workers", str(n), "--seconds", str(given.seconds),
                    ],
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for low, high in itertools.pairwise(cuts)
            ]  # fmt: skip
            results = [json.loads(each.communicate()[0]) for each in clients]
            used = Path(f"/proc/{service.pid}/stat").read_text().split()
            cpu_seconds = (int(used[13]) + int(used[14])) / os.sysconf("SC_CLK_TCK")
            ours = ""
            if mode != "bare":
                counted = read(port, "")["reports"]
                service.send_signal(signal.SIGKILL)
                service.wait()
                began = time.time()
                service, port = serve(Path(scratch), options)
                ours = survived(port, results, counted, time.time() - began)
        finally:
            service.kill()
            service.wait()
    answers = [tuple(answer) for each in results for answer in each["took"]]
    # Where plans are waited for, the clock starts when the last report of the round has been sent.
    last = {turn: max(sent for t, sent, _ in answers if t == turn) for turn in range(given.seconds)}
    took = sorted(
        1e3 * (there - (last[turn] if mode == "waiting" else sent)) for turn, sent, there in answers
    )
    print(
        f"{mode:9s} {len(took):8,d} {took[len(took) // 2]:8.1f} {took[int(0.99 * len(took))]:8.1f} {took[-1]:8.1f} "
        f"{100 * cpu_seconds / (given.seconds + 3):6.0f} % {ours}",
        flush=True,
    )


def survived(port: int, results: list[Any], counted: int, back: float) -> str:
    """What the service still knows after it was killed. counted: reports before."""
    parts = {name: part for each in results for name, part in each["parts"].items()}
    answered = sum(len(each["took"]) for each in results)
    after = read(port, "")["reports"]
    same = all(
        read(port, f"/workers/{name}/next?wait=0", f"secret-of-worker-{int(name[1:]):06d}") == parts[name]
        for name in list(parts)[:: max(len(parts) // 50, 1)]
    )
    return f"{answered - counted:6d} {counted - after:6d} {'yes' if same else 'NO':>6s} {back:7.1f}"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--sync", action="store_true", help="force each commit to the disk")
    parser.add_argument("--directory", help="where the service keeps its state; default: a temporary one")
    parser.add_argument("--client", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        port, first, count, mode, start = given.client
        asyncio.run(
            client(int(port), int(first), int(count), given.workers, given.seconds, mode, float(start))
        )
        return
    if given.bare:
        import uvicorn

        uvicorn.run(
            bare, port=given.bare, access_log=False, log_level="warning", backlog=2048, timeout_keep_alive=75
        )
        return
    print(f"{given.workers:,} workers, a report each second of each, for {given.seconds} s; milliseconds.\n")
    print(
        f"{'':9s} {'reports':>8s} {'median':>8s} {'p99':>8s} {'most':>8s} {'CPU':>8s} {'lost':>6s} {'killed':>6s} "
        f"{'same':>6s} {'back s':>7s}"
    )
    for mode in given.modes.split(","):
        measure(mode, given)


if __name__ == "__main__":
    main()
