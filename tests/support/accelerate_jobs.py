"""What the ranks of the tests of Accelerate run; each case begins with an Accelerator of its own."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from paceline.errors import PacelineError
from paceline.hosts.accelerate import AcceleratePace
from paceline.torch import peers
from support import hosts
from support.accelerate_loops import accelerator, loops
from support.hosts import BATCH, EPOCHS, FREE, SEED, UNEVEN, Samples, fresh, optimizer_of


class Run:
    """A training loop as Accelerate's users write it, up to any round, and from a checkpoint."""

    def __init__(
        self,
        ranks: int,
        dtype: torch.dtype = torch.float64,
        precision: str = "no",
        steps: int = 1,
        net: nn.Module | None = None,
        loading: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.accelerator = accelerator(mixed_precision=precision, gradient_accumulation_steps=steps)
        self.net = net or fresh(dtype)
        optimizer = optimizer_of(self.net)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(self.net, optimizer, scheduler)
        options = {"policy": UNEVEN, "limits": FREE[:ranks]} | options
        self.pace = AcceleratePace(self.accelerator, self.model, BATCH, **options)
        self.loader = self.pace.loader(Samples(hosts.COUNT, dtype), seed=SEED, **loading or {})
        self.used: list[list[int]] = []
        self.micro_steps = 0

    def train(
        self,
        rounds: int | None = None,
        epochs: int = EPOCHS,
        clip: float | None = None,
        accumulate: bool = False,
        jitter: float = 0.0,
    ) -> list[torch.Tensor]:
        """The parameters after so many epochs, or rounds."""
        loss_of, stalls = nn.CrossEntropyLoss(), random.Random(peers.rank())
        for epoch in range(self.pace.epoch, epochs):
            self.loader.set_epoch(epoch)
            self.used.append([])
            for x, y, index in self.loader:
                time.sleep(jitter * stalls.expovariate(1.0))
                self.used[-1] += index.tolist() if self.pace.counts else []
                self.micro_steps += 1
                if accumulate:
                    with self.accelerator.accumulate(self.model):
                        self._micro_step(loss_of(self.model(x), y), clip)
                else:
                    self._micro_step(loss_of(self.model(x), y), clip)
                if self.pace.rounds == rounds:
                    return self.parameters()
        return self.parameters()

    def _micro_step(self, loss: torch.Tensor, clip: float | None) -> None:
        self.pace.backward(loss)
        if clip is not None and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def parameters(self) -> list[torch.Tensor]:
        return [p.detach().clone() for p in self.net.parameters()]


def evaluated(ranks: int) -> tuple[Any, Any]:
    """What evaluation gives in mid-epoch of a balanced run, and without Paceline with the same parameters."""

    def evaluation(accelerator: Accelerator, model: nn.Module) -> Any:
        loader = accelerator.prepare(torch.utils.data.DataLoader(Samples(hosts.COUNT), 7))
        return hosts.evaluation(model, loader, accelerator.gather_for_metrics)

    run = Run(ranks, net=hosts.normed(), limits=None)
    run.train(rounds=3)
    state = copy.deepcopy(run.net.state_dict())
    ours = evaluation(run.accelerator, run.model)
    run.pace.host.detach()
    net, host = hosts.normed(), accelerator()
    net.load_state_dict(state)
    return ours, evaluation(host, host.prepare(net))


def cases(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    """What every case came to on this rank."""
    hosts.as_torchrun(rank, ranks)
    whole = hosts.whole_batch()
    found: dict[str, Any] = {}

    run = Run(ranks)
    found["plain"] = hosts.difference(run.train(), whole), run.used
    run.pace.host.detach()

    if ranks == 2:
        run = Run(ranks, policy="level", limits=None)
        run.accelerator.load_state(folder)  # by three
        found["fewer"] = hosts.difference(run.train(), whole), run.used
        run.pace.host.detach()
        return found

    run = Run(ranks)
    found["clipped"] = hosts.difference(run.train(clip=0.3), hosts.whole_batch(clip=0.3))
    found["scheduled"] = run.scheduler.scheduler.last_epoch // ranks, run.pace.rounds
    run.pace.host.detach()

    for accumulate in (False, True):
        run = Run(ranks, steps=2)
        found[f"accumulated, {accumulate}"] = (
            hosts.difference(run.train(accumulate=accumulate), whole),
            run.micro_steps,
            run.accelerator.gradient_accumulation_steps,
        )
        run.pace.host.detach()

    for steps in (1, 2):
        run = Run(ranks, steps=steps, loading={"cost": hosts.COSTS, "padded": False})
        found[f"by cost, {steps}"] = (
            hosts.difference(run.train(accumulate=steps > 1), whole),
            run.used,
            run.micro_steps,
        )
        run.pace.host.detach()

    run = Run(ranks, steps=2, loop="pieces")
    found["in pieces"] = (
        hosts.difference(run.train(accumulate=True), whole),
        run.micro_steps,
        run.pace.host.terms.micro_batch,
    )
    run.pace.host.detach()

    for accumulate in (False, True):
        run = Run(ranks, policy="factoring", limits=None, loop="pieces")
        found[f"moved, {accumulate}"] = (
            hosts.difference(run.train(jitter=2e-3, accumulate=accumulate), whole), run.used, run.micro_steps
        )  # fmt: skip
        run.pace.host.detach()

    first = Run(ranks, policy="level", limits=None)
    first.train(rounds=8)
    first.accelerator.save_state(folder)
    first.pace.host.detach()
    second = Run(ranks, policy="level", limits=None)
    second.accelerator.load_state(folder)
    found["resumed"] = hosts.difference(second.train(), whole), first.used, second.used
    second.pace.host.detach()

    run = Run(ranks, torch.float32, precision="bf16")
    seen: set[torch.dtype] = set()
    run.net.first.register_forward_hook(lambda _, __, out: seen.add(out.dtype))
    found["bf16"] = hosts.difference(run.train(), whole), str(seen)
    run.pace.host.detach()

    found["evaluated"] = evaluated(ranks)
    found["loops"] = loops()
    found["refused"] = refusals(ranks, folder)
    return found


def refusals(ranks: int, folder: str) -> dict[str, str]:
    """The sentence for each mistake."""
    says: dict[str, str] = {}

    def attempt(name: str, options: dict[str, Any], micro_step: Any) -> None:
        run = None
        try:
            run = Run(ranks, **options)
            for x, y, _ in run.loader:
                micro_step(run, nn.CrossEntropyLoss()(run.model(x), y))
            says[name] = "nothing was wrong"
        except PacelineError as error:
            says[name] = str(error)
        if run is not None:
            run.pace.host.detach()

    def forgets(run: Run, loss: torch.Tensor) -> None:
        run.accelerator.backward(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()

    def saves_early(run: Run, loss: torch.Tensor) -> None:
        run.pace.backward(loss)
        run.accelerator.save_state(folder + "/early")

    def changes(run: Run, loss: torch.Tensor) -> None:
        run.accelerator.sync_gradients = not run.accelerator.sync_gradients
        run.pace.backward(loss)

    attempt("hook", {"weigh": "hook"}, None)
    attempt("early", {}, saves_early)
    attempt("changed", {}, changes)
    attempt("forgotten", {}, lambda run, loss: run.accelerator.backward(loss))
    attempt("stepped without", {}, forgets)
    attempt("twice", {"steps": 2, "accumulate": 2}, None)
    attempt("both", {"accumulate": 2, "loop": "pieces"}, None)
    attempt("scaler", {}, lambda run, loss: run.pace.backward(loss, scaler=object()))
    return says
