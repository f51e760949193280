"""What the ranks of the tests of batch samplers run: loops over a DataLoader of the program's own."""

from __future__ import annotations

import multiprocessing
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from paceline.torch import Pace
from paceline.torch.callbacks import Callback
from paceline.torch.liveness.shutdown import end_with_parent
from support.scripted import Script
from support.torch_jobs import Samples, fresh, optimizer_of, reference

TWO = Script(((5, 2), (1, 6), (3, 3), (1, 9), (7, 0), (0, 1)))
COUNT, BATCH, STEPS = 83, 16, 14  # 6 rounds an epoch, the last one short; more than two epochs


class Epochs(Callback):
    """Notes the rounds and the ends of epochs."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_round(self, result: Any) -> None:
        self.told.append(result.step)

    def on_epoch(self, epoch: int) -> None:
        self.told.append(f"epoch {epoch}")


def loader_of(sampler: Any, data: Any, workers: int, **options: Any) -> DataLoader[Any]:
    start = {"worker_init_fn": end_with_parent, "multiprocessing_context": "fork"} if workers else {}
    return DataLoader(data, batch_sampler=sampler, num_workers=workers, **start, **options)


def compared(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    multiprocessing.set_forkserver_preload(["torch", "support.torch_jobs"])
    return [_compared(rank, **case) for case in cases]


def _compared(
    rank: int,
    workers: int = 0,
    ahead: int = 0,
    weigh: str = "loss",
    own_step: bool = False,
    policy: Any = TWO,
    resumed: int = 0,
    **loading: Any,
) -> dict[str, Any]:
    """The largest difference of a parameter from one process, the samples that this rank used in each round, the
    epochs that ``pace.epoch`` gave after each loop, and what the callbacks were told.

    own_step: the program steps its optimizer. resumed: a round after which a new Pace continues from the state."""
    model, data, told = fresh(torch.float64), Samples(COUNT), Epochs()
    ddp = DistributedDataParallel(model)
    optimizer, loss_of = optimizer_of(ddp), nn.CrossEntropyLoss()
    used: list[list[int]] = [[] for _ in range(STEPS)]
    epochs, saved, limits = list[Any](), list[int](), [(0, None)] * 2

    def made() -> tuple[Pace, Any]:
        pace = Pace(ddp, BATCH, policy, limits=limits, weigh=weigh, callbacks=[told])
        sampler = pace.batch_sampler(data, seed=5, ahead=ahead)
        return pace, loader_of(sampler, data, workers, **loading)

    pace, loader = made()
    while pace.rounds < STEPS:
        lasts = len(loader)
        for number, (x, y, index) in enumerate(loader, 1):
            if pace.counts:
                used[pace.rounds] += index.tolist()
            loss = loss_of(ddp(x), y)
            loss.backward() if weigh == "hook" else pace.backward(loss)
            if own_step:
                optimizer.step()
                optimizer.zero_grad()
            else:
                assert pace.step(optimizer)
                if pace.rounds in (STEPS, resumed):
                    break
            if own_step and number == lasts and pace.epoch == 2:
                break
        else:
            assert number == lasts
        epochs.append(pace.epoch)
        saved.append(pace.state_dict()["samples_done"] if not own_step or number == lasts else -1)
        if pace.rounds == resumed:
            state, resumed = pace.state_dict(), 0
            pace.host.detach()
            pace, loader = made()
            pace.load_state_dict(state)
        if own_step and pace.epoch > 1:
            break
    rounds = pace.rounds
    pace.host.detach()
    expected = reference(COUNT, BATCH, rounds, torch.float64)
    return {
        "difference": max(
            float((p.detach() - q).abs().max() / q.abs().max())
            for p, q in zip(model.parameters(), expected, strict=True)
        ),
        "used": used[:rounds],
        "epochs": epochs,
        "saved": saved,
        "told": told.told,
    }


def loads_after_slowing(rank: int, ranks: int, workers: int) -> list[list[int]]:
    """Under level, the loads of each round in which rank 1 takes three times as long for each sample."""
    import time

    ddp = DistributedDataParallel(fresh(torch.float32))
    optimizer, told, data = optimizer_of(ddp), list[list[int]](), Samples(16 * 40, torch.float32)

    class Loads(Callback):
        def on_round(self, result: Any) -> None:
            told.append(result.loads.tolist())

    with Pace(ddp, 16, "level", callbacks=[Loads()]) as pace:
        sampler = pace.batch_sampler(data, ahead=2 * workers)
        for x, y, _ in loader_of(sampler, data, workers):
            time.sleep((0.012 if rank else 0.004) * len(x))
            pace.backward(nn.functional.cross_entropy(ddp(x), y))
            pace.step(optimizer)
    return told
