"""What does balancing gain where ranks really compute? Two gloo ranks on a core each, and a busy neighbour.

    python benchmarks/compute.py [--neighbour stays] [--batch 128] [--seconds 5] [--cycles 5] [--policy auto]
                                 [--split 36] [--slice 0.1]

A LeNet-5; nothing sleeps. The neighbour is a process that computes all the time: on nobody's core
("none"), always on rank 1's ("stays"), or on one rank's and then on the other's, for 5 s each ("moves").

The ways take turns, a few seconds each, so that all meet the same machine. All draw their samples through torch's
own DataLoader. "no waiting" is one of them: both ranks run as fast as they can, each for itself, with the same
loading, gradients and optimizer step. The samples that they run together in a second are the bound, which no way that
waits for others can exceed. --split adds plain DDP with a split set by hand, of which rank 1 gets so many samples.
--slice adds each way with time slices of so many milliseconds, for which any program may ask (Linux 6.12 or newer).

Printed: samples a second, the median of how many times plain DDP's in the same cycle with its quartiles, the share of
the bound, and where the rest went, in per cent of the bound:

    speed     The ranks computed at other speeds than without waiting: a rank that waits gives its core to the
              neighbour, and the kernel's scheduler gives it back in its own time; a step of fewer samples costs more
              for each.
    whole     Samples are whole: the best division into whole samples, at each round's true speeds.
    lag       The rest of the waiting: the round's speeds were not those that it was planned for.
    other     What is not computing: the all-reduce, the optimizer, loading, and Paceline's own work.

Then, as the kernel counts them, milliseconds of a step in which each rank's main thread was on its core, was ready
but the core was taken, and slept; and the first two of all its other threads, which are gloo's.

It needs two cores. With the defaults, about five minutes.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import kernel
import numpy as np
from scaffold import command_line, policy_name

from paceline.torch.callbacks import OnRound

POLICIES = ("level", "auto")
PLAIN, ALONE = "plain DDP", "no waiting"
NEIGHBOURS = ("none", "stays", "moves")
ROUNDS, PERIOD = 64, 5.0  # of an epoch; seconds
TOGETHER = 16  # steps between two looks at the clock


class Block(NamedTuple):
    """One way for a few seconds, as one rank saw it."""

    samples: int  # of all ranks; with no waiting, of this one
    seconds: float
    rounds: np.ndarray  # (rounds, 4): samples and seconds of computing of rank 0 and of rank 1, of each round
    times: kernel.Times


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

    def __init__(self, samples: int) -> None:
        import torch

        self.x, self.y = torch.randn(samples, 1, 28, 28), torch.randint(10, (samples,))

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        return self.x[indices], self.y[indices]


def batches(data: Images, rank: int, split: tuple[int, int]) -> Iterator[tuple[Any, Any]]:
    """Endless batches for this rank, in a new order every epoch; split: samples of rank 0 and of rank 1."""
    from torch.utils.data import DataLoader

    batch, epoch, first = sum(split), 0, rank * split[0]

    class Mine:
        def __iter__(self) -> Iterator[list[int]]:
            order = np.random.default_rng((0, epoch)).permutation(len(data))
            for begin in range(first, len(order), batch):
                yield order[begin : begin + split[rank]].tolist()

    loader: Any = DataLoader(data, batch_sampler=Mine(), collate_fn=lambda batch: batch)  # type: ignore[arg-type]
    while True:
        yield from loader
        epoch += 1


def steps(
    model: Any, optimizer: Any, loss_of: Any, given: Iterator[tuple[Any, Any]], counts: int | None
) -> Iterator[int]:
    """Endless steps of a model, or of its DDP; each gives the samples that it counts, by default its own."""
    for x, y in given:
        loss_of(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield counts or len(y)


def paced(
    policy: str,
    ddp: Any,
    optimizer: Any,
    loss_of: Any,
    data: Images,
    batch: int,
    note: Callable[[Any], None],
) -> Iterator[int]:
    """Endless rounds under Pace."""
    from paceline.torch import Pace

    pace = Pace(ddp, batch, policy, loop="pieces", callbacks=[OnRound(note)])
    loader = pace.loader(data, collate_fn=lambda batch: batch)
    while True:
        for x, y in loader:
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer):
                yield batch


class Way(NamedTuple):
    """kind: "alone", "plain" or "paced". split: of plain DDP. milliseconds: of a slice, 0 for the kernel's own."""

    kind: str
    policy: str = ""
    split: tuple[int, int] = (0, 0)
    milliseconds: float = 0.0


class Asked(NamedTuple):
    """What is measured."""

    ways: dict[str, Way]
    batch: int
    seconds: float
    cycles: int


def rank_of(rank: int, directory: str, asked: Asked, pipe: Any) -> None:
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
    loss_of, data = nn.CrossEntropyLoss(), Images(ROUNDS * asked.batch)
    noted: list[tuple[float, float, float, float]] = []

    def note(result: Any) -> None:
        first, second = result.loads
        noted.append((first, result.compute[0], second, result.compute[1]))

    loops = {}
    for name, way in asked.ways.items():
        torch.manual_seed(0)
        model: Any = models.create("lenet5", (1, 28, 28))
        if way.kind != "alone":
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        if way.kind == "paced":
            loops[name] = paced(way.policy, model, optimizer, loss_of, data, asked.batch, note)
        else:
            counts = None if way.kind == "alone" else asked.batch
            loops[name] = steps(model, optimizer, loss_of, batches(data, rank, way.split), counts)
    blocks: dict[str, list[Block]] = {name: [] for name in loops}
    flag = torch.zeros(1)
    for cycle in range(asked.cycles + 1):
        for name in loops if cycle % 2 else reversed(loops):
            kernel.slices(asked.ways[name].milliseconds)
            dist.barrier()
            noted.clear()
            before, began, samples = kernel.times(), time.perf_counter(), 0
            while True:
                for _ in range(TOGETHER):
                    samples += next(loops[name])
                passed = time.perf_counter() - began
                if asked.ways[name].kind != "alone":  # all end after the same step
                    flag.fill_(passed)
                    dist.broadcast(flag, 0)
                    passed = float(flag)
                if passed >= (asked.seconds if cycle else 1.0):  # the first cycle warms up
                    break
            took = time.perf_counter() - began
            if cycle:
                rounds, spent = np.array(noted).reshape(-1, 4), kernel.times().since(before)
                blocks[name].append(Block(samples, took, rounds, spent))
    pipe.send(blocks)
    dist.barrier()
    leave()
    os._exit(0)


def measure(kind: str, asked: Asked) -> list[dict[str, list[Block]]]:
    """The blocks of both ranks, beside this neighbour."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    context = multiprocessing.get_context("forkserver")
    pipes = [
        context.Pipe(duplex=False) for _ in (0, 1)
    ]  # one each: two writers to one would mix what they write
    on = {"none": [], "stays": cores[1:], "moves": cores}[kind]
    beside = [context.Process(target=neighbour, args=(on,), daemon=True)] if on else []
    with tempfile.TemporaryDirectory() as directory:
        ranks = [
            context.Process(target=rank_of, args=(rank, directory, asked, pipes[rank][1])) for rank in (0, 1)
        ]
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


def explain(rounds: np.ndarray, seconds: float, bound: float, most: int) -> Losses:
    """Divide the time of these rounds of ``most`` samples, (rounds, 4), that took ``seconds`` together, by what it
    was spent on."""
    loads, computing = rounds[:, 0::2], rounds[:, 1::2]
    kept = (loads > 0).all(axis=1) & (computing > 0).all(axis=1)
    loads, computing = loads[kept], computing[kept]
    batch, cost = loads.sum(axis=1), computing / loads  # seconds a sample
    seconds *= len(loads) / len(rounds)
    ideal = batch / (1 / cost).sum(axis=1)
    first = np.arange(most + 1)[:, None]
    whole = np.maximum(first * cost[:, 0], (most - first) * cost[:, 1]).min(axis=0)
    slowest = computing.max(axis=1)
    parts = [
        ideal.sum() - batch.sum() / bound,
        (whole - ideal).sum(),
        (slowest - whole).sum(),
        seconds - slowest.sum(),
    ]
    return Losses(*(part / seconds for part in parts))


def rates(blocks: list[Block]) -> np.ndarray:
    return np.array([block.samples / block.seconds for block in blocks])


def rate(blocks: list[Block]) -> float:
    return sum(block.samples for block in blocks) / sum(block.seconds for block in blocks)


def table(kind: str, asked: Asked, told: list[dict[str, list[Block]]]) -> str:
    speeds = [rate(blocks[ALONE]) for blocks in told]
    bound, width = sum(speeds), max(map(len, asked.ways)) + 1
    heads = "  ".join(f"{name:>6}" for name in Losses._fields)
    lines = [
        f"\nneighbour: {kind}, batch {asked.batch}; without waiting {speeds[0]:.0f} + {speeds[1]:.0f} = {bound:.0f} "
        "samples/s, the bound",
        f"{'':{width}}{'samples/s':>10}{'x plain DDP':>21}{'of bound':>10}   {heads}",
    ]
    together = [name for name, way in asked.ways.items() if way.kind != "alone"]
    for name in together:
        blocks = told[0][name]
        own, ratios = rate(blocks), rates(blocks) / rates(told[0][PLAIN])
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        line = f"{name:{width}}{own:10.0f}{middle:7.2f} ({low:.2f} to {high:.2f}){own / bound:10.1%}"
        if sum(len(block.rounds) for block in blocks):
            rounds = np.concatenate([block.rounds for block in blocks])
            # Of each block some rounds are settled in the next one: as many as were noted count.
            took = sum(len(block.rounds) * asked.batch * block.seconds / block.samples for block in blocks)
            losses = explain(rounds, took, bound, asked.batch)
            line += "   " + "  ".join(f"{loss:6.1%}" for loss in losses)
            line += f"   ({rounds[:, 0].mean():.1f} + {rounds[:, 2].mean():.1f} samples)"
        lines.append(line)
    lines.append(
        f"{'ms of a step':{width}}"
        + f"{'step':>7}"
        + 2 * f"{'core':>9}{'ready':>7}{'asleep':>7}{'gloo':>7}{'ready':>7}"
    )
    for name in asked.ways:
        each = asked.batch // 2 if name not in together else asked.batch  # samples that make up a step of it
        line = ""
        for blocks in (told[0][name], told[1][name]):
            count = sum(block.samples for block in blocks) / each
            took = sum(block.seconds for block in blocks) / count
            spent = np.sum([block.times for block in blocks], axis=0) / count
            asleep = took - spent[0] - spent[1]
            line += f"{1e3 * spent[0]:9.2f}" + "".join(
                f"{1e3 * part:7.2f}" for part in (spent[1], asleep, spent[2], spent[3])
            )
        lines.append(f"{name:{width}}{1e3 * each / rate(told[0][name]):7.2f}{line}")
    return "\n".join(lines)


def asked_of(options: argparse.Namespace) -> Asked:
    """The ways that the command line asks for, by name."""
    half = (options.batch // 2, options.batch - options.batch // 2)
    ways = {ALONE: Way("alone", split=half), PLAIN: Way("plain", split=half)}
    for second in options.split or ():
        split = (options.batch - second, second)
        ways[f"plain DDP, {split[0]} + {second}"] = Way("plain", split=split)
    for policy in options.policy or POLICIES:
        ways[policy] = Way("paced", policy)
    for milliseconds in options.slice or ():
        for name, way in list(ways.items()):
            if way.kind != "alone" and not way.milliseconds:
                ways[f"{name}, slices of {milliseconds:g} ms"] = way._replace(milliseconds=milliseconds)
    return Asked(ways, options.batch, options.seconds, options.cycles)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--neighbour", action="append", choices=NEIGHBOURS)
    parser.add_argument("--batch", type=int, default=128, help="samples of a round, of both ranks")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each way's turn")
    parser.add_argument("--cycles", type=int, default=5, help="turns of each way")
    parser.add_argument(
        "--policy", type=policy_name, action="append", help="beside plain DDP; by default level and auto"
    )
    parser.add_argument(
        "--split", type=int, action="append", help="plain DDP, too, with so many samples for rank 1"
    )
    parser.add_argument(
        "--slice", type=float, action="append", help="each way, too, with slices of so many ms"
    )
    options = parser.parse_args()
    for second in options.split or ():
        if not 0 < second < options.batch:
            parser.error(f"--split {second}: expected 1 to {options.batch - 1}, less than the batch")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("benchmarks/compute.py needs two cores")
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    # Else malloc may give memory back and take it again in every step, or may not: 1 ms of a step, by chance.
    os.environ.update(MALLOC_TRIM_THRESHOLD_="1000000000", MALLOC_MMAP_THRESHOLD_="1000000000")
    asked = asked_of(options)
    for kind in options.neighbour or NEIGHBOURS:
        print(table(kind, asked, measure(kind, asked)), flush=True)


if __name__ == "__main__":
    main()
