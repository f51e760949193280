"""The records of real runs do not contradict themselves, whatever the ranks do within and between the rounds."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.runs import Run, read
from paceline.torch import LocalSGD, Pace
from paceline.torch.callbacks import OnRound, Record
from support.commands import paceline
from support.ranks import run_ranks
from support.small_net import Samples, fresh

EXACT = 1e-9  # seconds, and relative: of sums in another order


def faults(run: Run) -> list[str]:
    """What contradicts itself in a record, by round; empty for a sound one."""
    found = []
    rows = zip(run.seconds, run.time, run.compute, run.overhead, run.wait, strict=True)
    before = 0.0
    for at, (seconds, end, compute, overhead, wait) in enumerate(rows):
        longest = np.nanmax(compute)
        found += [f"round {at}: {seconds=} {longest=}"] * bool(longest > seconds)
        found += [f"round {at}: {overhead=} {compute=}"] * bool(np.nanmax(overhead - compute) > EXACT)
        found += [f"round {at}: {wait=} {seconds=}"] * bool(np.nanmax(wait + compute) > seconds + EXACT)
        found += [f"round {at}: {end=} {before=}"] * bool(end < before)
        before = end
    if len(run.round) and run.seconds.sum() > 1.02 * run.time[-1] + 0.005 * len(run.round):
        found.append(f"{run.seconds.sum()} s of rounds in {run.time[-1]} s")
    return found


class Sleepy(torch.optim.SGD):
    """An optimizer whose steps take unequally long."""

    draws = random.Random(0)

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.draws.choice((0.0, 0.0, 0.002, 0.02)))
        return super().step(closure)


def hold_up(rank: int, ranks: int, place: str, loop: str, policy: str, seed: int) -> None:
    """A run with random pauses of each rank: in its passes, its steps, after them, and between the epochs."""
    draws = random.Random(seed * 100 + rank)
    Sleepy.draws = draws
    own, net = loop == "local", fresh(torch.float32)
    model = net if own else DistributedDataParallel(net)
    optimizer, criterion = Sleepy(model.parameters(), lr=0.01), nn.CrossEntropyLoss()

    def loss(x: torch.Tensor, y: torch.Tensor, _: Any) -> torch.Tensor:
        time.sleep(draws.uniform(0.0, 0.002) * len(x))
        return criterion(model(x), y)

    options: dict[str, Any] = {"every": "2"} if own else {"loop": loop}
    pace: Any = (LocalSGD if own else Pace)(model, 12, policy, callbacks=[Record(Path(place))], **options)
    with pace:
        loader = pace.loader(Samples(60, torch.float32), seed=1)
        for _ in range(4):
            for batch in loader:
                if loop == "round":
                    pace.round(batch, loss)
                else:
                    pace.backward(loss(*batch))
                pace.step(optimizer)
                time.sleep(draws.choice((0.0, 0.0, 0.01)))  # as for a message
            if rank == draws.randrange(ranks):  # as for an evaluation on one of the ranks
                time.sleep(0.03)


@pytest.mark.processes
def in_two_passes(rank: int, ranks: int, order: str, loop: str) -> tuple[list[float], list[float]]:
    """Each round's loss on record, and as ``loss_now`` gives it, of losses that are the sum of two forward passes."""
    model = DistributedDataParallel(fresh(torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[Any] = []
    with Pace(model, 12, "equal", loop=loop, callbacks=[OnRound(told.append)]) as pace:

        def half(x: torch.Tensor, y: torch.Tensor, _: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(model(x), y) / 2

        def second(*batch: Any) -> torch.Tensor:
            pace.weighted(half(*batch)).backward()
            return half(*batch)

        now = []
        for batch in pace.loader(Samples(60), seed=1):
            if loop == "round":
                pace.round(batch, second)
            elif order == "before":
                pace.backward(second(*batch))
            else:
                pace.backward(half(*batch))
                pace.weighted(half(*batch)).backward()
            now.append(pace.loss_now())
            pace.step(optimizer)
        pace.host.flush()
    return [result.loss for result in told], now


@pytest.mark.parametrize(("loop", "order"), [("whole", "before"), ("whole", "behind"), ("round", "before")])
def test_loss_on_record_is_that_of_all_forward_passes_of_a_round(loop: str, order: str) -> None:
    for recorded, now in run_ranks(2, in_two_passes, order, loop):
        assert recorded == pytest.approx(now, rel=1e-12)
        assert recorded[0] > 1.0  # near that of equal probabilities, of both passes


@pytest.mark.parametrize("loop", ["whole", "round", "local"])
@pytest.mark.parametrize("seed", [1, 2])
def test_record_of_ranks_with_random_pauses_is_consistent(tmp_path: Path, loop: str, seed: int) -> None:
    policy = "level" if loop == "local" or seed == 1 else "auto"
    run_ranks(3, hold_up, str(tmp_path / "run"), loop, policy, seed)
    run = read(tmp_path / "run")
    assert len(run.round) >= 8
    assert faults(run) == []


@pytest.mark.processes
def test_record_of_paceline_train_is_consistent(tmp_path: Path) -> None:
    out = tmp_path / "run"
    said = paceline("train", "--slowdown-ms", "0,0.1,0.2", "--workers", 3, "--steps", "40", "--out", out)
    assert said.status == 0, said.stderr
    run = read(out)
    assert len(run.round) == 40
    assert faults(run) == []
