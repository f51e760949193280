"""Loops of Accelerate's users that accumulate, with Paceline and without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState, GradientState
from torch import nn

from paceline.errors import PacelineError
from paceline.hosts.accelerate import AcceleratePace
from paceline.torch.feed.pieces import Order
from support import hosts
from support.hosts import SEED, Samples, fresh, optimizer_of

COUNT, EACH, WINDOW = 96, 4, 2  # samples; of a rank in a micro-step, on average; micro-steps of a step
Backward = Callable[[torch.Tensor], None]


def accelerator(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


class Loop:
    """A user's script up to its loop; ``loader`` and ``backward`` are what Paceline changes in it."""

    def __init__(self, steps: int) -> None:
        self.accelerator = accelerator(gradient_accumulation_steps=steps)
        net = fresh(torch.float64)
        optimizer = optimizer_of(net)
        plain = torch.utils.data.DataLoader(Samples(COUNT), EACH, shuffle=True)
        total = len(plain) // WINDOW * hosts.EPOCHS
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        self.net, self.scheduler = net, scheduler
        self.model, self.optimizer, self.stepper, self.loader = self.accelerator.prepare(
            net, optimizer, scheduler, plain
        )
        self.backward: Backward = self.accelerator.backward
        self.rates: list[float] = []  # of each step

    def balance(self, **options: Any) -> AcceleratePace:
        batch = EACH * WINDOW * self.accelerator.num_processes
        pace = AcceleratePace(self.accelerator, self.model, batch, policy=hosts.UNEVEN, **options)
        self.loader, self.backward = pace.loader(Samples(COUNT), seed=SEED), pace.backward
        return pace

    def step(self) -> None:
        rate = self.scheduler.get_last_lr()[0]
        if self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
            self.rates.append(rate)
        self.optimizer.step()
        self.stepper.step()
        self.optimizer.zero_grad()

    def train(self, form: str) -> list[float]:
        """The learning rate of each step, and the last."""
        for _ in range(hosts.EPOCHS):
            for i, (x, y, _) in enumerate(self.loader):
                loss = nn.functional.cross_entropy(self.model(x), y)
                if form == "accumulate":
                    with self.accelerator.accumulate(self.model):
                        self.backward(loss)
                        self.step()
                    continue
                self.backward(loss / WINDOW)
                if (i + 1) % WINDOW == 0 if form == "own" else i % WINDOW == 0:
                    self.step()
        return [*self.rates, self.scheduler.get_last_lr()[0]]


def whole(rates: list[float], batch: int) -> list[torch.Tensor]:
    """The parameters of one process that takes each whole batch, with the learning rate of each step."""
    net, data = fresh(torch.float64), Samples(COUNT)
    optimizer, steps = optimizer_of(net), iter(rates)
    for epoch in range(hosts.EPOCHS):
        for chosen in torch.as_tensor(Order(COUNT, SEED).epoch(epoch)).split(batch):
            optimizer.param_groups[0]["lr"] = next(steps)
            nn.functional.cross_entropy(net(data.x[chosen]), data.y[chosen]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return list(net.parameters())


def overflown() -> tuple[int, float, str]:
    """A scaler leaves out the third round's step, and the loop the fourth's: rounds done, the scale, the sentence."""
    loop = Loop(1)
    loop.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = AcceleratedOptimizer(loop.optimizer.optimizer, scaler=scaler)
    loop.accelerator._optimizers[:] = [optimizer]
    pace = loop.balance()
    says = "nothing was wrong"
    try:
        for i, (x, y, _) in enumerate(loop.loader):
            loss = nn.functional.cross_entropy(loop.model(x), y)
            loop.backward(loss * float("inf") if i == 2 else loss)
            if i < 3:
                optimizer.step()
            optimizer.zero_grad()
    except PacelineError as error:
        says = str(error)
    pace.host.detach()
    return pace.rounds, scaler.get_scale(), says


def loops() -> dict[str, Any]:
    """For each form of accumulation (the host's learning rates, ours, how far our parameters are from one process's),
    or the sentence with which it is refused."""
    found: dict[str, Any] = {}
    for form, steps, told in (("accumulate", WINDOW, 1), ("own", 1, WINDOW)):
        host = Loop(steps)
        theirs = host.train(form)
        ours = Loop(steps)
        pace = ours.balance(accumulate=told)
        rates = ours.train(form)
        expected = whole(rates, pace.host.terms.batch)
        micro_steps = len(ours.loader), len(host.loader)
        found[form] = theirs, rates, hosts.difference(ours.net.parameters(), expected), micro_steps
        pace.host.detach()
    found["overflown"] = overflown()
    for name, form, steps, told in (
        ("untold", "own", 1, 1),
        ("shifted", "shifted", 1, WINDOW),
        ("shifted, untold", "shifted", 1, 1),
        ("steps without accumulate", "shifted", WINDOW, 1),
    ):
        loop = Loop(steps)
        pace = loop.balance(accumulate=told)
        try:
            loop.train(form)
            found[name] = "nothing was wrong"
        except PacelineError as error:
            found[name] = str(error)
        pace.host.detach()
    return found
