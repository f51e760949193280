"""What does it gain to divide rounds by what their samples cost? Real computation, nothing sleeps.

    python benchmarks/samples.py [--rounds 24] [--warm 8] [--batch 32] [--only paceline] [--json FILE]

Two ranks, each pinned to a core, train a GPT-2 of two layers on texts of lognormal(5, 1) tokens, cut to 16..1024, in
batches that are filled up to their longest text. Once both cores are free; once three processes share the second one,
which is left a quarter of its speed. Each way runs the same rounds of the same samples in the same processes, one way
after the other, but for group_by_length, which chooses its batches by length. Tokens per second are real tokens only,
after the warm-up.

Ways: plain DDP with a random half for each rank; transformers' LengthGroupedSampler; its BatchRebalanceSampler with
one micro-batch a step and with four; a Karmarkar-Karp split by L + 0.001 L^2, in one batch and in micro-batches of a
budget of tokens; Paceline, which is told the lengths and nothing else. All compute the mean over the round's tokens,
and the losses of those that run the same rounds are compared with plain DDP's.

The cores must be free: what else runs there is measured, too. About 4 minutes as it stands.
"""

from __future__ import annotations

import heapq
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scaffold import command_line
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler

from paceline.torch import Pace
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order

RANKS, SEED, WORDS, LONGEST = 2, 3, 256, 1024
IGNORED = -100
NEIGHBOURS = 3
WAYS = (
    "plain DDP, random halves",
    "group_by_length",
    "batch_rebalance, 1 micro-batch",
    "batch_rebalance, 4 micro-batches",
    "Karmarkar-Karp, 1 micro-batch",
    "Karmarkar-Karp, token budget",
    "paceline",
)
OWN_ROUNDS = ("group_by_length",)
Rounds = Iterator[list[list[int]]]  # of one rank: the micro-batches of each round, as indices


class Texts(torch.utils.data.Dataset[torch.Tensor]):
    """Random words, of unlike lengths."""

    def __init__(self, count: int) -> None:
        drawn = np.random.default_rng(SEED).lognormal(5.0, 1.0, count)
        self.lengths = np.clip(drawn, 16, LONGEST).astype(int)
        draw = torch.Generator().manual_seed(SEED)
        self.words = [torch.randint(WORDS, (length,), generator=draw) for length in self.lengths.tolist()]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.words[index]


def filled(texts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and labels, filled up to the longest text."""
    words = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = nn.utils.rnn.pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return words, labels


def karmarkar_karp(costs: list[float], parts: int) -> list[list[int]]:
    """The largest differencing method: places of ``costs`` in so many parts of nearly equal sums."""
    heap: list[tuple[float, int, list[tuple[float, list[int]]]]] = []
    for place, cost in enumerate(costs):
        piles = [(cost, [place])] + [(0.0, [])] * (parts - 1)
        heapq.heappush(heap, (-cost, place, piles))
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        piles = [
            (a + b, [*mine, *theirs])
            for (a, mine), (b, theirs) in zip(one, sorted(other, key=lambda pile: pile[0]), strict=True)
        ]
        piles.sort(key=lambda pile: -pile[0])
        heapq.heappush(heap, (piles[-1][0] - piles[0][0], number, piles))
    return [places for _, places in heap[0][2]]


def within(indices: list[int], lengths: Any, budget: float) -> list[list[int]]:
    """Micro-batches of the sorted texts, each of at most so many tokens with its padding."""
    batches: list[list[int]] = []
    for index in sorted(indices, key=lambda i: -lengths[i]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= budget:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def rounds_of(way: str, rank: int, texts: Texts, batch: int) -> Rounds:
    """This rank's micro-batches under a way that takes all ranks to be equal."""
    lengths, each = texts.lengths, batch // RANKS
    if way == "group_by_length":
        draw = torch.Generator().manual_seed(SEED)
        chosen = list(LengthGroupedSampler(each, lengths=lengths.tolist(), generator=draw))
        for start in range(0, len(chosen), batch):
            yield [chosen[start + rank * each : start + (rank + 1) * each]]
        return
    order = Order(len(texts), SEED).epoch(0)
    if way.startswith("batch_rebalance"):
        several = int(way.split()[1])
        sampler = BatchRebalanceSampler(
            lengths[order].tolist(), batch, RANKS, several, shuffle=False, rank=rank
        )
        batches = [order[mine].tolist() for mine in sampler]
        for start in range(0, len(batches), several):
            yield batches[start : start + several]
        return
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch].tolist()
        if way.startswith("plain"):
            yield [chosen[rank * each : (rank + 1) * each]]
            continue
        costs = [float(lengths[i] + 1e-3 * lengths[i] ** 2) for i in chosen]
        mine = [chosen[place] for place in karmarkar_karp(costs, RANKS)[rank]]
        yield [mine] if "1 micro" in way else within(mine, lengths, 4 * LONGEST)


def loss_of(model: Any, words: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = model(input_ids=words).logits[:, :-1]
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def fresh() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(SEED)
    none: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    none |= {"bos_token_id": None, "eos_token_id": None}
    config = GPT2Config(vocab_size=WORDS, n_positions=LONGEST, n_embd=64, n_layer=2, n_head=4, **none)
    ddp = DistributedDataParallel(GPT2LMHeadModel(config))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)


def by_hand(way: str, rank: int, texts: Texts, batch: int) -> tuple[list[float], list[float]]:
    """When each round ended, and its loss, in a plain loop."""
    ddp, optimizer = fresh()
    ends, losses, order = [], [], Order(len(texts), SEED).epoch(0)
    for number, batches in enumerate(rounds_of(way, rank, texts, batch)):
        tokens = int(sum(texts.lengths[i] - 1 for mine in batches for i in mine))
        if way in OWN_ROUNDS:
            both = torch.tensor([float(tokens)])
            dist.all_reduce(both)
            total = both.item()
        else:
            total = float((texts.lengths[order[number * batch : (number + 1) * batch]] - 1).sum())
        told = torch.zeros(())
        for place, mine in enumerate(batches):
            last = place == len(batches) - 1
            with nullcontext() if last else ddp.no_sync():
                loss = loss_of(ddp, *filled([texts[i] for i in mine]), "sum") / total
                (loss * RANKS).backward()
                told += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(told)
        ends.append(time.perf_counter())
        losses.append(float(told))
    return ends, losses


def by_paceline(texts: Texts, batch: int) -> tuple[list[float], list[float], list[Any]]:
    """The same with Paceline, and its rounds."""
    ddp, optimizer = fresh()
    ends: list[float] = []
    results: list[Any] = []
    pace = Pace(ddp, batch, "level", loop="round", callbacks=[OnRound(results.append)])
    loader = pace.loader(texts, seed=SEED, cost=texts.lengths, collate_fn=filled)
    for part in loader:
        pace.round(
            part, lambda words, labels: (loss_of(ddp, words, labels, "mean"), labels.ne(IGNORED).sum())
        )
        pace.step(optimizer)
        ends.append(time.perf_counter())
    pace.host.flush()
    pace.host.detach()
    return ends, [result.loss for result in results], results


def measure(rank: int, way: str, rounds: int, warm: int, batch: int) -> dict[str, Any]:
    texts = Texts(rounds * batch)
    dist.barrier()
    if way == "paceline":
        ends, losses, results = by_paceline(texts, batch)
        loads = [result.loads.tolist() for result in results[warm:]]
        model = [round(float(x), 4) for x in np.mean([r.compute for r in results[warm:]], axis=0)]
    else:
        (ends, losses), loads, model = by_hand(way, rank, texts, batch), [], []
    dist.barrier()
    if way in OWN_ROUNDS:
        mine = list(rounds_of(way, rank, texts, batch))[warm:]
        own = torch.tensor([float(sum(texts.lengths[i] for parts in mine for part in parts for i in part))])
        dist.all_reduce(own)
        tokens = own.item()
    else:
        tokens = float(texts.lengths[Order(len(texts), SEED).epoch(0)[warm * batch :]].sum())
    seconds = ends[-1] - ends[warm - 1]
    return {
        "way": way,
        "tokens_per_second": tokens / seconds,
        "losses": losses,
        "loads": loads,
        "compute": model,
    }


def rank_main(rank: int, directory: str, pipe: Any, ways: list[str], options: dict[str, int]) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for neighbour in (False, True):
        # They inherit the rank's core; in sessions of their own, each of them counts as much as the rank does. They
        # end with the rank, however that ends.
        counts = f"import os\nwhile os.getppid() == {os.getpid()}: sum(range(100_000))"
        counting = [sys.executable, "-c", counts]
        several = NEIGHBOURS if neighbour and rank == 1 else 0
        busy = [subprocess.Popen(counting, start_new_session=True) for _ in range(several)]
        for way in ways:
            found = measure(rank, way, **options)
            if rank == 0:
                pipe.send({"neighbour": neighbour} | found)
        dist.barrier()
        for each in busy:
            each.kill()
            each.wait()
    pipe.close()
    os._exit(0)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--warm", type=int, default=8)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--only", action="append", help="ways to run; plain DDP always is")
    parser.add_argument("--json", help="write what was found into this file")
    given = parser.parse_args()
    ways = [
        way for way in WAYS if not given.only or way == WAYS[0] or any(name in way for name in given.only)
    ]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("spawn")
    options = {"rounds": given.rounds, "warm": given.warm, "batch": given.batch}
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        ours, theirs = context.Pipe(duplex=False)
        ranks = [
            context.Process(target=rank_main, args=(rank, directory, theirs, ways, options))
            for rank in range(RANKS)
        ]
        for each in ranks:
            each.start()
        theirs.close()
        try:
            for number in range(2 * len(ways)):
                if not number % len(ways):
                    print(f"{NEIGHBOURS} neighbours on one core" if number else "Both cores free", flush=True)
                row = ours.recv()
                found.append(row)
                plain = next(r for r in found if r["neighbour"] == row["neighbour"])
                far = max(abs(a / b - 1) for a, b in zip(row["losses"], plain["losses"], strict=True))
                same = "" if row["way"] in OWN_ROUNDS else f"  losses within {far:.0e} of plain DDP's"
                rate = row["tokens_per_second"]
                times = rate / plain["tokens_per_second"]
                print(f"  {row['way']:34}{rate:9.0f} tokens/s  {times:5.2f}x{same}", flush=True)
        finally:
            for each in ranks:
                each.join(5)
                if each.is_alive():
                    each.kill()
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(found, file)


if __name__ == "__main__":
    main()
