"""Does ``paceline serve`` stay as it is when 1,000 workers ask and report as fast as they can, for half an hour?

Every worker has a connection of its own, and reports its part as soon as it has it; the answer brings the next one.
Every 10 seconds: reports answered so far, the service's resident memory, the size of its store and of the record. At
the end: what memory and the files grew by from a tenth of the time on, when all that is made once has been made, and
every error, by what it was and when it came.

    python benchmarks/soak.py [--workers 1000] [--minutes 30]
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scaffold import command_line
from service import Connection, read, serve


async def client(port: int, workers: int, seconds: float) -> None:
    """All workers; prints what they got as JSON: answered reports, now and then, and the errors at the end."""
    loop = asyncio.get_running_loop()
    errors: collections.Counter[str] = collections.Counter()
    answered, start = 0, time.monotonic()

    async def life(name: str, secret: str) -> None:
        """One connection's: as a worker that notices that it was cut off, and begins again."""
        nonlocal answered
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        try:
            status, answer = await connection.ask("POST", "", secret, {"name": name, "secret": secret})
            part = None
            while time.monotonic() - start < seconds:
                if part is None:
                    status, answer = await connection.ask("GET", f"/{name}/next?wait=30", secret)
                    part = answer if status == 200 else None
                else:
                    report = {"round": part["round"], "samples": part["samples"], "seconds": 0.1}
                    status, answer = await connection.ask("POST", f"/{name}/reports?wait=30", secret, report)
                    part = answer["next"] if status == 200 else None
                    answered += status == 200
                if status not in (200, 202):
                    errors[f"{status}: {answer['error'].replace(name, 'NAME')} ({_minute(start)})"] += 1
        finally:
            connection.transport.close()

    async def worker(number: int) -> None:
        while time.monotonic() - start < seconds:
            try:
                await life(f"w{number}", f"secret-of-worker-{number:06d}")
            except (ConnectionError, OSError) as error:
                errors[f"{type(error).__name__}: {error} ({_minute(start)})"] += 1
                await asyncio.sleep(0.1)

    async def tell() -> None:
        while True:
            await asyncio.sleep(10.0)
            print(json.dumps({"answered": answered}), flush=True)

    telling = asyncio.create_task(tell())
    await asyncio.gather(*(worker(number) for number in range(workers)))
    telling.cancel()
    print(json.dumps({"answered": answered, "errors": errors}), flush=True)


def _minute(start: float) -> str:
    return f"minute {(time.monotonic() - start) / 60:.1f}"


def megabytes(directory: Path, pattern: str) -> float:
    """Of all files of that pattern."""
    return sum(file.stat().st_size for file in directory.glob(pattern) if file.is_file()) / 1e6


def resident(pid: int) -> float:
    """Megabytes of memory that a process has now."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS"))) / 1e3


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--directory", help="where the service keeps its state; default: a temporary one")
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client:
        asyncio.run(client(given.client, given.workers, 60 * given.minutes))
        return
    with tempfile.TemporaryDirectory(prefix="paceline-soak-", dir=given.directory) as scratch:
        directory = Path(scratch)
        service, port = serve(
            directory, ["--batch", str(64 * given.workers), "--workers", str(given.workers)]
        )
        command = [sys.executable, __file__, "--client", str(port), "--workers", str(given.workers)]
        load = subprocess.Popen(
            [*command, "--minutes", str(given.minutes)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert load.stdout is not None
            start, rows, last = time.monotonic(), [], {}
            print(f"{'minute':>7s} {'answered':>10s} {'memory MB':>10s} {'store MB':>9s} {'record MB':>10s}")
            for line in load.stdout:
                last = json.loads(line)
                row = (
                    (time.monotonic() - start) / 60,
                    last["answered"],
                    resident(service.pid),
                    megabytes(directory, "service.sqlite*"),
                    megabytes(directory, "runs/**/*"),
                )
                rows.append(row)
                print(f"{row[0]:7.1f} {row[1]:10,d} {row[2]:10.1f} {row[3]:9.1f} {row[4]:10.1f}", flush=True)
            counted = read(port, "")["reports"]
            service.send_signal(signal.SIGTERM)
            service.wait(30)
        finally:
            load.kill()
            service.kill()
    first, end = rows[len(rows) // 10], rows[-1]
    reports = max(end[1] - first[1], 1)
    print(
        f"\nfrom minute {first[0]:.1f} to {end[0]:.1f}: memory {end[2] - first[2]:+.1f} MB, "
        f"store {end[3] - first[3]:+.1f} MB, record {1e6 * (end[4] - first[4]) / reports:.0f} bytes a report; "
        f"{reports / 60 / (end[0] - first[0]):,.0f} reports a second; lost {last['answered'] - counted}"
    )
    for what, times in last.get("errors", {}).items():
        print(f"{times:6d} x {what}")
    print(f"errors: {sum(last.get('errors', {}).values())}")


if __name__ == "__main__":
    main()
