"""How many Python instructions and calls does a round cost on a rank's main thread, beside plain DDP's?

    python benchmarks/instructions.py [--policy level] [--weigh hook] [--rounds 400] [--top 15]

Two real gloo ranks train the small model of ``overhead.py --small`` in steps of 2 to 3 ms, first with plain DDP and
then under Pace. Once loads have settled, ``sys.settrace`` counts every instruction and every call of Python functions
of so many rounds on rank 0's main thread; what torch's kernels, gloo's threads and numpy's C code do is not counted.
The mean depends on how busy the machine is, since slow rounds are decided more often; the median is that of the light
rounds between decisions, and does not. A batch is read in one piece, so that nothing is counted for each sample:
counting slows rank 0 down, which is then given fewer samples than under plain DDP. --top also prints the functions
that take most of what is added.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from statistics import median
from typing import Any, NamedTuple

from scaffold import command_line, count, forks, join, policy_name

RANKS, INPUTS, SAMPLES, EPOCH_ROUNDS = 2, 3072, 16, 100
WARM_UP = 300  # rounds before anything is counted


def as_it_is(batch: Any) -> Any:
    """Batches come whole from the data set."""
    return batch


class Counts(NamedTuple):
    """Instructions and calls by function, and the instructions of each round."""

    instructions: Counter[str]
    calls: Counter[str]
    by_round: list[int]


def counting(rounds: Iterator[None]) -> Counts:
    """What these rounds do on this thread."""
    instructions: Counter[Any] = Counter()
    calls: Counter[Any] = Counter()
    totals = [0]

    def local(frame: Any, event: str, _: Any) -> Any:
        if event == "opcode":
            instructions[frame.f_code] += 1
        return local

    def begins(frame: Any, event: str, _: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        calls[frame.f_code] += 1
        return local

    sys.settrace(begins)
    try:
        for _ in rounds:
            totals.append(instructions.total())
    finally:
        sys.settrace(None)

    def named(counts: Counter[Any]) -> Counter[str]:
        found: Counter[str] = Counter()
        for code, number in counts.items():
            name = "/".join(code.co_filename.split("/")[-2:])
            found[f"{name}:{code.co_firstlineno} {code.co_qualname}"] += number
        return found

    return Counts(named(instructions), named(calls), [now - before for before, now in pairwise(totals)])


def rounds_of(ways: str, ranks: int, weigh: str) -> Iterator[None]:
    """Endless rounds of plain DDP, or under a policy."""
    import torch
    from throughput import Batched
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    from paceline.torch import Pace

    batch = SAMPLES * ranks
    data: Any = Batched(torch.randn(batch * EPOCH_ROUNDS, INPUTS), torch.randint(10, (batch * EPOCH_ROUNDS,)))
    loss_of, ddp = nn.CrossEntropyLoss(), DistributedDataParallel(nn.Linear(INPUTS, 10))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    if ways == "plain DDP":
        sampler: Any = DistributedSampler(data, shuffle=True, drop_last=True)
        plain: Any = DataLoader(data, batch_size=SAMPLES, sampler=sampler, collate_fn=as_it_is)
        epoch = 0
        while True:
            sampler.set_epoch(epoch)
            epoch += 1
            for x, y in plain:
                loss_of(ddp(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                yield
    pace = Pace(ddp, batch, ways, loop="pieces", weigh=weigh)
    loader = pace.loader(data, collate_fn=as_it_is)
    while True:
        for x, y in loader:
            loss = loss_of(ddp(x), y)
            loss.backward() if weigh == "hook" else pace.backward(loss)
            if pace.step(optimizer):
                yield


def rank_of(rank: int, directory: str, ways: str, weigh: str, rounds: int, pipe: Any) -> None:
    from paceline.torch import leave

    join(rank, RANKS, directory)
    each = rounds_of(ways, RANKS, weigh)
    for _ in range(WARM_UP):
        next(each)

    few = islice(each, rounds)
    if rank:
        for _ in few:
            pass
    else:
        pipe.send(counting(few))
    leave()
    os._exit(0)


def counted(context: Any, ways: str, weigh: str, rounds: int) -> Counts:
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        workers = [
            context.Process(target=rank_of, args=(rank, directory, ways, weigh, rounds, theirs))
            for rank in range(RANKS)
        ]
        for worker in workers:
            worker.start()
        if not ours.poll(600):
            raise SystemExit("a rank has failed; see above")
        found: Counts = ours.recv()
        for worker in workers:
            worker.join()
    return found


def measured(found: Counts) -> tuple[float, float, float]:
    """The mean and the median of a round's instructions, and the mean of its calls."""
    rounds = len(found.by_round)
    return found.instructions.total() / rounds, median(found.by_round), found.calls.total() / rounds


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--policy", type=policy_name, action="append")
    parser.add_argument("--weigh", choices=["loss", "hook"], default="loss")
    parser.add_argument("--rounds", type=count, default=400)
    parser.add_argument("--top", type=int, default=0, help="functions to print")
    options = parser.parse_args()
    context, rounds = forks(), options.rounds
    plain = counted(context, "plain DDP", options.weigh, rounds)
    print(f"{'a round of':12}{'instructions':>14}{'more':>8}{'median':>8}{'more':>8}{'calls':>8}{'more':>8}")
    before = measured(plain)
    print(f"{'plain DDP':12}{before[0]:14.0f}{'':8}{before[1]:8.0f}{'':8}{before[2]:8.0f}", flush=True)
    for policy in options.policy or ["equal", "level", "auto"]:
        found = counted(context, policy, options.weigh, rounds)
        now = measured(found)
        shown = (f"{each:8.0f}{each - plainly:8.0f}" for each, plainly in zip(now, before, strict=True))
        print(f"{policy:12}      {''.join(shown)}", flush=True)
        found.instructions.subtract(plain.instructions)
        for name, number in found.instructions.most_common(options.top):
            print(
                f"    {number / rounds:8.1f} {(found.calls[name] - plain.calls[name]) / rounds:7.2f}  {name}"
            )


if __name__ == "__main__":
    main()
