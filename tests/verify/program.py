"""A training program in many forms: some are exact, and each of the others is wrong in a way of its own.

torchrun --standalone --nproc-per-node 2 tests/verify/program.py FORM
"""

from __future__ import annotations

import itertools
import random
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

import paceline.torch

FORM = sys.argv[1]
SAMPLES, FEATURES, KINDS, BATCH = 120, 8, 3, 24
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(SAMPLES, FEATURES, generator=GENERATOR)
Y = torch.randint(KINDS, (SAMPLES,), generator=GENERATOR)


class Augmented(Dataset):  # type: ignore[type-arg]
    """Samples with noise from torch's generator, and from one of Python's that the data set owns."""

    def __init__(self) -> None:
        self.own = random.Random(5)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[index] + 0.1 * torch.randn(FEATURES) + self.own.random(), Y[index]


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Every second sample, another half on each rank."""

    def __iter__(self) -> Any:
        own = range(dist.get_rank(), SAMPLES, dist.get_world_size())
        return iter([(X[index], Y[index]) for index in own])


class Injected(torch.autograd.Function):
    """Adds a gradient of an auxiliary loss, whatever the loss is."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, torch.tensor(0.5)


class Teacher(nn.Linear):
    """An average that the loop itself moves, in each micro-step."""


class Generator(nn.Linear):
    """A second model that no Pace gets."""


class Net(nn.Module):
    """A network with the layers that a form needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 16), nn.Linear(16, KINDS)
        self.head = nn.Linear(16, KINDS)
        self.drop = nn.Dropout(0.5 if FORM in ("draws", "round", "pieces", "square") else 0.0)
        self.norm = nn.BatchNorm1d(16) if FORM == "norm" else nn.Identity()
        self.memory = nn.LSTM(1, 4, 2, dropout=0.5) if FORM == "recurrent" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.memory is not None:
            x = x + self.memory(x.T[..., None])[0].mean(2).T
        hidden = torch.relu(self.norm(self.first(x)))
        if FORM == "square":  # time first, with as many instants as samples
            hidden = self.drop(hidden.expand(BATCH // 2, *hidden.shape)).mean(0)
        else:
            hidden = self.drop(hidden)
        out = self.last(hidden)
        if FORM == "injected":
            return Injected.apply(out, self.head(hidden).pow(2).mean())
        if FORM == "absent" and len(x) != 12:
            out = out + self.head(hidden)
        return out


def loss_of(ddp: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    ranks = dist.get_world_size()
    if FORM in ("draws", "round", "pieces"):
        x = x + torch.randn_like(x) * torch.rand(len(x))[:, None]
    if FORM == "coin" and random.random() < 0.5:
        x = x.flip(1)
    out = ddp(x)
    if FORM == "statistic":
        product = out.T @ out / BATCH
        dist.all_reduce(product)
        return ((product - torch.eye(KINDS)) ** 2).sum()
    if FORM == "normalised":
        total = torch.tensor(float(len(y)))
        dist.all_reduce(total)
        return F.cross_entropy(out, y, reduction="sum") / (total / ranks)
    if FORM == "compared":
        return F.cross_entropy(out @ out.T, torch.arange(len(y)))
    return F.cross_entropy(out, y, reduction="sum" if FORM == "sum" else "mean")


def unported() -> None:
    """The program before its port: its loader draws each rank's part, and the gradients are averaged."""
    paceline.torch.join("gloo")
    data = Augmented()
    loader = DataLoader(data, BATCH // dist.get_world_size(), sampler=DistributedSampler(data))
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            loss_of(ddp, x, y).backward()
            optimizer.step()
            scheduler.step()


def main() -> None:
    paceline.torch.join("gloo")
    torch.manual_seed(0)
    options: dict[str, Any] = {"round": {"loop": "round", "micro_batch": 4, "policy": "level"}}.get(FORM, {})
    if FORM in ("pieces", "average"):
        options = {"loop": "pieces", "micro_batch": 4, "policy": "level"}
    if FORM == "injected":
        options = {"weigh": "loss"}
    ddp = DistributedDataParallel(Net(), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scaler = torch.amp.GradScaler("cpu") if FORM == "scaler" else None
    teacher = Teacher(2, 2) if FORM == "average" else None
    if FORM == "unseeded":
        torch.seed()
        broadcast = [Generator(FEATURES, FEATURES).state_dict()]
        dist.broadcast_object_list(broadcast)
        torch.manual_seed(0)
    second = Generator(FEATURES, FEATURES) if FORM == "unseeded" else None
    if second is not None:
        second.load_state_dict(broadcast[0])
    center = torch.zeros(FEATURES)
    if FORM == "broken" and dist.get_rank() == 1:
        raise RuntimeError("the data are not there")
    pace = paceline.torch.Pace(ddp, BATCH, **options)
    loader: Any = pace.loader(Augmented(), num_workers=2 if FORM == "draws" else 0)
    if FORM == "sampler":
        data = Augmented()
        loader = DataLoader(data, batch_sampler=pace.batch_sampler(data, ahead=2), num_workers=1)
    if FORM == "stream":
        loader = pace.stream(Stream(), num_workers=1)
    if FORM == "short":
        loader = itertools.islice(loader, 2)
    for _ in range(2):
        for batch in loader:
            if FORM == "round":
                pace.round(batch, lambda x, y: loss_of(ddp, x, y))
                pace.step(optimizer)
                continue
            x, y = batch
            if second is not None:
                x = second(x)
            if FORM == "center":
                total = x.sum(0)
                dist.all_reduce(total)
                center = 0.5 * center + 0.5 * total / (len(x) * dist.get_world_size())
                x = x - center
            pace.backward(loss_of(ddp, x, y), scaler=scaler)
            if FORM == "sum":
                count = torch.tensor(len(y))
                dist.all_reduce(count)
                for parameter in ddp.parameters():
                    if parameter.grad is not None:
                        parameter.grad.mul_(dist.get_world_size() / count)
            if pace.complete:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(ddp.parameters(), 100.0)
            if teacher is not None:
                teacher.weight.data.lerp_(torch.ones(2, 2), 0.1)
            if FORM == "metrics":
                pace.mean(x.mean() * len(x))
            if pace.step(optimizer, scaler):
                for _ in range(2 if FORM == "hurried" else 1):
                    scheduler.step()
    pace.close()


if __name__ == "__main__":
    unported() if FORM == "unported" else main()
