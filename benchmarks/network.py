"""What does one slow link cost, whatever the loads? LB-BSP's Fig. 13 for real: training in three network namespaces.

    python benchmarks/network.py [--period 25] [--policy level]

Each worker is a process of its own in a namespace of its own, on a virtual cable to one bridge; ``tc tbf`` sets the
rate of the last one's cable to 480 and 16 Mbit/s in turn while they train, ``--period`` rounds each. DDP over gloo,
LeNet-5, sleeping 1, 1.5 and 4 ms a sample. Needs Linux, root, and the commands ip and tc; says so if it cannot run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scaffold import command_line, count, policy_name

from paceline import runs
from paceline.errors import PacelineError

MARK = f"pl{os.getpid() % 100_000}"  # in all names, so that two runs at once do not meet
BRIDGE, PORT, WORKERS = f"{MARK}b", 29517, 3
SLOWDOWN_MS = "1,1.5,4"  # sleep for each sample: the first two are quick
ABUNDANT, DEFICIENT = "480mbit", "16mbit"
SECONDS = 300.0  # for one training, at most


def missing() -> str:
    """Why the experiment cannot be made here; empty if it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"the command {tool} is not installed (Debian: iproute2)"
    if os.geteuid() != 0:
        return "it takes root to make network namespaces"
    tried = subprocess.run(["ip", "netns", "add", f"{MARK}t"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", f"{MARK}t"], capture_output=True)
    return f"network namespaces are not allowed here ({tried.stderr.strip()})" if tried.returncode else ""


def train(policy: str, steps: int, period: int) -> runs.Run:
    """Train under a policy; the last worker's link is slow in the second of every two periods."""
    line = f"train --model lenet5 --global-batch 96 --slowdown-ms {SLOWDOWN_MS} --steps {steps} --lr 0.01"
    with tempfile.TemporaryDirectory() as folder, cables([ABUNDANT] * WORKERS) as spaces:
        command = [sys.executable, "-m", "paceline", *line.split(), "--policy", policy, "--out", folder]
        common = {"LOCAL_RANK": "0", "WORLD_SIZE": str(WORKERS), "MASTER_ADDR": address(0)}
        common |= {"MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
        workers = [
            subprocess.Popen(
                ["ip", "netns", "exec", space, *command],
                env=os.environ | common | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            for rank, space in enumerate(spaces)
        ]
        try:
            _turn(workers, Path(folder) / "rounds.jsonl", spaces[-1], period)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        for worker in sorted(workers, key=lambda each: -each.returncode):  # those that were killed come last
            if worker.returncode:
                assert worker.stderr is not None
                told = worker.stderr.read().decode().strip().splitlines() or ["no word"]
                raise PacelineError(f"a worker in its network namespace failed: {told[-1]}")
        return runs.read(Path(folder))


def _turn(workers: list[subprocess.Popen[bytes]], record: Path, space: str, period: int) -> None:
    """Change the link's rate as the record grows, until the workers are done, or one has failed."""
    now, end = ABUNDANT, time.monotonic() + SECONDS
    while any(worker.poll() is None for worker in workers) and not any(worker.poll() for worker in workers):
        if time.monotonic() > end:
            raise PacelineError(f"the workers were not done after {SECONDS:g} s; look for what holds them up")
        done = record.read_bytes().count(b"\n") if record.exists() else 0
        rate = DEFICIENT if (done // period) % 2 else ABUNDANT
        if rate != now:
            _limit(space, rate)
            now = rate
        time.sleep(0.02)


@contextlib.contextmanager
def cables(rates: Sequence[str]) -> Iterator[list[str]]:
    """Namespaces with eth0 each, of these rates (as ``tc`` writes them), on one bridge; taken down at the end."""
    spaces = [f"{MARK}n{rank}" for rank in range(len(rates))]
    _down(spaces)
    try:
        _call(f"ip link add {BRIDGE} type bridge")
        _call(f"ip link set {BRIDGE} up")
        for rank, space in enumerate(spaces):
            _call(f"ip netns add {space}")
            _call(f"ip link add {MARK}v{rank} type veth peer name eth0 netns {space}")
            _call(f"ip link set {MARK}v{rank} master {BRIDGE} up")
            _call(f"ip -n {space} addr add {address(rank)}/24 dev eth0")
            _call(f"ip -n {space} link set eth0 up")
            _call(f"ip -n {space} link set lo up")
        for space, rate in zip(spaces, rates, strict=True):
            _limit(space, rate)
        yield spaces
    finally:
        _down(spaces)


def _down(spaces: list[str]) -> None:
    links = [f"link del {MARK}v{rank}" for rank in range(len(spaces))]
    for words in (*(f"netns del {space}" for space in spaces), *links, f"link del {BRIDGE}"):
        subprocess.run(["ip", *words.split()], capture_output=True)


def _limit(space: str, rate: str) -> None:
    """Both directions of a namespace's cable."""
    how = f"root tbf rate {rate} burst 64kb latency 400ms"
    _call(f"ip netns exec {space} tc qdisc replace dev eth0 {how}")
    _call(f"tc qdisc replace dev {space.replace('n', 'v')} {how}")


def address(rank: int) -> str:
    return f"10.77.0.{rank + 1}"


def _call(line: str) -> None:
    done = subprocess.run(line.split(), capture_output=True, text=True)
    if done.returncode:
        raise PacelineError(f"{line!r} failed: {done.stderr.strip()}")


def compare(names: Sequence[str], period: int) -> dict[str, tuple[float, float, list[float]]]:
    """By policy, the median seconds of a round with the quick link and with the slow one, once loads have settled,
    and the loads of the last round; printed as they come."""
    found = {}
    print(f"{'policy':14}{'480 Mbit/s':>12}{'16 Mbit/s':>12}{'more':>8}   loads at the end (ms a round)")
    for name in names:
        run = train(name, 3 * period, period)
        phase, at = np.divmod(np.arange(len(run.seconds)), period)
        settled = at >= max(2, period // 3)
        fast = float(np.median(run.seconds[(phase != 1) & settled]))
        slow = float(np.median(run.seconds[(phase == 1) & settled]))
        found[name] = fast, slow, run.loads[-1].tolist()
        loads = "/".join(f"{load:.0f}" for load in run.loads[-1])
        print(
            f"{name:14}{1e3 * fast:12.0f}{1e3 * slow:12.0f}{1e3 * (slow - fast):8.0f}   {loads}", flush=True
        )
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--period", type=count, default=25, help="rounds with each rate of the link")
    parser.add_argument("--policy", type=policy_name, action="append")
    options = parser.parse_args()
    if reason := missing():
        parser.exit(0, f"not run: {reason}\n")
    compare(options.policy or ("equal", "lbbsp-gpu", "level"), options.period)


if __name__ == "__main__":
    main()
