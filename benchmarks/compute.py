"""What does balancing gain where ranks really compute? Two gloo ranks on a core each, and a busy neighbour.

    python benchmarks/compute.py [--neighbour stays] [--seconds 5] [--cycles 5] [--policy auto]

A LeNet-5, global batch 128; nothing sleeps. The neighbour is a process that computes all the time: on nobody's core
("none"), always on rank 1's ("stays"), or on one rank's and then on the other's, for 5 s each ("moves").

The ways take turns, a few seconds each, so that all meet the same machine. "no waiting" is one of them: both ranks
run as fast as they can, each for itself, with the same loading, gradients and optimizer step. The samples that they
run together in a second are the bound, which no way that waits for others can exceed.

Printed: samples a second, the share of the bound, and where the rest went, in per cent of the bound:

    speed     The ranks computed at other speeds than without waiting: a rank that waits gives its core to the
              neighbour, and the kernel's scheduler gives it back in its own time.
    whole     Samples are whole: the best division into whole samples, at each round's true speeds.
    lag       The rest of the waiting: the round's speeds were not those that it was planned for.
    other     What is not computing: the all-reduce, the optimizer, loading, and Paceline's own work.

It needs two cores. With the defaults, about five minutes.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from scaffold import command_line

WAYS = ("plain DDP", "level", "auto")
ALONE = "no waiting"
NEIGHBOURS = ("none", "stays", "moves")
BATCH, EPOCH, PERIOD = 128, 8192, 5.0
TOGETHER = 16  # steps between two looks at the clock


class Block(NamedTuple):
    """One way for a few seconds, as one rank saw it."""

    samples: int  # of all ranks; with no waiting, of this one
    seconds: float
    rounds: np.ndarray  # (rounds, 4): samples and seconds of computing of rank 0 and of rank 1, of each round


def neighbour(cores: list[int]) -> None:
    """Computes for ever, by turns on each of these cores."""
    while True:
        for core in cores:
            os.sched_setaffinity(0, {core})
            until = time.perf_counter() + PERIOD
            while time.perf_counter() < until:
                sum(range(2000))


class Images:
    """Made up, given out in batches."""

    def __init__(self) -> None:
        import torch

        self.x, self.y = torch.randn(EPOCH, 1, 28, 28), torch.randint(10, (EPOCH,))

    def __len__(self) -> int:
        return EPOCH

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        return self.x[indices], self.y[indices]


def batches(data: Images, rank: int) -> Iterator[tuple[Any, Any]]:
    """Endless halves of a global batch for this rank, in a new order every epoch."""
    epoch = 0
    while True:
        order = np.random.default_rng((0, epoch)).permutation(EPOCH)
        for first in range(0, EPOCH - BATCH + 1, BATCH):
            yield data.__getitems__(order[first + rank * BATCH // 2 :][: BATCH // 2].tolist())
        epoch += 1


def alone(model: Any, optimizer: Any, loss_of: Any, data: Images, rank: int) -> Iterator[int]:
    """Endless steps of this rank for itself; each gives the samples that it ran."""
    for x, y in batches(data, rank):
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield len(y)


def plain(ddp: Any, optimizer: Any, loss_of: Any, data: Images, rank: int) -> Iterator[int]:
    """Endless steps of DDP with an equal split."""
    for x, y in batches(data, rank):
        loss_of(ddp(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield BATCH


def paced(
    policy: str, ddp: Any, optimizer: Any, loss_of: Any, data: Images, note: Callable[[Any], None]
) -> Iterator[int]:
    """Endless rounds under Pace."""
    from paceline.torch import Pace

    pace = Pace(ddp, BATCH, policy, loop="pieces", on_round=note)
    loader = pace.loader(data, collate_fn=lambda batch: batch)
    while True:
        for x, y in loader:
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer):
                yield BATCH


def rank_of(rank: int, directory: str, ways: list[str], seconds: float, cycles: int, pipe: Any) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.learners import models
    from paceline.torch import leave

    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    loss_of, data = nn.CrossEntropyLoss(), Images()
    noted: list[tuple[float, float, float, float]] = []

    def note(result: Any) -> None:
        first, second = result.loads
        noted.append((first, result.compute[0], second, result.compute[1]))

    loops = {}
    for way in (ALONE, *ways):
        torch.manual_seed(0)
        model: Any = models.create("lenet5", (1, 28, 28))
        if way != ALONE:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        common = (model, optimizer, loss_of, data)
        if way == ALONE:
            loops[way] = alone(*common, rank)
        elif way == "plain DDP":
            loops[way] = plain(*common, rank)
        else:
            loops[way] = paced(way, *common, note)
    blocks: dict[str, list[Block]] = {way: [] for way in loops}
    flag = torch.zeros(1)
    for cycle in range(cycles + 1):
        for way in loops if cycle % 2 else reversed(loops):
            dist.barrier()
            noted.clear()
            began, samples = time.perf_counter(), 0
            while True:
                for _ in range(TOGETHER):
                    samples += next(loops[way])
                passed = time.perf_counter() - began
                if way != ALONE:  # all end after the same step
                    flag.fill_(passed)
                    dist.broadcast(flag, 0)
                    passed = float(flag)
                if passed >= (seconds if cycle else 1.0):  # the first cycle warms up
                    break
            took = time.perf_counter() - began
            if cycle:
                blocks[way].append(Block(samples, took, np.array(noted).reshape(-1, 4)))
    pipe.send(blocks)
    dist.barrier()
    leave()
    os._exit(0)


def measure(kind: str, ways: list[str], seconds: float, cycles: int) -> list[dict[str, list[Block]]]:
    """The blocks of both ranks, beside this neighbour."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    context = multiprocessing.get_context("forkserver")
    pipes = [context.Pipe(duplex=False) for _ in (0, 1)]  # one each: two writers to one would mix what they write
    on = {"none": [], "stays": cores[1:], "moves": cores}[kind]
    beside = [context.Process(target=neighbour, args=(on,), daemon=True)] if on else []
    with tempfile.TemporaryDirectory() as directory:
        given = (directory, ways, seconds, cycles)
        ranks = [context.Process(target=rank_of, args=(rank, *given, pipes[rank][1])) for rank in (0, 1)]
        for process in (*beside, *ranks):
            process.start()
        told: list[dict[str, list[Block]]] = []
        try:
            for ours, _ in pipes:
                while not ours.poll(1.0):
                    if any(process.exitcode for process in ranks):
                        raise SystemExit("a rank has failed; see above")
                told.append(ours.recv())
            for process in ranks:
                process.join(60)
        finally:
            for process in (*beside, *ranks):
                process.kill()
    return told


class Losses(NamedTuple):
    """Where the rest of the bound went; portions of the bound that add up to 1 minus the share."""

    speed: float
    whole: float
    lag: float
    other: float


def explain(rounds: np.ndarray, seconds: float, bound: float) -> Losses:
    """Divide the time of these rounds, (rounds, 4), that took ``seconds`` together, by what it was spent on."""
    loads, computing = rounds[:, 0::2], rounds[:, 1::2]
    kept = (loads > 0).all(axis=1) & (computing > 0).all(axis=1)
    loads, computing = loads[kept], computing[kept]
    batch, cost = loads.sum(axis=1), computing / loads  # seconds a sample
    seconds *= len(loads) / len(rounds)
    ideal = batch / (1 / cost).sum(axis=1)
    first = np.arange(BATCH + 1)[:, None]
    whole = np.maximum(first * cost[:, 0], (batch - first) * cost[:, 1]).min(axis=0)
    slowest = computing.max(axis=1)
    parts = [
        ideal.sum() - batch.sum() / bound,
        (whole - ideal).sum(),
        (slowest - whole).sum(),
        seconds - slowest.sum(),
    ]
    return Losses(*(part / seconds for part in parts))


def table(kind: str, ways: list[str], told: list[dict[str, list[Block]]]) -> str:
    def rate(blocks: list[Block]) -> float:
        return sum(block.samples for block in blocks) / sum(block.seconds for block in blocks)

    speeds = [rate(blocks[ALONE]) for blocks in told]
    bound = sum(speeds)
    heads = "  ".join(f"{name:>6}" for name in Losses._fields)
    lines = [
        f"\nneighbour: {kind}; without waiting {speeds[0]:.0f} + {speeds[1]:.0f} = {bound:.0f} samples/s, the bound",
        f"{'':12}{'samples/s':>10}{'x plain':>9}{'of bound':>10}   {heads}",
    ]
    for way in ways:
        blocks = told[0][way]
        own = rate(blocks)
        line = f"{way:12}{own:10.0f}{own / rate(told[0][ways[0]]):9.2f}{own / bound:10.1%}"
        if sum(len(block.rounds) for block in blocks):
            rounds = np.concatenate([block.rounds for block in blocks])
            # Of each block some rounds are settled in the next one: as many as were noted count.
            took = sum(len(block.rounds) * BATCH * block.seconds / block.samples for block in blocks)
            line += "   " + "  ".join(f"{loss:6.1%}" for loss in explain(rounds, took, bound))
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--neighbour", action="append", choices=NEIGHBOURS)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way's turn")
    parser.add_argument("--cycles", type=int, default=5, help="turns of each way")
    parser.add_argument("--policy", action="append", help="beside plain DDP; by default level and auto")
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("benchmarks/compute.py needs two cores")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    ways = [WAYS[0], *(options.policy or WAYS[1:])]
    for kind in options.neighbour or NEIGHBOURS:
        print(table(kind, ways, measure(kind, ways, options.seconds, options.cycles)), flush=True)


if __name__ == "__main__":
    main()
