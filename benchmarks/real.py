"""Every method of the five papers for real: on processes under gloo and DDP, and on Ray, not on the virtual clock.

Workers sleep for their samples or rows, so that two cores suffice; what they compute, send and wait for is real. Each
row trains or multiplies a little, checks what it can against an independent answer, and prints a line of a table:
seconds, those of equal shares or of waiting for all under the same sleeps, the loss at the end, and what was checked.

    python benchmarks/real.py --rows dolbie-peers coded   # these rows; the names are in --help
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scaffold import command_line, forks, join

from paceline.balance.dolbie import (
    NewShare,
    announce,
    announced_straggler,
    decide,
    play_round,
    settle,
    start_peers,
)
from paceline.coded import Problem, ShiftedExponential, plan
from paceline.costs import Linear
from paceline.errors import PacelineError

PACES = (0.5e-3, 0.5e-3, 1e-3, 1e-3, 4e-3)  # seconds a sample of five workers
BATCH, ALPHA = 200, 0.05  # samples a round; DOLBIE's first step
NARX = "forecast=narx:warmup=20"  # EMA for 20 rounds instead of 500: the runs are short


class Ran(NamedTuple):
    """What a row says. before: seconds of equal shares, or of waiting for all."""

    where: str
    seconds: float
    before: float | None
    loss: float | None
    checked: str


def peers(steps: int) -> Ran:
    """DOLBIE's Algorithm 2: each process decides by itself, and sends its share to the straggler alone."""
    with tempfile.TemporaryDirectory() as directory:
        context = forks()
        told: Any = context.SimpleQueue()
        ranks = [context.Process(target=_peer, args=(r, steps, directory, told)) for r in range(len(PACES))]
        for each in ranks:
            each.start()
        played = sorted(told.get() for _ in ranks)
        for each in ranks:
            each.join()
    costs, shares = (np.array([each[i] for each in played]).swapaxes(0, 1) for i in (1, 2))  # (steps, n, ...)
    replayed, traffic = start_peers(len(PACES), ALPHA), 0
    for slope, overhead, share in zip(costs[..., 0], costs[..., 1], shares, strict=True):
        np.testing.assert_allclose([peer.share for peer in replayed], share, atol=1e-9)
        replayed, messages = play_round(replayed, Linear(slope, overhead), BATCH)
        traffic += messages.messages
    assert traffic == sum(each[3] for each in played)
    seconds = (shares * BATCH * costs[..., 0] + costs[..., 1]).max(1)
    equal = (BATCH / len(PACES) * costs[..., 0] + costs[..., 1]).max(1)
    loss = np.mean([each[4] for each in played])
    return Ran(
        "5 processes, gloo, no master",
        seconds.sum(),
        equal.sum(),
        float(loss),
        f'all shares are those of Algorithm 1 on the measured costs, from which "before" is computed; {traffic:,} '
        f"messages, the slowest one's share goes from {shares[0, -1]:.3f} to {shares[-1, -1]:.3f}",
    )


def _peer(rank: int, steps: int, directory: str, told: Any) -> None:
    """One process: it knows its own cost and share, and what the others announce. Trains a softmax on the digits."""
    import torch
    import torch.distributed as dist

    from paceline.data import datasets

    join(rank, len(PACES), directory)
    data = datasets.load("digits")
    x = torch.tensor(datasets.floats(data.x_train).reshape(len(data.x_train), -1))
    y = torch.tensor(data.y_train.astype(np.int64))
    weights = torch.zeros(x.shape[1], 10, requires_grad=True)
    rng = np.random.default_rng(rank)
    others = [r for r in range(len(PACES)) if r != rank]
    me = start_peers(len(PACES), ALPHA)[rank]
    costs, shares, sent, loss = [], [], 0, float("nan")
    for _ in range(steps):
        load = me.share * BATCH
        rows = rng.integers(len(x), size=max(round(load), 1))
        start = time.perf_counter()
        time.sleep(PACES[rank] * load)
        slept = time.perf_counter() - start
        each = torch.nn.functional.cross_entropy(x[rows] @ weights, y[rows], reduction="sum")
        (gradient,) = torch.autograd.grad(each, weights)
        overhead = time.perf_counter() - start - slept
        whole = torch.cat([gradient.flatten(), torch.tensor([len(rows), each.item()])])
        dist.all_reduce(whole)
        loss = float(whole[-1] / whole[-2])
        weights = (weights - 0.1 * whole[:-2].reshape(weights.shape) / whole[-2]).detach().requires_grad_()
        costs.append((slept / load if load > 0 else PACES[rank], overhead))
        shares.append(me.share)
        # Alg. 2, line 4: to everybody, how long it took and the steps that I allow
        mine = announce(me, costs[-1][0] * load + overhead)
        numbers = torch.tensor(mine[1:], dtype=torch.float64)
        posts = [dist.isend(numbers, other) for other in others]
        heard = [mine]
        for other in others:
            got = torch.zeros(len(mine) - 1, dtype=torch.float64)
            dist.recv(got, other)
            heard.append(type(mine)(other, *got.tolist()))
        sent += len(posts)
        for post in posts:
            assert post is not None
            post.wait()
        straggler, level = announced_straggler(heard), max(each.seconds for each in heard)
        me, handover = decide(me, (level - overhead) / costs[-1][0] / BATCH, heard)
        if handover is not None:  # line 9
            dist.send(torch.tensor([handover.share], dtype=torch.float64), straggler)
            sent += 1
        else:  # lines 11 to 13
            received = []
            for other in others:
                share = torch.zeros(1, dtype=torch.float64)
                dist.recv(share, other)
                received.append(NewShare(other, rank, share.item()))
            me = settle(me, received)
    told.put((rank, costs, shares, sent, loss))
    dist.barrier()
    dist.destroy_process_group()


def ddp(policy: str, steps: int) -> Ran:
    """``paceline train``: DDP under a policy, and under equal shares; the losses must be the same."""
    with tempfile.TemporaryDirectory() as directory:
        told = Path(directory, "told.json")
        asked = [*trained(policy, steps), "--out", directory, "--json", str(told)]
        subprocess.run([sys.executable, "-m", *asked], check=True, stdout=subprocess.DEVNULL)
        equal, other = json.loads(told.read_text(encoding="utf-8"))
    assert abs(equal["train_loss"] - other["train_loss"]) < 1e-4 * equal["train_loss"]
    loads = "/".join(map(str, other["final_batches"]))
    return Ran(
        "5 processes, DDP",
        other["seconds"],
        equal["seconds"],
        other["train_loss"],
        f"the loss is that of equal shares within 1e-4; loads {loads} at the end",
    )


def trained(policy: str, steps: int) -> list[str]:
    """The command of a row under DDP."""
    paces = ",".join(f"{1000 * pace:g}" for pace in PACES)
    return (
        f"paceline train --workers {len(PACES)} --global-batch {BATCH} --steps {steps} --slowdown-ms {paces} "
        f"--momentum 0 --compare equal,{policy}"
    ).split()


class Steady:
    """Seconds that a Ray worker sleeps for a task: its pace times its samples."""

    def __call__(self, worker: int, update: int, samples: int) -> float:
        return PACES[worker] * samples


class Lagging:
    """As in the text's example: one node lags from update 5 on."""

    def __call__(self, worker: int, update: int, samples: int) -> float:
        return 1e-3 * samples * (4.0 if worker == 1 and update >= 5 else 1.0)


class Stalls:
    """Round trips of 40 (.3 + .7 Exp(1)) ms, whatever the samples."""

    def __call__(self, worker: int, update: int, samples: int) -> float:
        return 0.04 * (0.3 + 0.7 * np.random.default_rng((worker, update)).exponential())


def served(
    delay: Callable[[int, int, int], float], epochs: int, kill: int | None = None, **setting: Any
) -> tuple[float, float, Counter[str], list[Any]]:
    """Train on Ray: seconds from the first update to the last, loss, what was dropped, all updates.

    kill: the worker whose process is killed a third of the way. Every sample must be used once an epoch under bsp and
    lsp.
    """
    from paceline.data import datasets
    from paceline.paramserver.config import ServerConfig
    from paceline.paramserver.engine import Update
    from paceline.paramserver.samples import Epochs
    from paceline.ray import Server
    from paceline.train.config import TrainConfig
    from paceline.train.ray_engine import images_program

    data = datasets.load("digits")
    samples, log, killed = Epochs(len(data.x_train), epochs, seed=0), list[Update](), list[int]()

    def on_update(update: Update) -> None:
        log.append(update)
        used = sum(each.batch for each in log)
        if kill is not None and not killed and used > epochs * len(data.x_train) / 3:
            killed.append(kill)
            os.kill(server.processes[kill], signal.SIGKILL)

    config = ServerConfig(len(PACES), BATCH, lr=0.2, **setting)
    with Server(images_program(TrainConfig(), data), config, samples, on_update, delay=delay) as server:
        server.run()
    assert set(samples.uses) == {epochs}, "a sample was lost or used twice"
    dropped = sum((update.dropped for update in log), Counter())
    last = [update.loss for update in log[-5:]]
    return log[-1].ended - log[0].ended, float(np.mean(last)), dropped, log


@cache
def _plain(delay: Any, epochs: int, kill: int | None, *before: tuple[str, str]) -> float:
    """Seconds of the baseline, which several rows share."""
    setting: dict[str, Any] = dict(before)
    return served(delay, epochs, kill, **setting)[0]


def on_ray(
    delay: Callable[[int, int, int], float], before: dict[str, str], epochs: int, **setting: Any
) -> Ran:
    """A row of the parameter server, and its baseline under the same sleeps."""
    seconds, loss, dropped, log = served(delay, epochs, **setting)
    plain = _plain(delay, epochs, setting.get("kill"), *before.items())
    what = ", ".join(f"{count} {name}" for name, count in sorted(dropped.items())) or "none"
    if "policy" in setting:
        each = "/".join(str(load) for load in sum(update.loads for update in log))
        said = f"{each} samples of each worker"
    else:
        said = f"{np.mean([update.quorum for update in log]):.1f} of {len(PACES)} waited for on average"
    said = f"each sample once an epoch; gradients dropped: {what}; {said}"
    return Ran("5 Ray workers", seconds, plain, loss, said)


def coded(assign: str, products: int) -> Ran:
    """Two masters share six standing workers, of which one is killed half-way; every product is numpy's."""
    from paceline.ray import CodedMatrix, WorkerPool

    workers, rows = tuple(f"w{n}" for n in range(8)), 400
    u = np.random.default_rng(0).uniform(1, 5, (2, len(workers)))
    problem = Problem(("x", "y"), workers, np.full(2, float(rows)), ShiftedExponential(u, 1 / u))
    rng = np.random.default_rng(1)
    matrices = [rng.standard_normal((rows, 32)) for _ in "xy"]

    def stall(worker: str, master: str, turn: int, count: int) -> float:
        m, n = "xy".index(master), workers.index(worker)
        return float(1e-4 * count * (1 + np.random.default_rng((m, n, turn)).exponential()) / u[m, n])

    def run(made: Any, kill: bool, **options: Any) -> tuple[float, int]:
        spent, lost = 0.0, 0
        with WorkerPool(workers, cpus=0, delay=stall) as pool, ThreadPoolExecutor(2) as both:
            masters = [
                CodedMatrix(a, made, m, pool, on_loss="recode", **options) for m, a in enumerate(matrices)
            ]
            for turn in range(products):
                if kill and turn == products // 2:
                    lost = int(made.workers_of(0)[0])
                    os.kill(pool.processes[workers[lost]], signal.SIGKILL)
                x = rng.standard_normal(32)
                start = time.perf_counter()
                for a, y in zip(matrices, both.map(lambda each, x=x: each @ x, masters), strict=True):
                    np.testing.assert_allclose(y, a @ x, rtol=1e-8, atol=1e-8)
                spent += time.perf_counter() - start
            for each in masters:
                each.close()
        return spent, lost

    seconds, lost = run(plan(problem, assign), True)
    plain, _ = run(plan(problem, "uniform", coded=False), False)
    return Ran(
        "8 standing Ray workers, 2 masters",
        seconds,
        plain,
        None,
        f"{2 * products} products are numpy's within 1e-8; {workers[lost]} was killed half-way (the uncoded, equal "
        "baseline loses nobody)",
    )


EQUAL = {"policy": "equal"}
ROWS: dict[str, tuple[str, Callable[[int], Ran]]] = {
    "dolbie-peers": ("DOLBIE, Algorithm 2", peers),
    "dolbie-ddp": ("DOLBIE, Algorithm 1: each rank its own master", partial(ddp, "dolbie:alpha=0.05")),
    "ogd-ddp": ("baseline OGD of DOLBIE", partial(ddp, "ogd:rate=0.1")),
    "abs-ddp": ("baseline ABS of DOLBIE", partial(ddp, "abs:window=5")),
    "lbbsp-steps-ddp": ("baseline LB-BSP of DOLBIE", partial(ddp, "lbbsp:delta=5,rounds=5")),
    "lbbsp-cpu-ddp": ("LB-BSP for processors, NARX", partial(ddp, f"lbbsp-cpu:{NARX}")),
    "lbbsp-gpu-ddp": ("LB-BSP for GPUs, NARX", partial(ddp, f"lbbsp-gpu:{NARX}")),
}


def _served_rows() -> None:
    def row(name: str, title: str, delay: Any, before: dict[str, str], **setting: Any) -> None:
        # The digits have 1,500 images.
        ROWS[name] = (title, lambda steps: on_ray(delay, before, max(steps * BATCH // 1500, 1), **setting))

    steady, stalls = Steady(), Stalls()  # one each, so that rows share their baselines
    for kind, what in (("cpu", "processors"), ("gpu", "GPUs")):
        row(f"lbbsp-{kind}-ray", f"LB-BSP for {what}, NARX", steady, EQUAL, policy=f"lbbsp-{kind}:{NARX}")
    row("asp-ray", "baseline ASP of LB-BSP", steady, EQUAL, sync="asp", policy="equal")
    row("ssp-ray", "baseline SSP of LB-BSP", steady, EQUAL, sync="ssp:10", policy="equal")
    row("wlbs-ray", "WLBS and LSP, one node lags, one is killed", Lagging(), EQUAL, sync="lsp:3:3",
        policy="wlbs:period=3,epoch=20", kill=4)  # fmt: skip
    for backup, title in (("dbw", "DBW"), ("dbw:worth=noise", "DBW, `worth=noise`"), ("blind", "B-DBW"),
                          ("adasync", "AdaSync")):  # fmt: skip
        for mode in ("push-wait", "push-interrupt", "pull"):
            before = {"mode": mode}
            row(f"{backup}-{mode}", f"{title}, {mode}", stalls, before, backup=backup, mode=mode)


_served_rows()
ROWS["coded"] = "coded products, iterated greedy assignment", lambda steps: coded("iterated", steps)
ROWS["coded-probabilistic"] = "coded products, probabilistic", lambda steps: coded("probabilistic", steps)


def main() -> None:
    """The table."""
    parser = command_line(__doc__)
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS), metavar="ROW",
                        help=", ".join(ROWS))  # fmt: skip
    parser.add_argument("--steps", type=int, default=60, help="rounds of 200 samples, or products")
    asked = parser.parse_args()
    if any(not name.endswith(("-ddp", "-peers")) for name in asked.rows):
        import ray

        ray.init(
            "local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )
    print(
        "| method | where | seconds | before | loss | what was checked | row |\n|---|---|---|---|---|---|---|",
        flush=True,
    )
    failed = 0
    for name in asked.rows:
        title, run = ROWS[name]
        try:
            ran = run(asked.steps)
        except PacelineError as error:  # such as workers that did not start on a busy machine
            print(f"{name}: {error}", file=sys.stderr, flush=True)
            failed += 1
            continue
        before = "" if ran.before is None else f"{ran.before:.1f}"
        loss = "" if ran.loss is None else f"{ran.loss:.3f}"
        cells = f"{title} | {ran.where} | {ran.seconds:.1f} | {before} | {loss} | {ran.checked} | `{name}`"
        print(f"| {cells} |".replace("|  |", "| |"), flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
