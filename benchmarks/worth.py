"""Are fewer workers as fast as the record of all says? Made-up clusters, and each predicted subset really run.

    python benchmarks/worth.py [--only 1/1/4] [--policy level] [--rounds 30] [--round-ms 150]

Two to four real gloo ranks that sleep for each sample, some of them for a fixed time in each step, too, and some with
slow links: those are network namespaces on a bridge, whose rates ``tc`` sets (Linux, root), and the model is padded.
Each cluster runs under --policy with a record, from which ``paceline.simulate.worth`` predicts the best subset of
each size, the fastest worker alone among them, and all but the slowest. Then these really run under "level" with the
same batch. Printed: milliseconds of a round, predicted and measured (median of the later half), and the difference.
Where the record's sentences recommend to leave somebody out, it says how much faster the others then were.
--round-ms sets the batch such that all together sleep about so long.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scaffold import command_line, count, forks, join, policy_name

NEWNET = 0x40000000  # of setns: a network namespace
WITHIN = 0.05
QUICK = "480mbit"


class Made(NamedTuple):
    """speeds: ms a sample. fixed: ms of each step. rates: links, as ``tc`` has them. kilobytes: gradients."""

    name: str
    speeds: tuple[float, ...]
    fixed: tuple[float, ...] | None = None
    rates: tuple[str, ...] | None = None
    kilobytes: int = 5


CLUSTERS = (
    Made("1/1/4", (1, 1, 4)),
    Made("1/3", (1, 3)),
    Made("1/8", (1, 8)),
    Made("1/1/1", (1, 1, 1)),
    Made("2/3/5", (2, 3, 5)),
    Made("1/1/1/4", (1, 1, 1, 4)),
    Made("1/1/4, each step 20 ms more", (1, 1, 4), (20, 20, 20)),
    Made("1/1/2, each step 0, 10 and 40 ms more", (1, 1, 2), (0, 10, 40)),
    Made("1/1/16, links of 100 Mbit/s", (1, 1, 16), None, ("100mbit",) * 3, 500),
    Made("1/2, links of 50 Mbit/s", (1, 2), None, ("50mbit",) * 2, 1000),
    Made("1/1/2/12, links of 200 Mbit/s", (1, 1, 2, 12), None, ("200mbit",) * 4, 500),
    Made("1/1/3, the last one's link 50 Mbit/s", (1, 1, 3), None, (QUICK, QUICK, "50mbit"), 250),
)


def rank_of(
    rank: int,
    made: Made,
    batch: int,
    policy: str,
    rounds: int,
    directory: str,
    space: str | None,
    first: str,
    record: str | None,
    pipe: Any,
) -> None:
    """One rank of a cluster, which sends the seconds of each round if it is the first. first: its address."""
    if space is not None:
        with open(f"/var/run/netns/{space}") as entry:
            if ctypes.CDLL(None, use_errno=True).setns(entry.fileno(), NEWNET):
                raise OSError(ctypes.get_errno(), f"the network namespace {space} can't be entered")
        os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": first}
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import TensorDataset

    from paceline.torch import Pace, leave
    from paceline.torch.callbacks import Record

    ranks = len(made.speeds)
    if ranks > 1:
        join(rank, ranks, directory)
    torch.manual_seed(0)
    model: Any = nn.Linear(10, made.kilobytes * 1024 // 44)
    ddp = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pace = Pace(ddp, batch, policy, callbacks=[] if record is None else [Record(record)])
    loader = pace.loader(TensorDataset(torch.randn(batch * 8, 10)))
    fixed = made.fixed[rank] if made.fixed else 0.0
    stamps = [time.perf_counter()]
    while pace.rounds < rounds:
        for (x,) in loader:
            time.sleep((fixed + made.speeds[rank] * len(x)) / 1e3)
            pace.backward(ddp(x[:1]).square().mean())
            pace.step(optimizer)
            stamps.append(time.perf_counter())
            if pace.rounds == rounds:
                break
    pace.close()
    if rank == 0:
        pipe.send(np.diff(stamps))
    if ranks > 1:
        leave()


def run(made: Made, batch: int, policy: str, rounds: int, record: str | None = None) -> float:
    """Median seconds of the rounds in the later half."""
    import network  # not at the top, since each rank imports this file

    context = forks()
    ours, theirs = context.Pipe(duplex=False)
    links: Any = network.cables(made.rates) if made.rates else nullcontext([None] * len(made.speeds))
    with tempfile.TemporaryDirectory() as directory, links as spaces:
        workers = [
            context.Process(
                target=rank_of,
                args=(
                    rank,
                    made,
                    batch,
                    policy,
                    rounds,
                    directory,
                    space,
                    network.address(0),
                    record,
                    theirs,
                ),
            )
            for rank, space in enumerate(spaces)
        ]
        for worker in workers:
            worker.start()
        for _ in range(600):
            if ours.poll(0.1) or any(worker.exitcode for worker in workers):
                break
        if not ours.poll():
            for worker in workers:
                worker.kill()
            raise SystemExit("a rank has failed; see above")
        seconds = ours.recv()
        for worker in workers:
            worker.join()
    return float(np.median(seconds[rounds // 2 :]))


def some(made: Made, members: Sequence[int]) -> Made:
    """The cluster with these workers only."""

    def of(values: Any) -> Any:
        return values and tuple(values[i] for i in members)

    return Made(made.name, of(made.speeds), of(made.fixed), of(made.rates), made.kilobytes)


def compare(made: Made, policy: str, rounds: int, round_seconds: float) -> tuple[float, bool]:
    """Prints a cluster's rows. The largest difference, and whether each recommendation was faster."""
    from paceline import runs
    from paceline.simulate import worth

    n = len(made.speeds)
    batch = round(round_seconds * sum(1e3 / speed for speed in made.speeds))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        everyone = run(made, batch, policy, rounds, str(path))
        record = runs.read(path)
    known, said = worth.measured(record), worth.of_run(record)
    assert known is not None, "the record tells nothing of all workers"
    pace, fixed = (np.median(each, axis=0) for each in known[:2])
    sums = worth.growth(known[3], n)
    links = worth.links(record)
    found = worth.best(pace, fixed, known[2], sums, links)
    links = np.ones(n) if links is None else links
    advised = any(each.startswith("Without ") for each in said)
    advice = min(found[:-1], key=lambda one: one.seconds).members if advised else ()
    members = dict.fromkeys([found[-1].members, *(one.members for one in found)])
    members[tuple(np.delete(np.arange(n), int(np.argmax(made.speeds))))] = None
    largest, right = 0.0, True
    print(f"\n{made.name} ms a sample, batch {batch}")
    for each in members:
        predicted = worth.of(np.array(each), pace, fixed, known[2], sums, links).seconds
        again = len(each) < n or policy != "level"
        measured = run(some(made, each), batch, "level", rounds) if again else everyone
        everyone = measured if len(each) == n else everyone
        off = predicted / measured - 1
        largest = max(largest, abs(off))
        told = ""
        if each == advice:
            gain = everyone / measured - 1
            right = gain > 0
            told = f"   recommended: {gain:+.1%}, {'faster' if right else 'SLOWER'}"
        who = "workers " + ", ".join(map(str, each))
        print(f"  {who:22}{1e3 * predicted:10.1f}{1e3 * measured:10.1f}{off:+9.1%}{told}", flush=True)
    return largest, right


def main() -> None:
    import network

    parser = command_line(__doc__)
    parser.add_argument(
        "--only", action="append", choices=[made.name for made in CLUSTERS], metavar="CLUSTER"
    )
    parser.add_argument("--policy", type=policy_name, default="level")
    parser.add_argument("--rounds", type=count, default=30)
    parser.add_argument("--round-ms", type=float, default=150.0)
    options = parser.parse_args()
    reason = network.missing()
    largest: dict[str, float] = {}
    wrong: list[str] = []
    print(f"{'':24}{'predicted':>10}{'measured':>10}{'off':>9}   (ms a round)")
    for made in CLUSTERS:
        if options.only and made.name not in options.only:
            continue
        if made.rates and reason:
            print(f"\n{made.name}: left out, {reason}")
            continue
        largest[made.name], right = compare(made, options.policy, options.rounds, options.round_ms / 1e3)
        wrong += [] if right else [made.name]
    within = sum(off <= WITHIN for off in largest.values())
    print(
        f"\n{within} of {len(largest)} clusters within {WITHIN:.0%}; recommendations that were slower: {len(wrong)}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
