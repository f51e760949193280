"""How near does a division by cost come to one by hand, when samples cost differently and rounds are short?

    python benchmarks/uneven.py [--workers 3] [--round-ms 50] [--samples 48] [--rounds 200] [--policy auto]

Real gloo ranks that sleep: one in three is four times slower than the others, and a sample's seconds are its length
(lognormal, sd 1, at least a 64th of the longest) times the rank's pace. Each way takes the same rounds of the same
samples in the same processes, one way after the other, and the table gives the rounds after the warm-up:

- by count: plain DDP, with equal numbers of samples.
- by hand: plain DDP, where each round's samples are given out beforehand, the longest first, each to the rank that
  then ends soonest (the rule of longest processing time) by the true lengths and the true paces.
- Paceline: told the lengths with ``cost=``, and neither the paces nor the seconds of a sample.

The bound is the round's length divided by the sum of the speeds. --policy may be repeated. A minute as it stands.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import numpy as np
from scaffold import command_line, count, forks, join, policy_name

WARM_UP, SEED, EPOCH = 40, 5, 20  # rounds of an epoch
BY_COUNT, BY_HAND = "plain DDP, by count", "plain DDP, by hand"


def paces(workers: int) -> np.ndarray:
    """Seconds of each rank for the same work, the quickest 1."""
    return np.array([4.0 if worker % 3 == 2 else 1.0 for worker in range(workers)])


def lengths(samples: int) -> np.ndarray:
    drawn = np.random.default_rng(SEED).lognormal(0.0, 1.0, samples)
    return np.clip(drawn, drawn.max() / 64, None)


def by_hand(costs: np.ndarray, pace: np.ndarray) -> list[np.ndarray]:
    """The samples of each rank: the longest first, each to the rank that then ends soonest."""
    ends, mine = np.zeros(len(pace)), [list[int]() for _ in pace]
    for sample in np.argsort(-costs, kind="stable").tolist():
        rank = int(np.argmin(ends + costs[sample] * pace))
        ends[rank] += costs[sample] * pace[rank]
        mine[rank].append(sample)
    return [np.array(each, int) for each in mine]


class Texts:
    """A data set of numbers: item i is the seconds that sample i takes on the quickest rank."""

    def __init__(self, seconds: np.ndarray) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.seconds)

    def __getitems__(self, indices: list[int]) -> Any:
        import torch

        return torch.as_tensor(self.seconds[indices])


def rank_of(
    rank: int,
    ranks: int,
    directory: str,
    batch: int,
    seconds: np.ndarray,
    rounds: int,
    ways: list[str],
    pipe: Any,
) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import Pace, leave
    from paceline.torch.feed.pieces import Order

    join(rank, ranks, directory)
    torch.manual_seed(0)
    pace_of, order = paces(ranks), Order(len(seconds), SEED)
    parts: dict[tuple[int, int], list[np.ndarray]] = {}
    for epoch in range(-(-rounds // EPOCH)):
        drawn = order.epoch(epoch)
        for number in range(EPOCH):
            own = drawn[number * batch :][:batch]
            parts[epoch, number] = [own[each] for each in by_hand(seconds[own], pace_of)]

    def loss_of(model: Any, each: torch.Tensor) -> torch.Tensor:
        time.sleep(float(each.sum()) * pace_of[rank])
        return model(torch.ones(max(len(each), 1), 8)).square().mean()

    for way in ways:
        ddp = DistributedDataParallel(nn.Linear(8, 1))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        stamps: list[float] = []
        dist.barrier()
        if way in (BY_COUNT, BY_HAND):
            for number in range(rounds):
                stamps.append(time.perf_counter())
                epoch, place = divmod(number, EPOCH)
                if way == BY_HAND:
                    mine = parts[epoch, place][rank]
                else:
                    mine = order.epoch(epoch)[place * batch :][:batch][rank::ranks]
                (loss_of(ddp, torch.as_tensor(seconds[mine])) * (ranks * len(mine) / batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            pace = Pace(ddp, batch, way, loop="round")
            loader = pace.loader(Texts(seconds), seed=SEED, cost=seconds, collate_fn=lambda each: each)
            while pace.rounds < rounds:
                for each in loader:
                    stamps.append(time.perf_counter())
                    pace.round(each, lambda piece: loss_of(ddp, piece))  # noqa: B023  # at once
                    pace.step(optimizer)
                    if pace.rounds == rounds:
                        break
            pace.host.detach()
        stamps.append(time.perf_counter())
        if rank == 0:
            pipe.send((way, np.diff(stamps)))
        ddp.reducer = None  # type: ignore[assignment]
    leave()
    os._exit(0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=count, default=3)
    parser.add_argument("--round-ms", type=float, default=50.0, help="of the bound, on average")
    parser.add_argument("--samples", type=count, default=48, help="of a round")
    parser.add_argument("--rounds", type=count, default=200)
    parser.add_argument("--policy", type=policy_name, action="append")
    options = parser.parse_args()
    if options.rounds <= WARM_UP:
        parser.error(f"--rounds {options.rounds}: expected more than the {WARM_UP} that warm up")
    workers, batch, ways = options.workers, options.samples, [BY_COUNT, BY_HAND]
    ways += options.policy or ["level", "auto"]
    speed = (1 / paces(workers)).sum()
    seconds = lengths(batch * EPOCH)
    seconds *= options.round_ms / 1e3 * speed * EPOCH / seconds.sum()

    from paceline.torch.feed.pieces import Order

    order = Order(len(seconds), SEED)
    epochs = [seconds[order.epoch(epoch)] for epoch in range(-(-options.rounds // EPOCH))]
    bound = np.concatenate(epochs).reshape(-1, batch).sum(1)[WARM_UP : options.rounds].sum() / speed
    results: dict[str, np.ndarray] = {}
    context = forks()
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        given = workers, directory, batch, seconds, options.rounds, ways, theirs
        ranks = [context.Process(target=rank_of, args=(rank, *given)) for rank in range(workers)]
        for each in ranks:
            each.start()
        while len(results) < len(ways):
            if not ours.poll(300):
                raise SystemExit("a rank has failed; see above")
            way, took = ours.recv()
            results[way] = took
            print(f"{len(results)} of {len(ways)} ways: {way} took {took.sum():.0f} s", file=sys.stderr)
        for each in ranks:
            each.join()
    hand = results[BY_HAND][WARM_UP:].sum()
    print(f"{workers} sleeping workers, {batch} samples a round, {options.rounds - WARM_UP} rounds measured")
    print(f"{'':22}{'ms a round':>11}{'of the bound':>14}{'of by hand':>12}")
    for way in ways:
        took = results[way][WARM_UP:].sum()
        each = 1e3 * took / (options.rounds - WARM_UP)
        print(f"{way:22}{each:11.1f}{bound / took:14.1%}{hand / took:12.1%}")


if __name__ == "__main__":
    main()
