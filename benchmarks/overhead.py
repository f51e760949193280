"""What does Paceline cost where there is nothing to balance? Even gloo ranks with real CPU work.

    python benchmarks/overhead.py [--pairs 60] [--policy level]
    python benchmarks/overhead.py --small [--ranks 2,4,8] [--rounds 100,8] [--pairs 20] [--policy auto]
    python benchmarks/overhead.py --mnist [--rounds 40] [--pairs 10]
    python benchmarks/overhead.py --hook [--rounds 100] [--pairs 40] [--policy level]

Blocks of plain DDP and of Pace alternate in the same processes, each with its own model, so that whatever else the
machine does meets both. Printed: the time of a step of each, and the median over pairs of their ratio with its
quartiles. "equal" shows the machinery alone; "level" and "auto" also follow the machine's own noise.

As it stands, two ranks run LeNet-5 in steps of about 130 ms: what balancing costs a usual step. With --small, steps
of 2 ms (a linear model on 3,072 inputs, 16 samples a rank) show what a round costs in milliseconds. Both sides draw
their samples through torch's own DataLoader, plain DDP with DistributedSampler, and both go through whole epochs. The
processor time of a rank and a round, user and system of all its threads, is printed, too: it says the same on a busy
machine, and where there are more ranks than processors it alone means anything. What --rounds 8 costs more than
--rounds 100 is the end of an epoch. With --mnist, they are steps of what people try first: the network, optimizer and
batch of pytorch/examples' mnist, on made-up images. With --hook, the small steps of both sides are Paceline's: the
first weights the loss, the second the gradients, in DDP's communication hook.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from scaffold import command_line, count, counts, forks, join, policy_name

RANKS, BATCH, BLOCK = 2, 2048, 4
INPUTS, SAMPLES = 3072, 16  # of the small model, and of each rank in its rounds
MNIST_SAMPLES = 64  # of each rank in a round
LEAST_ROUNDS = 96  # of a block of small steps
ROWS = 8192  # different samples that each rank keeps, of as many as an epoch asks for: 64 ranks would fill the memory


def plain_steps(rank: int, ddp: Any, optimizer: Any, loss_of: Any, data: Any) -> Iterator[None]:
    """Endless steps of an ordinary DDP loop over this rank's half."""
    import torch

    half = BATCH // RANKS
    epoch = 0
    while True:
        order = np.random.default_rng((0, epoch)).permutation(len(data))
        for first in range(0, len(order) - BATCH + 1, BATCH):
            x, y = data.__getitems__(order[first + rank * half : first + (rank + 1) * half].tolist())
            loss_of(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield
        epoch += 1
        torch.manual_seed(epoch)


def paced_steps(pace: Any, ddp: Any, optimizer: Any, loss_of: Any, data: Any) -> Iterator[None]:
    """Endless steps under Pace."""
    loader = pace.loader(data, collate_fn=lambda batch: batch)
    while True:
        for x, y in loader:
            pace.backward(loss_of(ddp(x), y))
            if pace.step(optimizer):
                yield


def large_blocks(rank: int, policy: str) -> tuple[list[Callable[[], None]], int]:
    """A block of each way, plain DDP first, and the rounds of a block."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.learners import models
    from paceline.torch import Pace

    class Images:
        x, y = torch.randn(BATCH * 16, 1, 28, 28), torch.randint(10, (BATCH * 16,))

        def __len__(self) -> int:
            return len(self.x)

        def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
            return self.x[indices], self.y[indices]

    ways = []
    loss_of = nn.CrossEntropyLoss()
    for paced in (False, True):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(models.create("lenet5", (1, 28, 28)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        if paced:
            ways.append(
                paced_steps(Pace(ddp, BATCH, policy, loop="pieces"), ddp, optimizer, loss_of, Images())
            )
        else:
            ways.append(plain_steps(rank, ddp, optimizer, loss_of, Images()))

    def block(way: Iterator[None]) -> Callable[[], None]:
        return lambda: [next(way) for _ in range(BLOCK)].clear()

    return [block(way) for way in ways], BLOCK


def mnist() -> Any:
    """The network of pytorch/examples' mnist; its LogSoftmax is in the loss."""
    from torch import nn

    convolutions = nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    head = nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)
    return nn.Sequential(*convolutions, nn.Dropout(0.25), nn.Flatten(), *head)


def small_blocks(ranks: int, policy: str, rounds: int, kind: str) -> tuple[list[Callable[[], None]], int]:
    """The same of small steps, in whole epochs of so many rounds. kind: "mnist" for its network; "linear"; "hook" for
    the linear model with its loss weighted, and with its gradients weighted."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from paceline.torch import Pace

    images = kind == "mnist"
    samples, shape = (MNIST_SAMPLES, (1, 28, 28)) if images else (SAMPLES, (INPUTS,))
    batch = samples * ranks
    rows = min(batch * rounds, ROWS)
    kept = TensorDataset(torch.randn(rows, *shape), torch.randint(10, (rows,)))

    class Data(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return batch * rounds

        def __getitem__(self, index: int) -> Any:
            return kept[index % rows]

    data = Data()
    loss_of = nn.CrossEntropyLoss()
    epochs = 1 if images else -(-LEAST_ROUNDS // rounds)

    def learner() -> tuple[Any, Any]:
        ddp = DistributedDataParallel(mnist() if images else nn.Linear(INPUTS, 10))
        optimizer = torch.optim.Adadelta if images else torch.optim.SGD
        return ddp, optimizer(ddp.parameters(), lr=1.0 if images else 0.01)

    torch.manual_seed(0)
    plain, plain_optimizer = learner()
    sampler: Any = DistributedSampler(data, shuffle=True, drop_last=True)
    plain_loader: Any = DataLoader(data, batch_size=samples, sampler=sampler)
    epoch = 0

    def plainly() -> None:
        nonlocal epoch
        for _ in range(epochs):
            sampler.set_epoch(epoch)
            epoch += 1
            for x, y in plain_loader:
                loss_of(plain(x), y).backward()
                plain_optimizer.step()
                plain_optimizer.zero_grad()

    def paced(weigh: str) -> Callable[[], None]:
        ddp, optimizer = learner()
        pace = Pace(ddp, batch, policy, loop="pieces", weigh=weigh)
        loader = pace.loader(data)

        def run() -> None:
            for _ in range(epochs):
                for x, y in loader:
                    loss = loss_of(ddp(x), y)
                    loss.backward() if weigh == "hook" else pace.backward(loss)
                    pace.step(optimizer)

        return run

    return [paced("loss"), paced("hook")] if kind == "hook" else [plainly, paced("loss")], epochs * rounds


def rank_of(
    rank: int,
    ranks: int,
    directory: str,
    policy: str,
    rounds: int | None,
    kind: str,
    pairs: int,
    pipe: Any,
) -> None:
    """Sends from each rank seconds and processor seconds of a round, (pairs, way) each."""
    import torch.distributed as dist

    from paceline.torch import leave

    join(rank, ranks, directory)
    if rounds is None:
        ways, each = large_blocks(rank, policy)
    else:
        ways, each = small_blocks(ranks, policy, rounds, kind)
    seconds, spent = np.zeros((pairs + 2, 2)), np.zeros((pairs + 2, 2))
    for pair in range(-2, pairs):
        for way in (0, 1) if pair % 2 else (1, 0):
            dist.barrier()
            began, ran = time.perf_counter(), time.process_time()
            ways[way]()
            seconds[pair, way] = (time.perf_counter() - began) / each
            spent[pair, way] = (time.process_time() - ran) / each
    pipe.send((rank, seconds[:pairs], spent[:pairs]))
    dist.barrier()
    leave()
    os._exit(0)


def measured(
    context: Any, ranks: int, policy: str, rounds: int | None, pairs: int, kind: str = "linear"
) -> tuple[np.ndarray, np.ndarray]:
    """(rank 0's seconds a round, the ranks' mean processor seconds), (pairs, way) each: plain DDP, then Pace."""
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, directory, policy, rounds, kind, pairs, theirs)
        workers = [context.Process(target=rank_of, args=(rank, *arguments)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        told = {}
        for _ in workers:
            if not ours.poll(600):
                raise SystemExit("a rank has failed; see above")
            rank, *figures = ours.recv()
            told[rank] = figures
        for worker in workers:
            worker.join()
    return told[0][0], np.mean([spent for _, spent in told.values()], axis=0)


def quartiles(values: np.ndarray, form: str) -> str:
    low, middle, high = np.quantile(values, [0.25, 0.5, 0.75])
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def large(context: Any, policies: list[str], pairs: int) -> None:
    print(f"{'policy':10}{'plain DDP':>12}{'Paceline':>12}   ratio (quartiles of {pairs} pairs)")
    for policy in policies:
        seconds, _ = measured(context, RANKS, policy, None, pairs)
        plain, paced = 1e3 * np.median(seconds, axis=0)
        ratio = quartiles(seconds[:, 1] / seconds[:, 0], ".3f")
        print(f"{policy:10}{plain:9.2f} ms{paced:9.2f} ms   {ratio}", flush=True)


def small(
    context: Any, policies: list[str], pairs: int, ranks: list[int], rounds: list[int], kind: str
) -> None:
    first, second = ("loss", "the hook") if kind == "hook" else ("plain", "Paceline")
    print(
        f"milliseconds a round; what {second} adds is the median (and quartiles) of {pairs} pairs\n"
        f"{'ranks':>5} {'rounds':>6} {'policy':9}{first:>8}{'added':>24}{'ratio':>8}"
        f"   processor: {first:>6}{'added':>24}{'ratio':>8}"
    )
    for together in ranks:
        for policy in policies:
            for each in rounds:
                line = f"{together:5} {each:6} {policy:9}"
                for number, figures in enumerate(measured(context, together, policy, each, pairs, kind)):
                    plain, paced = 1e3 * figures.T
                    added, ratio = quartiles(paced - plain, ".2f"), np.median(paced / plain)
                    line += f"{'              ' * number}{np.median(plain):8.2f}{added:>24}{ratio:8.3f}"
                print(line, flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--pairs", type=count)
    parser.add_argument("--policy", type=policy_name, action="append")
    parser.add_argument("--small", action="store_true", help="steps of 2 ms")
    parser.add_argument("--mnist", action="store_true", help="steps of pytorch/examples' mnist")
    parser.add_argument(
        "--hook", action="store_true", help="weights on the gradients beside weights on the loss"
    )
    parser.add_argument("--ranks", type=counts, default=[2], help="of small steps; several with commas")
    parser.add_argument("--rounds", type=counts, help="of an epoch of small steps; several with commas")
    options = parser.parse_args()
    context = forks()
    if options.small or options.mnist or options.hook:
        kind = "mnist" if options.mnist else "hook" if options.hook else "linear"
        ways, rounds = options.policy or ["equal", "level", "auto"], [40] if options.mnist else [100, 8]
        pairs = options.pairs or (10 if options.mnist else 20)
        small(context, ways, pairs, options.ranks, options.rounds or rounds, kind)
    else:
        large(context, options.policy or ["equal", "level", "auto"], options.pairs or 60)


if __name__ == "__main__":
    main()
