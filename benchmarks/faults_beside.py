"""What a killed rank costs with torchft and with torchrun's restart, beside ``ElasticPace``, on the same cores.

    pip install torchft  # into an environment of its own, whose python is given below
    python benchmarks/faults_beside.py --torchft /path/to/python [--kills 8] [--ranks 4]

The same model, Adam, batch and time a sample each way, in float64. One rank after another is killed by SIGKILL while
all run, and is replaced: by torchft's user, by torchrun, which restarts all ranks from a checkpoint of each round, or
by Paceline. Printed: the longest time without a completed round after a kill beyond a usual round, and how many
times ranks computed a gradient that was thrown away.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from scaffold import command_line

BATCH, NAP, WIDTH = 48, 8e-4, 8  # samples, seconds a sample, features
HERE = Path(__file__).resolve()


def say(out: str, *words: Any) -> None:
    """A line of this process."""
    with open(os.path.join(out, str(os.getpid())), "a") as file:
        file.write(json.dumps(words) + "\n")


def made() -> tuple[Any, Any]:
    """The model and its optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(
        nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    ).double()
    return model, torch.optim.Adam(model.parameters(), lr=1e-3)


def loss_of(model: Any, step: int, rank: int, ranks: int) -> Any:
    """Of this rank's part of the round's batch, over the whole batch."""
    import torch

    generator = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64)[rank::ranks]
    time.sleep(NAP * len(x))
    return (model(x) - x.sum(1, keepdim=True).sin()).square().sum() / BATCH


def with_torchft(out: str, lighthouse: str) -> None:
    """A replica of torchft's: one rank."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    model, optimizer = made()
    store = dist.TCPStore("127.0.0.1", 0, None, True, timeout=timedelta(seconds=30), wait_for_workers=False)

    def take(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    seconds = timedelta(seconds=1.5)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=seconds),
        load_state_dict=take,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=seconds,
        quorum_timeout=timedelta(seconds=20),
        connect_timeout=timedelta(seconds=10),
        replica_id=f"r{os.getpid()}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        init_sync=False,
        heartbeat_interval=timedelta(milliseconds=100),
    )
    while True:
        try:
            manager.start_quorum()
        except Exception:
            time.sleep(0.05)
            continue
        step, rank, ranks = manager.current_step(), manager.participating_rank(), manager.num_participants()
        optimizer.zero_grad()
        if rank is not None and manager.errored() is None:
            loss_of(model, step, rank, ranks).backward()
        works = []
        for p in model.parameters():
            if p.grad is None:
                p.grad = p.new_zeros(p.shape)
            works.append(manager.allreduce(p.grad, reduce_op=dist.ReduceOp.SUM))
        for work in works:
            work.wait()
        try:
            complete = manager.should_commit()
        except Exception:
            complete = False
        if complete:
            optimizer.step()
        say(out, step, time.time(), bool(complete), ranks)


def under_torchrun(out: str) -> None:
    """A rank of torchrun's, which goes on from the checkpoint of the newest round."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    (model, optimizer), rank, ranks, step = made(), dist.get_rank(), dist.get_world_size(), 0
    kept = Path(out) / "checkpoint.pt"
    if kept.exists():
        state = torch.load(kept)
        step = state["step"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    ddp = DistributedDataParallel(model)
    while not (Path(out) / "over").exists():
        optimizer.zero_grad()
        (ranks * loss_of(ddp, step, rank, ranks)).backward()
        optimizer.step()
        step += 1
        if rank == 0:
            state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, kept.with_suffix(".part"))
            kept.with_suffix(".part").rename(kept)
        say(out, step, time.time(), True, ranks)
    os._exit(0)


def killed(way: str, python: str, kills: int, ranks: int, seed: int) -> None:
    """Run it one way, and print what the kills have cost."""
    chance, workers, other = random.Random(seed), {}, None
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHFT_LOG": "off"}
    environment |= {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"
    }  # else a restart finds the addresses of the dead
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment}
    with tempfile.TemporaryDirectory() as out:
        if way == "torchft":
            beside = str(Path(python).parent / "torchft_lighthouse")
            times = ["--join_timeout_ms", "400", "--heartbeat_timeout_ms", "1000", "--quorum_tick_ms", "20"]
            other = subprocess.Popen(
                [beside, "--bind", "127.0.0.1:29611", "--min_replicas", "1", *times], **quiet
            )
            command = [python, str(HERE), "--rank", "torchft", "--folder", out]

            def start() -> None:
                process = subprocess.Popen(command, **quiet)
                workers[process.pid] = process

            time.sleep(0.5)
            for _ in range(ranks):
                start()
        else:
            script = [str(HERE), "--rank", "torchrun", "--folder", out]
            run = [
                "-m",
                "torch.distributed.run",
                "--standalone",
                f"--nproc-per-node={ranks}",
                "--max-restarts=99",
            ]
            other = subprocess.Popen([python, *run, "--monitor-interval=0.1", *script], **quiet)
        struck: list[float] = []
        next_one, until = 0.0, time.time() + 60 + 15 * kills
        while time.time() < until:
            lines = {int(f.name): told(f) for f in Path(out).iterdir() if f.name.isdigit()}
            now, live = (
                time.time(),
                [pid for pid, each in lines.items() if each and each[-1][1] > time.time() - 0.5],
            )
            if len(live) < ranks or any(lines[pid][-1][3] != ranks for pid in live):
                next_one = now + 1 + chance.random()
            elif now > next_one:
                if len(struck) == kills:
                    break
                victim = chance.choice(live)
                os.kill(victim, signal.SIGKILL)
                struck.append(time.time())
                next_one = now + 2
                if way == "torchft":
                    workers[victim].wait()
                    start()
            time.sleep(0.02)
        (Path(out) / "over").touch()
        lines = {int(f.name): told(f) for f in Path(out).iterdir() if f.name.isdigit()}
        for process in [*workers.values(), other]:
            process.terminate()
            process.wait()
    ended: dict[int, float] = {}
    for each in lines.values():
        for step, at, complete, _ in each:
            if complete:
                ended[step] = min(ended.get(step, at), at)
    gaps = list(pairwise(sorted(ended.values())))
    usual = statistics.median(b - a for a, b in gaps)
    lost = [max((b - a for a, b in gaps if b > at and a < at + 3), default=0.0) - usual for at in struck]
    thrown = sum(not complete for each in lines.values() for _, _, complete, _ in each)
    print(
        f"{way}: {len(struck)} kills, rounds of usually {usual * 1e3:.0f} ms; seconds lost: median "
        f"{statistics.median(lost):.2f}, worst {max(lost):.2f}; gradients thrown away by survivors: "
        f"{thrown if way == 'torchft' else 'those of the broken round, on all ranks'}"
    )


def told(path: Path) -> list[Any]:
    """The whole lines of a process."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def main() -> None:
    """All three, one after the other; or a rank of one of them."""
    parser = command_line(__doc__)
    parser.add_argument("--torchft", default="", help="python of an environment that has torchft")
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rank", choices=["torchft", "torchrun"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.torchft and not Path(asked.torchft).with_name("torchft_lighthouse").is_file():
        parser.error(
            f"--torchft {asked.torchft}: no torchft_lighthouse is beside it; expected the python of an "
            "environment with torchft"
        )
    if asked.ranks < 2 or asked.kills < 1:
        parser.error(f"--ranks {asked.ranks} --kills {asked.kills}: expected 2 ranks and 1 kill, or more")
    if asked.rank == "torchft":
        with_torchft(asked.folder, "http://127.0.0.1:29611")
    elif asked.rank == "torchrun":
        under_torchrun(asked.folder)
    else:
        here = [
            sys.executable,
            str(HERE.with_name("faults.py")),
            "--kinds",
            "kill",
            "--faults",
            str(asked.kills),
        ]
        print("ElasticPace:", flush=True)
        subprocess.run([*here, "--ranks", str(asked.ranks), "--seed", str(asked.seed)], check=True)
        if asked.torchft:
            killed("torchft", asked.torchft, asked.kills, asked.ranks, asked.seed)
        killed("torchrun", sys.executable, asked.kills, asked.ranks, asked.seed)


if __name__ == "__main__":
    main()
