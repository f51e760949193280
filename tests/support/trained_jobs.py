"""What is trained changes in mid-run, groups are smaller than the world, and two models share a loader."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from paceline.errors import PacelineError
from paceline.torch import Pace
from paceline.torch.callbacks import OnRound
from support.loader_jobs import TWO
from support.torch_jobs import Samples, fresh, optimizer_of

LOSS = nn.CrossEntropyLoss()


def refused(
    pace: Pace, model: nn.Module, module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[int, str]:
    """The sentences of three rounds in which something else is to be trained: what was frozen, what was added, what
    the optimizer of another model's moves."""
    told: dict[int, str] = {}

    def attempt(number: int, step: Callable[..., object], *what: Any) -> None:
        try:
            step(*what)
        except PacelineError as error:
            told[number] = str(error)

    for batch in pace.loader(Samples(16 * 5), seed=5):
        pace.round(batch, lambda x, y, _: LOSS(model(x), y))
        if pace.rounds == 1:
            module.second.bias.requires_grad_(True)
            attempt(1, pace.step, optimizer)
            module.second.bias.requires_grad_(False)
        if pace.rounds == 2:
            module.added = nn.Linear(3, 3).double()
            optimizer.add_param_group({"params": list(module.added.parameters())})
            attempt(2, pace.step, optimizer)
            optimizer.param_groups.pop()
        if pace.rounds == 3:
            other = torch.optim.SGD(module.added.parameters(), lr=0.1)
            for parameter in module.added.parameters():
                parameter.grad = torch.ones_like(parameter)
            attempt(3, other.step)
        pace.step(optimizer)
    return told


def frozen() -> tuple[nn.Module, torch.optim.Optimizer]:
    module = fresh(torch.float64)
    module.second.bias.requires_grad_(False)
    return module, optimizer_of(module)


def trained_in_mid_run(rank: int, ranks: int) -> tuple[dict[int, str], int]:
    module, optimizer = frozen()
    ddp = DistributedDataParallel(module)
    with Pace(ddp, 16, TWO, loop="round", limits=[(0, None)] * 2) as pace:
        return refused(pace, ddp, module, optimizer), pace.rounds


def unfrozen_in_the_ways_that_are_told(rank: int, ranks: int) -> list[float]:
    """The differences from one process where a layer is trained from round 3 on: with a learning rate of 0 until
    then, and with DistributedDataParallel and Pace made anew."""
    return [_unfrozen(anew=False), _unfrozen(anew=True)]


def _unfrozen(anew: bool) -> float:
    module, data = fresh(torch.float64), Samples(16 * 6)
    module.second.requires_grad_(not anew)
    groups = [
        {"params": list(module.first.parameters())},
        {"params": list(module.second.parameters()), "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    ddp = DistributedDataParallel(module)
    pace = Pace(ddp, 16, TWO, limits=[(0, None)] * 2)
    loader = pace.loader(data, shuffle=False)
    while pace.host.progress.samples_done < 16 * 6:
        for x, y, _ in loader:
            pace.backward(LOSS(ddp(x), y))
            pace.step(optimizer)
            if pace.rounds == 3:
                break
        if pace.rounds != 3:
            break
        state = pace.state_dict()
        optimizer.param_groups[1]["lr"] = 0.1
        if anew:
            pace.host.detach()
            pace.host.release()
            module.second.requires_grad_(True)
            ddp = DistributedDataParallel(module)
            pace = Pace(ddp, 16, TWO, limits=[(0, None)] * 2)
            loader = pace.loader(data, shuffle=False)
        pace.load_state_dict(state)
    rounds = pace.rounds
    pace.host.detach()
    assert rounds == 6
    one = fresh(torch.float64)
    for number, chosen in enumerate(torch.arange(16 * 6).split(16)):
        one.zero_grad()
        LOSS(one(data.x[chosen]), data.y[chosen]).backward()
        with torch.no_grad():
            for name, parameter in one.named_parameters():
                assert parameter.grad is not None
                parameter -= 0.1 * parameter.grad * (number >= 3 or name.startswith("first"))
    return difference(module, one)


def difference(model: nn.Module, one: nn.Module) -> float:
    pairs = zip(model.state_dict().values(), one.state_dict().values(), strict=True)
    return max(float((p - q).abs().max() / q.abs().max()) for p, q in pairs)


def in_two_groups(rank: int, ranks: int, everywhere: bool) -> str:
    """Each half of the ranks has a DistributedDataParallel module of its own; or only the first half a Pace, too."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ddp = DistributedDataParallel(fresh(torch.float64), process_group=halves[rank // 2])
    try:
        if everywhere or rank < 2:
            Pace(ddp, 16)
    except PacelineError as error:
        return str(error)
    return ""


class Maker(nn.Module):
    """Makes samples from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        return self.layers(noise)


class Judge(Maker):
    """Tells them from real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def makers_and_judges() -> tuple[nn.Module, nn.Module, TensorDataset]:
    """Two models, and real samples with the noise for as many others."""
    torch.manual_seed(11)
    return (
        Maker().double(),
        Judge().double(),
        TensorDataset(torch.randn(90, 6, dtype=torch.float64), torch.randn(90, 4, dtype=torch.float64)),
    )


def says(judge: nn.Module, samples: torch.Tensor, real: float) -> torch.Tensor:
    out = judge(samples).squeeze(1)
    return nn.functional.binary_cross_entropy_with_logits(out, torch.full_like(out, real))


def two_models(rank: int, ranks: int, weigh: str, through: str) -> tuple[float, float]:
    """A generative adversarial network as docs/porting.md has it: the differences of both models from one process.

    through: the second backward pass goes through the first model's own module, or through its wrapper."""
    maker, judge, data = makers_and_judges()
    netg, netd = DistributedDataParallel(maker), DistributedDataParallel(judge)
    first, second = (
        torch.optim.Adam(judge.parameters(), lr=0.01),
        torch.optim.Adam(maker.parameters(), lr=0.01),
    )
    with Pace(netd, 20, TWO, limits=[(0, None)] * 2, weigh=weigh) as pace:
        for _ in range(2):
            for real, noise in pace.loader(data, seed=5):
                netd.zero_grad()
                fake = netg(noise)
                loss = says(netd, real, 1.0) + says(judge, fake.detach(), 0.0)
                loss.backward() if weigh == "hook" else pace.backward(loss)
                pace.step(first)
                netg.zero_grad()
                pace.weighted(says(judge if through == "module" else netd, fake, 1.0)).backward()
                second.step()
    one_maker, one_judge = alone()
    return difference(maker, one_maker), difference(judge, one_judge)


def alone() -> tuple[nn.Module, nn.Module]:
    """Both models, trained by one process in the ordinary way."""
    from paceline.torch.feed.pieces import Order

    maker, judge, data = makers_and_judges()
    first, second = (
        torch.optim.Adam(judge.parameters(), lr=0.01),
        torch.optim.Adam(maker.parameters(), lr=0.01),
    )
    for epoch in range(2):
        for chosen in torch.from_numpy(Order(90, 5).epoch(epoch)).split(20):
            real, noise = data[chosen]
            judge.zero_grad()
            fake = maker(noise)
            (says(judge, real, 1.0) + says(judge, fake.detach(), 0.0)).backward()
            first.step()
            maker.zero_grad()
            says(judge, fake, 1.0).backward()
            second.step()
    return maker, judge


def mistakes_with_two(rank: int, ranks: int) -> list[str]:
    """The sentences where the second model is handed to Pace, the first is not zeroed, or a count is given."""
    maker, judge, data = makers_and_judges()
    netg, netd = DistributedDataParallel(maker), DistributedDataParallel(judge)
    first, second = (
        torch.optim.Adam(judge.parameters(), lr=0.01),
        torch.optim.Adam(maker.parameters(), lr=0.01),
    )
    told: list[str] = []

    def attempt(action: Any) -> None:
        try:
            action()
        except PacelineError as error:
            told.append(str(error))

    with Pace(netd, 20, TWO, limits=[(0, None)] * 2) as pace:
        attempt(lambda: pace.weighted(torch.ones(())))
        for real, noise in pace.loader(data, seed=5):
            fake = netg(noise)
            loss = says(netd, real, 1.0) + says(judge, fake.detach(), 0.0)
            if pace.rounds == 1:
                attempt(lambda loss=loss: pace.backward(loss))
                break
            pace.backward(loss)
            pace.step(first)
            attempt(lambda loss=loss: pace.backward(loss))
            attempt(lambda: pace.step(second))
            attempt(lambda fake=fake: pace.weighted(says(judge, fake, 1.0), count=3))
            pace.weighted(says(judge, fake, 1.0)).backward()
            second.step()
    return told


def losses(rank: int, ranks: int, counts: bool, loop: str) -> tuple[list[float], list[float], list[str]]:
    """What ``loss_now`` says behind the steps of some rounds, what the record says, and what it refuses."""
    ddp = DistributedDataParallel(fresh(torch.float64))
    optimizer, now, later, told = optimizer_of(ddp), [], [], []
    limit = {"micro_batch": 5} if loop == "pieces" else {}

    def heard(result: Any) -> None:
        later.append(result.loss)

    with Pace(ddp, 16, TWO, loop=loop, limits=[(0, None)] * 2, callbacks=[OnRound(heard)], **limit) as pace:
        for x, y, _ in pace.loader(Samples(83), seed=5):
            loss = LOSS(ddp(x), y)
            pace.backward(loss, count=len(x) if counts else None)
            if pace.complete and pace.rounds % 2:
                now.append(pace.loss_now())
                pace.step(optimizer)
            elif pace.step(optimizer):
                now.append(pace.loss_now())
            elif not told:
                try:
                    pace.loss_now()
                except PacelineError as error:
                    told.append(str(error))
        pace.host.flush()
    return now, later, told


def one_sample(rank: int, ranks: int) -> list[str]:
    """The notes of the error that a rank makes of a batch of one sample."""
    ddp = DistributedDataParallel(nn.Linear(6, 1).double())
    pace = Pace(ddp, 16, TWO, limits=[(1, None)] * 2)
    try:
        for x, _, _ in pace.loader(Samples(17, torch.float64), shuffle=False):
            out = ddp(x).squeeze()
            pace.backward(nn.functional.binary_cross_entropy_with_logits(out, torch.zeros(len(x)).double()))
            pace.step(torch.optim.SGD(ddp.parameters(), lr=0.1))
    except ValueError as error:
        pace._loop._lookout.explain(error)
        return list(error.__notes__)
    finally:
        pace.host.detach()
    return []


def destroyed_by_the_script(rank: int, ranks: int) -> bool:
    """A script closes its Pace, and then destroys the process group that it has made."""
    with Pace(DistributedDataParallel(fresh(torch.float64)), 16) as pace:
        pass
    pace.close()
    dist.barrier()
    dist.destroy_process_group()
    return dist.is_initialized()
