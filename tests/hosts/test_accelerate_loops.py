"""Loops of Accelerate's users that accumulate: the learning rates are those of the loop without Paceline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import PacelineError
from paceline.torch.feed.pieces import Order
from support import hosts
from support.guarantees import guarantee
from support.hosts import EPOCHS, SEED, UNEVEN, Found, Samples, Together, accelerator, fresh, optimizer_of
from support.ranks import run_ranks
from support.skips import skip_without

skip_without("accelerate")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]
together = Together()

COUNT, EACH, WINDOW = 96, 4, 2  # samples; of a rank in a micro-step, on average; micro-steps of a step


class Loop:
    """A user's script up to its loop; ``loader`` and ``backward`` are what Paceline changes in it."""

    def __init__(self, steps: int) -> None:
        self.accelerator = accelerator(gradient_accumulation_steps=steps)
        net = fresh(torch.float64)
        optimizer = optimizer_of(net)
        plain = torch.utils.data.DataLoader(Samples(COUNT), EACH, shuffle=True)
        total = len(plain) // WINDOW * EPOCHS
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        self.net, self.scheduler = net, scheduler
        self.model, self.optimizer, self.stepper, self.loader = self.accelerator.prepare(
            net, optimizer, scheduler, plain
        )
        self.backward: Callable[[torch.Tensor], None] = self.accelerator.backward
        self.rates: list[float] = []  # of each step

    def balance(self, **options: Any) -> Any:
        from paceline.hosts.accelerate import AcceleratePace

        batch = EACH * WINDOW * self.accelerator.num_processes
        pace = AcceleratePace(self.accelerator, self.model, batch, policy=UNEVEN, **options)
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
        for _ in range(EPOCHS):
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
    for epoch in range(EPOCHS):
        for chosen in torch.as_tensor(Order(COUNT, SEED).epoch(epoch)).split(batch):
            optimizer.param_groups[0]["lr"] = next(steps)
            nn.functional.cross_entropy(net(data.x[chosen]), data.y[chosen]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return list(net.parameters())


@together
def both(_: int, __: str) -> dict[str, Any]:
    """For each form: the host's learning rates, ours, how far our parameters are from one process's."""
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
    return found


@guarantee("Learning rates and `len(loader)` under Accelerate are those of the program without Paceline.")
@pytest.mark.parametrize("form", ["accumulate", "own"])
def test_accumulating_loop_has_learning_rates_of_the_plain_loop(found: Found, form: str) -> None:
    for theirs, ours, off, micro_steps in (rank[form] for rank in found[both]):
        assert ours == theirs
        assert ours[-1] == 0.0
        assert off < 1e-12
        assert micro_steps[0] == micro_steps[1] == 8, (
            "len(loader) is the number of micro-steps, as without balancing"
        )


@together
def refused(_: int, __: str) -> dict[str, str]:
    """The error message of each mistake."""
    says = {}
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
            says[name] = "nothing was wrong"
        except PacelineError as error:
            says[name] = str(error)
        pace.host.detach()
    return says


@guarantee("Under Accelerate, a missing or early step, or `accelerator.backward`, raises before the step.")
def test_round_without_its_step_and_step_without_its_round_raise(found: Found) -> None:
    for says in found[refused]:
        assert "continued without optimizer.step()" in says["untold"]
        assert "AcceleratePace(..., accumulate=k)" in says["untold"]
        for shifted in ("shifted", "steps without accumulate"):
            assert "(i + 1) % 2 == 0" in says[shifted]
        assert "continued without optimizer.step()" in says["shifted, untold"]


@together
def overflown(_: int, __: str) -> tuple[int, float, str]:
    """The scaler leaves out the third round's step, and the loop the fourth's."""
    from accelerate.optimizer import AcceleratedOptimizer

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


def test_step_that_the_scaler_leaves_out_is_no_mistake(found: Found) -> None:
    for rounds, scale, says in found[overflown]:
        assert rounds == 3, "the one that overflowed among them"
        assert scale == 2.0
        assert "round 3 is complete, and the loop continued without optimizer.step()" in says


def scheduled(rank: int, ranks: int, balanced: bool) -> list[float]:
    """The learning rate of each step; the number of steps is counted by ``len`` of the loader, and the scheduler is
    prepared after it is known."""
    from paceline.hosts.accelerate import AcceleratePace

    hosts.as_torchrun(rank, ranks)
    host = accelerator()
    data, model = torch.utils.data.TensorDataset(torch.randn(96, 4)), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader: Any = torch.utils.data.DataLoader(data, 8)
    model = host.prepare(model)
    if balanced:
        pace = AcceleratePace(host, model, 8 * ranks)
        loader = pace.loader(data)
    total = 3 * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
    optimizer, scheduler = host.prepare(optimizer, scheduler)
    if not balanced:
        loader = host.prepare(loader)
    rates = []
    for _ in range(3):
        for (x,) in loader:
            loss = model(x).mean()
            pace.backward(loss) if balanced else host.backward(loss)
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    if balanced:
        pace.host.detach()
    return rates


@guarantee("Learning rates and `len(loader)` under Accelerate are those of the program without Paceline.")
def test_scheduler_over_rounds_has_the_rates_of_the_plain_program() -> None:
    plain, ours = run_ranks(3, scheduled, False), run_ranks(3, scheduled, True)
    assert len(plain[0]) == 12
    for theirs, found in zip(plain, ours, strict=True):
        assert found == pytest.approx(theirs, abs=1e-12)
