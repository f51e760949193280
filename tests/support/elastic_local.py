"""Ranks of ``ElasticLocalSGD`` that tell of each step, and the same steps played by one process."""

from __future__ import annotations

import itertools
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.torch import ElasticLocalSGD, Merge
from paceline.torch.elastic.messages import Where
from support import elastic_runs
from support.elastic_phases import Orders
from support.elastic_runs import Told

RATE = 0.05


def survive(where: Where, out: Path, rounds: int, options: dict[str, Any]) -> None:
    """A rank's life in a run that goes on without lost ranks: tells of each of its steps before it is taken."""
    with elastic_runs.telling(where, out) as say:
        orders = Orders(out, where.ident, say)
        orders.watch()
        orders.at("start")
        nap = options.get("nap", 1e-4) * options.get("slow", [1, 3, 1, 1])[where.place]
        model = elastic_runs.network(where.ident, options.get("norm", False))
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        pace = ElasticLocalSGD(
            model,
            elastic_runs.BATCH,
            options.get("policy", "level"),
            every=options.get("every", 3),
            merge=options.get("merge", Merge()),
            callbacks=[elastic_runs.Telling(say, lambda done: {"batch": done.batch})],
        )
        signal.signal(signal.SIGTERM, lambda *_: pace.leave())
        with pace:
            data = IndexedRows(elastic_runs.SAMPLES)
            costs = {"cost": elastic_runs.lengths(len(data)), "padded": False} if options.get("costs") else {}
            loader = pace.loader(data, seed=3, **costs)
            pace.register(optimizer)
            say(kind="joined", at=time.time(), rounds=pace.rounds)
            last = rounds
            while pace.rounds < last:
                for x, y, index in loader:
                    orders.at("piece")
                    time.sleep(nap * len(x))
                    pace.backward((model(x) - y).square().mean())
                    interval = pace.rounds
                    if pace.counts:
                        say(kind="took", interval=interval, epoch=pace.epoch, index=index.tolist())
                    pace.step(optimizer)
                    orders.at("step")
                    if pace.merged:
                        say(kind="merged", interval=interval)
                        if last > 10**6 and (out / "last").exists():
                            last = int((out / "last").read_text())
                        if pace.rounds >= last:
                            break
            pace._loop.settle()
            state = {name: value.tolist() for name, value in model.state_dict().items()}
            parameters = nn.utils.parameters_to_vector(model.parameters()).tolist()
            say(kind="end", rounds=pace.rounds, state=state, parameters=parameters)


class IndexedRows(elastic_runs.Rows):
    """Rows that know their own index."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, Any]:
        return self.x[index], self.y[index], index


def counted(told: Told) -> list[tuple[int, dict[int, list[list[int]]]]]:
    """Epoch and the steps that counted in each interval, by worker: those of all that merged it, and of workers
    that were lost behind its sums, without whose samples the interval would not be whole."""
    took: dict[int, dict[int, list[Any]]] = {}
    epochs: dict[int, int] = {}
    for who, line in told.of("took"):
        took.setdefault(line["interval"], {}).setdefault(who, []).append(line["index"])
        epochs[line["interval"]] = line["epoch"]
    merged = {(line["interval"], who) for who, line in told.of("merged")}
    batches = {line["step"]: line["batch"] for _, line in told.of("round")}
    found = []
    for interval, by in sorted(took.items()):
        sure = {who: steps for who, steps in by.items() if (interval, who) in merged}
        if not sure:
            continue
        have = {index for steps in sure.values() for step in steps for index in step}
        missing = batches.get(interval, len(have)) - len(have)
        others = [who for who in by if who not in sure]
        for some in itertools.chain.from_iterable(
            itertools.combinations(others, many) for many in range(1, len(others) + 1)
        ):
            own = [index for who in some for step in by[who] for index in step]
            if missing and len(own) == len({*own} - have) == missing:
                sure, missing = {**sure, **{who: by[who] for who in some}}, 0
        assert not missing, (interval, missing)
        found.append((epochs[interval], sure))
    return found


def played(intervals: list[tuple[int, dict[int, list[list[int]]]]]) -> torch.Tensor:
    """The parameters of one process that plays these steps and merges them by their samples."""
    data, model = elastic_runs.Rows(elastic_runs.SAMPLES), elastic_runs.network()
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _, by in intervals:
        total, mean = 0, torch.zeros_like(start)
        for steps in by.values():
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
            for index in map(torch.tensor, steps):
                optimizer.zero_grad()
                (model(data.x[index]) - data.y[index]).square().mean().backward()
                optimizer.step()
            many = sum(map(len, steps))
            mean += many * nn.utils.parameters_to_vector(model.parameters()).detach()
            total += many
        start = mean / total
    return start
