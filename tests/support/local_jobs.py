"""What ranks do that step by themselves between merges, and the same replayed by one process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch import Merge, Pace
from paceline.torch.feed.pieces import Order
from paceline.torch.progress import batches
from support.scripted import Script
from support.torch_jobs import CLASSES, Samples, fresh

# With steps of B / 3 samples, each of these loads is one step.
SINGLE = Script(((4, 3, 5), (4, 4, 4), (2, 5, 5), (3, 4, 5), (5, 4, 3)))
COUNT, BATCH = 83, 12


class Normed(nn.Module):
    """A model with statistics, a counter, a mask that holds infinities, a parameter that is not trained and one that
    is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm = fresh(torch.float64), nn.BatchNorm1d(CLASSES).double()
        self.still = nn.Parameter(torch.ones(CLASSES, dtype=torch.float64), requires_grad=False)
        self.twice = self.net.second.bias
        self.register_buffer("mask", torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.net(x)) * self.still + self.twice + self.mask.exp()


def made(case: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = Normed() if case.get("norm") else fresh(getattr(torch, case.get("dtype", "float64")))
    if case.get("adam"):
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.1, momentum=case.get("momentum", 0.0))


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, tokens: torch.Tensor | None) -> torch.Tensor:
    each = nn.functional.cross_entropy(model(x), y, reduction="none")
    return each.mean() if tokens is None else (each * tokens).sum() / max(float(tokens.sum()), 1.0)


def tokens_of(index: torch.Tensor) -> torch.Tensor:
    """How many tokens a sample has; some have none."""
    return (index * 7 % 5).double()


def trained(rank: int, ranks: int, cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one(rank, **case) for case in cases]


def one(
    rank: int,
    *,
    epochs: int = 2,
    count: int = COUNT,
    jitter: float = 0.0,
    loader_workers: int = 0,
    counted: bool = False,
    clip: float = 0.0,
    scaled: bool = False,
    cost: bool = False,
    reduction: str = "mean",
    norm: bool = False,
    adam: bool = False,
    momentum: float = 0.0,
    dtype: str = "float64",
    **options: Any,
) -> dict[str, Any]:
    """A run; ``steps``: of each step of this rank its interval, its samples and whether it counted."""
    model, optimizer = made({"norm": norm, "adam": adam, "momentum": momentum, "dtype": dtype})
    if rank:  # which takes rank 0's over
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.add_(1)
    pace = Pace(model, BATCH, options.pop("policy", "level"), loop="local", **options)
    data = Samples(count, getattr(torch, dtype))
    costs = {"cost": 1.0 + np.arange(count) % 9, "padded": False} if cost else {}
    loader = pace.loader(data, seed=5, num_workers=loader_workers, **costs)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    stalls, steps, losses, merges = random.Random(rank), list[Any](), list[float](), 0
    for _ in range(epochs):
        for x, y, index in loader:
            time.sleep(jitter * stalls.expovariate(1.0) * (1 + 3 * (rank == 1)))
            tokens = tokens_of(index) if counted else None
            loss = loss_of(model, x, y, tokens)
            if reduction == "sum":
                loss = loss * len(x)
            pace.backward(loss, reduction, scaler, count=None if tokens is None else tokens.sum())
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            step, counts = pace.rounds, pace.counts
            stepped = pace.step(optimizer, scaler)
            steps.append((step, index.tolist() if counts else [], stepped))
            losses.append(float(loss.detach()))
            merges += pace.merged
            assert pace.merged == (pace.rounds == step + 1)
            assert all(p.grad is None for p in model.parameters())
        pace.settle()
    rounds, last = pace.rounds, pace.loss
    assert merges == rounds
    pace.detach()
    return {
        "steps": steps,
        "losses": losses,
        "loss": last,
        "rounds": rounds,
        "state": {name: value.tolist() for name, value in model.state_dict().items()},
        "most": int(pace.terms.micro_batch or 0),
    }


def replayed(runs: list[dict[str, Any]], **case: Any) -> dict[str, torch.Tensor]:
    """What the model comes to if one process plays what each rank did, interval by interval."""
    merge = case.get("merge") or Merge()
    model, _ = made(case)
    data = Samples(case.get("count", COUNT), getattr(torch, case.get("dtype", "float64")))
    models, optimizers = zip(*(made(case) for _ in runs), strict=True)
    velocity: dict[str, torch.Tensor] = {}
    state = {name: value.clone() for name, value in model.state_dict().items()}
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    for interval in range(runs[0]["rounds"]):
        weights = []
        for run, own, optimizer in zip(runs, models, optimizers, strict=True):
            own.load_state_dict(state)
            weight, taken = 0.0, 0
            for _, index, _ in [step for step in run["steps"] if step[0] == interval]:
                if not index:
                    continue
                index = torch.tensor(index)
                tokens = tokens_of(index) if case.get("counted") else None
                many = len(index) if tokens is None else float(tokens.sum())
                loss_of(own, data.x[index], data.y[index], tokens).backward()
                if case.get("clip"):
                    nn.utils.clip_grad_norm_(own.parameters(), case["clip"])
                if many:
                    optimizer.step()
                    taken += 1
                optimizer.zero_grad()
                weight += many
            weights.append({"samples": weight, "steps": taken, "ranks": float(taken > 0)}[merge.by])
        total = sum(weights)
        for name, before in state.items():
            each = [own.state_dict()[name] for own in models]
            if not before.is_floating_point():
                state[name] = torch.stack([e for e, w in zip(each, weights, strict=True) if w]).amax(0)
                continue
            mean = sum(w / total * e.nan_to_num(neginf=-9) for w, e in zip(weights, each, strict=True))
            if merge.outer == "mean" or name not in trained:
                state[name] = torch.where(before.isinf(), before, mean)
                continue
            change = (
                before - mean
            )  # Nesterov's momentum, as Sutskever et al. have it (ICML 2013), by its own formula
            velocity[name] = 0.9 * velocity.get(name, torch.zeros_like(change)) + change
            state[name] = before - 0.7 * (change + 0.9 * velocity[name])
    return state


def together(steps: int, count: int, momentum: float, adam: bool = False) -> dict[str, torch.Tensor]:
    """What one process comes to that takes so many whole batches."""
    model, optimizer = made({"momentum": momentum, "adam": adam})
    data, order, done, epoch = Samples(count), Order(count, 5), 0, 0
    while done < steps:
        indices = order.epoch(epoch)
        for first, size in batches(count, 0, BATCH):
            chosen = torch.from_numpy(indices[first : first + size])
            loss_of(model, data.x[chosen], data.y[chosen], None).backward()
            optimizer.step()
            optimizer.zero_grad()
            done += 1
        epoch += 1
    return model.state_dict()


def refused(
    rank: int, ranks: int, cases: list[tuple[dict[str, Any], Callable[..., Any] | None]]
) -> list[str]:
    """The sentence by which each case is refused."""
    found = []
    for options, wrong in cases:
        model = fresh(torch.float64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given = {"every": 2, **options}
        try:
            pace = Pace(model, BATCH, "level", loop="local", **given)
            for x, y, _ in pace.loader(Samples(COUNT), seed=5):
                assert wrong is not None
                wrong(pace, model, optimizer, nn.functional.cross_entropy(model(x), y))
        except PacelineError as error:
            found.append(str(error))
        else:
            found.append("")
        pace.detach()
    return found
