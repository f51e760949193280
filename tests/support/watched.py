"""Jobs for ranks: plain DDP training under watch, and the same without."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import paceline.doctor
from paceline import PacelineError
from paceline.torch import leave


class Sleepy(torch.utils.data.Dataset[torch.Tensor]):
    """Eight samples a batch, the last of which takes a while to fetch."""

    def __init__(self, rank: int, steps: int, pause: float) -> None:
        made = torch.Generator().manual_seed(rank)
        self.samples = torch.randn(8 * steps, 4, generator=made, dtype=torch.float64)
        self.pause = pause

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        if index % 8 == 7:
            time.sleep(self.pause)
        return self.samples[index]


PHASES = ("FETCH", "PREPARE", "FORWARD", "BETWEEN", "BACKWARD", "FINISH")


class Net(torch.nn.Module):
    """Sleeps in the forward and in the backward pass."""

    def __init__(self, forward: float, backward: float) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2, dtype=torch.float64)
        self.forward_pause, self.backward_pause = forward, backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.forward_pause)
        y = self.layer(x)
        y.register_hook(lambda _: time.sleep(self.backward_pause))
        return y


def train(
    rank: int,
    ranks: int,
    run_dir: str | None,
    steps: int,
    watched: int,
    pauses: list[dict[str, float]],
    micro: int = 1,
    synchronised: bool = False,
    loader: bool = True,
) -> tuple[list[float], bool]:
    """Ranks that sleep so long in each phase of a step; the parameters, and whether they are watched to the end.

    micro: backward passes in a step. synchronised: each of them exchanges gradients. loader: batches come from a
    DataLoader.
    """
    torch.manual_seed(0)
    pause = {name: pauses[rank].get(name, 0.0) / micro for name in PHASES}
    ddp = DistributedDataParallel(Net(pause["FORWARD"], pause["BACKWARD"]))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    probe = None
    if run_dir is not None:
        from paceline.doctor.probe import Probe

        probe = Probe(ddp, watched, run_dir)
    data = Sleepy(rank, steps * micro, pause["FETCH"])
    batches = iter(torch.utils.data.DataLoader(data, batch_size=8) if loader else data.samples.split(8))
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            x = next(batches)
            time.sleep(pause["PREPARE"])
            alone = part < micro - 1 and not synchronised
            with ddp.no_sync() if alone else contextlib.nullcontext():
                loss = ddp(x).square().mean()
                time.sleep(pause["BETWEEN"])
                loss.backward()
        time.sleep(pauses[rank].get("FINISH", 0.0))
        optimizer.step()
    attached = probe is not None and bool(probe._hooks._handles)
    if probe is not None:
        probe.detach()
    values = torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist()
    leave(ddp)
    return values, attached


def refusals(rank: int, ranks: int) -> list[str]:
    """What cannot be watched."""
    found = []
    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    for model, steps in ((torch.nn.Linear(4, 2), 10), (ddp, 1)):
        try:
            paceline.doctor.watch(model, steps)
        except PacelineError as error:
            found.append(str(error))
    leave(ddp)
    return found


def survives(rank: int, ranks: int) -> int:
    """Steps trained where what should tell of them fails."""
    from paceline.doctor.probe import Probe

    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    def failing(_: object) -> None:
        raise ZeroDivisionError

    Probe(ddp, 5, None, failing)
    steps = 0
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        steps += 1
    leave(ddp)
    return steps


def with_others(rank: int, ranks: int) -> tuple[int, int]:
    """How often a program's own hook of all optimizers ran, which stands behind the doctor's; hooks left over."""
    from torch.optim import optimizer as torch_optimizer

    from paceline.doctor.probe import Probe

    ddp = DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    before, ran = len(torch_optimizer._global_optimizer_post_hooks), []
    Probe(ddp, 5, None)
    own = torch_optimizer.register_optimizer_step_post_hook(lambda *_: ran.append(1))
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    own.remove()
    left = len(torch_optimizer._global_optimizer_post_hooks) - before + len(ddp._forward_pre_hooks)
    leave(ddp)
    return len(ran), left


class Graphs(torch.utils.data.Dataset[torch.Tensor]):
    """Each of as many nodes as its number, and at least one."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(index + 1, 4)


def joined(graphs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """As PyTorch Geometric does it: nodes, and to which graph each belongs."""
    return torch.cat(graphs), torch.arange(len(graphs)).repeat_interleave(torch.tensor([*map(len, graphs)]))


def packed(texts: list[torch.Tensor]) -> torch.Tensor:
    """As one row."""
    return torch.cat(texts)[None]


class Stream(torch.utils.data.IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(20, 4))


class Known:
    """A batch object that knows its number of samples."""

    num_graphs = 6

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def ahead(loader: Any) -> Iterator[Any]:
    """The next batch is fetched before the training gets the newest one, as Accelerate's loaders do."""
    batches = iter(loader)
    newest = next(batches)
    for following in batches:
        yield newest
        newest = following
    yield newest


class Pools(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: Any, *_: torch.Tensor) -> torch.Tensor:
        return self.layer(getattr(x, "x", x)).square().mean()


def counts(rank: int, ranks: int) -> dict[str, tuple[list[int], bool]]:
    """Samples of four steps that the loader drew, 0 without one, and whether the batches know their number."""
    from paceline.doctor.hooks import Hooks, drawn_by_step

    plain, graphs = torch.utils.data.TensorDataset(torch.ones(32, 4)), Graphs()
    load = torch.utils.data.DataLoader
    nodes = joined([torch.ones(20, 4)])
    kinds: dict[str, Any] = {
        "graphs": load(graphs, 6, collate_fn=joined),
        "graphs, loaded by processes": load(graphs, 6, collate_fn=joined, num_workers=2),
        "packed": load(graphs, 3, collate_fn=packed),
        "cut up": load(plain, 8),
        "real and fake": load(plain, 8),
        "evaluated": load(plain, 4),
        "unlike batches": load(plain, batch_sampler=[[0, 1], [2, 3, 4, 5], [6], [7, 8, 9, 10, 11]]),
        "stream": load(Stream(), 5),
        "fetched ahead": ahead(load(plain, batch_sampler=[[0, 1], [2, 3, 4, 5], [6], [7, 8, 9]])),
        "own graphs": [(nodes[0], torch.ones(2, 50, dtype=torch.int64))] * 4,
        "graphs that know their number": [Known(nodes[0])] * 4,
    }
    other = load(torch.utils.data.TensorDataset(torch.ones(9, 4)), 9)
    found = {}
    for kind, batches in kinds.items():
        ddp = DistributedDataParallel(Pools())
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        hooks = Hooks(ddp, lambda: None)
        for _, batch in zip(range(4), batches, strict=False):
            given = batch if isinstance(batch, list | tuple) else [batch]
            parts: Any = (
                given[0].split(2) if kind == "cut up" else [given[0]] * (2 if kind == "real and fake" else 1)
            )
            for part in parts[:-1]:
                with ddp.no_sync():
                    ddp(part).backward()
            ddp(parts[-1], *given[1:]).backward()
            optimizer.step()
            if kind == "evaluated":
                for x in other:
                    with torch.no_grad():
                        ddp.module(*x)
        found[kind] = drawn_by_step(hooks.batches), hooks.counted
        hooks.remove()
        leave_later.append(ddp)
    leave(ddp)
    return found


leave_later: list[Any] = []  # a module's last work may abort a process that lets go of it


def comparing(rank: int, ranks: int) -> list[tuple[bool, bool]]:
    """For a loss of each sample, and for one of pairs: whether it is found to compare them, and whether the
    parameters are those of a training that nobody watches."""
    from paceline.doctor.hooks import Hooks

    found = []
    for pairs in (False, True):
        ended = []
        for watches in (False, True):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(torch.nn.Linear(4, 3).double())
            optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
            hooks = Hooks(ddp, lambda: None) if watches else None
            for _ in range(4):
                y = ddp(torch.randn(8, 4, dtype=torch.float64))
                ((y[:4] - y[4:]).square().sum(1).sqrt().mean() if pairs else y.square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
            ended.append(torch.cat([p.detach().flatten() for p in ddp.parameters()]).tolist())
            leave_later.append(ddp)
            if hooks is not None:
                hooks.remove()
        assert hooks is not None
        found.append((hooks.compares, ended[0] == ended[1]))
    leave(ddp)
    return found


def second(rank: int, ranks: int) -> list[float]:
    """This rank's own seconds of each step, where rank 1 sleeps before the backward pass of a second module."""
    from paceline.doctor.hooks import Hooks
    from paceline.doctor.phases import Phase

    ddp, other = (DistributedDataParallel(torch.nn.Linear(4, 2)) for _ in range(2))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ddp, other)]
    hooks = Hooks(ddp, lambda: None)
    for _ in range(6):
        for module, optimizer in zip((other, ddp), reversed(optimizers), strict=True):
            loss = module(torch.ones(8, 4)).square().mean()
            time.sleep(0.1 if rank == 1 and module is other else 0)
            loss.backward()
            optimizer.step()
    steps = [step[: len(Phase)] for step in hooks.steps(all_of_them=True)]
    hooks.remove()
    leave_later.append(other)
    leave(ddp)
    return [sum(step) - step[Phase.REDUCE] for step in steps[2:]]
