"""How far does it scale? Up to 64 real gloo ranks that sleep for each sample, and thousands on the virtual clock.

    python benchmarks/scale.py [--ranks 4,8,16,32,64] [--policy level] [--steps 20] [--turns 1]
                               [--round-seconds 0.5] [--apart]
    python benchmarks/scale.py --virtual [--ranks 64,1000,10000] [--claim-us 60]

One rank in three is four times slower, and the speeds scatter in every round (log-normal, sd 0.3, or --scatter). For
each number of ranks, in the same processes: plain DDP split by hand for the mean speeds, "level" and "auto", all with
torch's own DataLoader over shuffled epochs of as many rounds. They take turns, --turns each, of --steps rounds behind
the first ten. Printed, as medians of the turns: the share of the bound; the processor time of a rank and a round
(user and system, of all its threads, without the sleeping) and its ratio to plain DDP's in the same turn; and under
"auto" the requests that a round makes of the one counter from which work is claimed, how long a rank waits for the
answer (median and 99 of 100), and what part of the round that is. Where there are many more ranks than processors,
they wait for processors more than for the counter. It is in memory that the ranks of one machine share; with --apart,
the ranks go by a store and connections, as those of several machines do.

With --virtual, "auto" plays the same speeds on the virtual clock with thousands of workers. Each claim is two
requests, which the store serves one after another in --claim-us each (as the median with few ranks says, or less).
The columns are the share of the bound under "level", which claims nothing, and under "auto" if requests take no time;
the store's requests in a round, the part of the round in which it is busy, and the share of the bound if a
claim waits as behind random others (M/D/1).
"""

from __future__ import annotations

import os
import tempfile
import time
from typing import Any

import numpy as np
import throughput
from scaffold import command_line, count, counts, forks, policy_name

WARM_UP, SCATTER = 10, 0.3
EPOCH_ROUNDS = 20


def speeds_of(ranks: int, steps: int, scatter: float = SCATTER) -> np.ndarray:
    """Milliseconds a sample, (steps, ranks)."""
    base = np.array([4.0 if rank % 3 == 2 else 1.0 for rank in range(ranks)])
    return base * np.exp(scatter * np.random.default_rng(1).standard_normal((steps, ranks)))


def as_it_is(batch: Any) -> Any:
    return batch


def rank_of(
    rank: int,
    ranks: int,
    directory: str,
    speeds: np.ndarray,
    batch: int,
    turns: list[str],
    apart: bool,
    pipe: Any,
) -> None:
    """Sends for each turn (seconds of the measured steps, processor seconds of each, seconds of each request)."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader

    from paceline.torch import Pace, Stall, leave, shared_memory
    from paceline.torch.counter import NearbyCounter, StoreCounter
    from paceline.torch.feed.pieces import Order

    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(directory, "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    inputs, labels = torch.randn(batch * EPOCH_ROUNDS, 20), torch.randint(10, (batch * EPOCH_ROUNDS,))
    loss_of, steps = nn.CrossEntropyLoss(), len(speeds)
    speed = 1 / speeds.mean(axis=0)
    loads = np.floor(batch * speed / speed.sum()).astype(int)
    loads[: batch - loads.sum()] += 1
    mine, own = int(loads[rank]), int(loads[:rank].sum())  # by hand: samples, and where they begin
    data: Any = throughput.Batched(inputs, labels)
    waits: list[float] = []

    def timing(ask: Any) -> Any:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            answer = ask(*arguments, **named)
            waits.append(time.perf_counter() - began)
            return answer

        return timed

    for kind in (StoreCounter, NearbyCounter):
        kind.add = timing(kind.add)  # type: ignore[method-assign]
    if apart:
        shared_memory.find = lambda *arguments, **named: None
    told = []
    for way in turns:
        ddp = DistributedDataParallel(nn.Linear(20, 10))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        pace: Pace | None = None
        if way != "plain DDP, by hand":
            pace = Pace(ddp, batch, way, loop="pieces", stall=Stall(patience=300))
            loader = pace.loader(data, collate_fn=as_it_is)
        began, ran, step, epochs = 0.0, 0.0, 0, Order(len(inputs))

        def mark() -> None:
            nonlocal began, ran
            waits.clear()
            began, ran = time.perf_counter(), time.process_time()

        dist.barrier()
        while pace is None and step < steps:
            order = epochs.epoch(step // EPOCH_ROUNDS).reshape(EPOCH_ROUNDS, batch)
            rounds = [each[own : own + mine].tolist() for each in order[: steps - step]]
            plain_loader: Any = DataLoader(data, batch_sampler=rounds, collate_fn=as_it_is)
            for x, y in plain_loader:
                if step == WARM_UP:
                    mark()
                time.sleep(speeds[step, rank] * mine / 1e3)
                (loss_of(ddp(x), y) * (ranks * mine / batch)).backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
        while pace is not None and pace.rounds < steps:
            for x, y in loader:
                if pace.rounds == WARM_UP and pace.host.first:
                    mark()
                time.sleep(speeds[pace.rounds, rank] * len(x) / 1e3)
                pace.backward(loss_of(ddp(x), y))
                pace.step(optimizer)
                if pace.rounds == steps:
                    break
        measured = steps - WARM_UP
        told.append((time.perf_counter() - began, (time.process_time() - ran) / measured, list(waits)))
        if pace is not None:
            pace.host.detach()
        ddp.reducer = None  # type: ignore[assignment]
    pipe.send((rank, told))
    dist.barrier()
    leave()
    os._exit(0)


def real(
    context: Any,
    ranks: int,
    ways: list[str],
    turns: int,
    steps: int,
    round_seconds: float,
    scatter: float,
    apart: bool,
) -> None:
    speeds = speeds_of(ranks, WARM_UP + steps, scatter)
    batch = round(round_seconds * (1e3 / speeds).sum(axis=1).mean())
    ideal = (batch / (1e3 / speeds).sum(axis=1))[WARM_UP:].sum()
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as directory:
        arguments = (ranks, directory, speeds, batch, ways * turns, apart, theirs)
        workers = [context.Process(target=rank_of, args=(rank, *arguments)) for rank in range(ranks)]
        for worker in workers:
            worker.start()
        told = {}
        for _ in workers:
            if not ours.poll(600):
                for worker in workers:
                    worker.kill()
                raise SystemExit("a rank has failed; see above")
            rank, figures = ours.recv()
            told[rank] = figures
        for worker in workers:
            worker.join()
    for number, way in enumerate(ways):
        seconds = np.array([each[0] for each in told[0][number :: len(ways)]])
        spent, plain = (
            np.mean([[each[1] for each in told[rank][first :: len(ways)]] for rank in told], axis=0)
            for first in (number, 0)
        )
        line = f"{ranks:5}  {way:20}{np.median(ideal / seconds):8.1%}{1e3 * np.median(seconds) / steps:10.0f}"
        line += f"{1e3 * np.median(spent):11.2f}{np.median(spent / plain):8.2f}"
        if waits := [1e3 * w for rank in told for each in told[rank][number :: len(ways)] for w in each[2]]:
            median, late = np.quantile(waits, [0.5, 0.99])
            part = sum(waits) / ranks / (1e3 * seconds.sum())
            line += f"{len(waits) / steps / turns:11.0f}{median:9.3f}{late:9.3f}{part:9.1%}"
        print(line, flush=True)


def virtual(ranks: int, claim_seconds: float, steps: int, round_seconds: float) -> None:
    import bound
    from bound import share_of_the_bound

    from paceline.simulate.pieces import PlayedRound
    from paceline.simulate.scenario import PIECE_SECONDS

    paces = speeds_of(ranks, bound.WARM_UP + steps)[:, None] / 1e3
    batch = round(round_seconds * (1 / paces).sum(axis=-1).mean())
    seen: list[PlayedRound] = []
    share = share_of_the_bound("auto", paces, batch, played=seen.append)
    took = float(np.mean([one.seconds.max() for one in seen]))
    requests = 2 * float(np.mean([one.pieces.sum() for one in seen]))
    busy = requests * claim_seconds / took
    if busy < 1:
        wait = 2 * claim_seconds * (1 + busy / (2 * (1 - busy)))
        with_store = share_of_the_bound("auto", paces, batch, PIECE_SECONDS + wait)
        told = f"{with_store:18.1%}"
    else:
        told = f"{share / busy:15.1%} at most"
    whole = share_of_the_bound("level", paces, batch)
    print(f"{ranks:6}{whole:10.1%}{share:20.1%}{requests:14.0f}{busy:12.0%}{told}", flush=True)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=counts, help="several with commas")
    parser.add_argument("--policy", type=policy_name, action="append")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=count, default=1)
    parser.add_argument("--round-seconds", type=float, default=0.5)
    parser.add_argument(
        "--scatter", type=float, help=f"of the speeds, by default {SCATTER}; 0: they stay the same"
    )
    parser.add_argument("--apart", action="store_true", help="as if each rank had a machine of its own")
    parser.add_argument("--virtual", action="store_true")
    parser.add_argument("--claim-us", type=float, default=60.0)
    options = parser.parse_args()
    scatter = SCATTER if options.scatter is None else options.scatter
    if options.virtual:
        heads = f"{'ranks':>6}{'level':>10}{'store without time':>20}{'requests':>14}"
        print(f"{heads}{'it is busy':>12}{'of the bound':>18}")
        for ranks in options.ranks or [64, 1000, 10000]:
            virtual(ranks, options.claim_us / 1e6, options.steps, options.round_seconds)
        return
    context = forks("throughput")
    ways = ["plain DDP, by hand", *(options.policy or ["level", "auto"])]
    print(
        f"{'ranks':>5}  {'':20}{'of bound':>8}{'ms a step':>10}{'processor':>11}{'ratio':>8}"
        f"{'requests':>11}{'ms':>9}{'99 %':>9}{'of round':>9}"
    )
    for ranks in options.ranks or [4, 8, 16, 32, 64]:
        real(
            *(context, ranks, ways, options.turns, options.steps, options.round_seconds),
            *(scatter, options.apart),
        )


if __name__ == "__main__":
    main()
