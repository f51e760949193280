"""What a rank does in tests of what fits into its memory: real allocations under a limit of its own."""

from __future__ import annotations

import ctypes
import math
import os
import resource
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch import Pace, memory_limits
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.pieces import Order
from paceline.torch.gradients.weighing import Counts

FEATURES, WIDTH, DEPTH, CLASSES = 16, 8192, 16, 4
MEGABYTE = 1 << 20


class Wide(nn.Module):
    """Few parameters, and about a megabyte of activations for each sample, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for _ in range(DEPTH):
            hidden = torch.relu(hidden) * 1.1
        return self.last(hidden)


class Data(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        self.y = torch.randint(CLASSES, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def fresh() -> Wide:
    torch.manual_seed(3)
    return Wide().double()


def status(name: str) -> int:
    """Bytes of this process, by its name in the kernel's table."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


def alone(count: int, batch: int, rounds: int) -> list[Any]:
    """The parameters of one process that takes each batch at once."""
    model, data, loss_of = fresh(), Data(count), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for step in range(rounds):
        at = step * batch % count
        loss_of(model(data.x[at : at + batch]), data.y[at : at + batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().numpy() for p in model.parameters()]


def limited(
    rank: int, ranks: int, rooms: list[int], count: int, batch: int, rounds: int, options: dict[str, Any]
) -> dict[str, Any]:
    """Train with ``rooms`` megabytes to spare on each rank; what it came to. options: of ``Pace``, and "cgroup" for
    room in a memory cgroup of each rank's own instead of addresses."""
    torch.set_num_threads(1)
    libc = ctypes.CDLL(None)  # as if all were a hundred times as large:
    libc.mallopt(-8, 1)  # a thread's own 64 MB of addresses would be much of this room
    libc.mallopt(-3, 1 << 16)  # and large tensors are given back when they are freed
    model, loss_of = DistributedDataParallel(fresh()), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    options = dict(options)
    group, before, room = None, status("VmSize"), rooms[rank] * MEGABYTE
    if options.pop("cgroup", False):
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # as in a container for each rank
        group = Cgroup(room)
    else:
        resource.setrlimit(resource.RLIMIT_AS, (before + room, resource.RLIM_INFINITY))
    told: list[Any] = []
    policy = options.pop("policy", "level")
    pace = Pace(model, batch, policy, limits="memory", callbacks=[OnRound(told.append)], **options)
    loader = pace.loader(Data(count), shuffle=False)
    whole, most = options.get("loop", "whole") == "whole", 0

    def loss_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal most
        most = max(most, len(x))
        return loss_of(model(x), y)

    try:
        while pace.rounds < rounds:
            for given in loader:
                if whole:
                    pace.backward(loss_at(*given))
                else:
                    pace.round(given, loss_at)
                pace.step(optimizer)
                if pace.rounds == rounds:
                    break
    except (PacelineError, RuntimeError) as error:
        pace._loop.failed(error)
        raise
    held = (status("VmPeak") - before) / room
    if group is not None:
        held = group.leave() / room
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    pace.host.flush()
    found = {
        "parameters": [p.detach().numpy() for p in model.parameters()],
        "held": held,
        "most": most,
        "loads": [result.loads.tolist() for result in told],
        "ran_out": [None if result.ran_out is None else result.ran_out.tolist() for result in told],
    }
    pace.close()
    return found


class Cgroup:
    """A memory cgroup below this process's own, with this process in it, which may hold so many bytes there.

    Raises OSError if this machine does not let one be made."""

    def __init__(self, room: int = 0) -> None:
        paths = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
        old = "memory" in paths
        self._above = Path(f"/sys/fs/cgroup/memory{paths['memory']}" if old else f"/sys/fs/cgroup{paths['']}")
        limit, self._peak = ("limit_in_bytes", "max_usage_in_bytes") if old else ("max", "peak")
        self._own = self._above / f"paceline-{os.getpid()}"
        self._own.mkdir()
        try:
            (self._own / f"memory.{limit}").write_text(str(room or 1 << 40))
            (self._own / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            self._own.rmdir()
            raise

    def leave(self) -> int:
        """Bytes held at most; the cgroup is removed."""
        peak = int((self._own / f"memory.{self._peak}").read_text())
        (self._above / "cgroup.procs").write_text(str(os.getpid()))
        self._own.rmdir()
        return peak


class Fake:
    """A gauge whose memory is a line of what was run: ``base`` and ``each`` of a sample, of ``holds`` bytes."""

    def __init__(self, base: float, each: float, holds: float, forgets: bool = True) -> None:
        self.base, self.each, self.holds, self.forgets, self.ran = base, each, holds, forgets, 0.0
        self.highest = base

    def now(self) -> float:
        return self.base

    def begin(self) -> bool:
        self.highest = self.base if self.forgets else self.highest
        return self.forgets

    def run(self, samples: float) -> None:
        """Raises what a device's allocator raises if there is not enough."""
        if self.base + self.each * samples > self.holds:
            raise torch.OutOfMemoryError("CUDA out of memory. (as a stand-in says it)")
        self.highest = max(self.highest, self.base + self.each * samples)

    def peak(self) -> float:
        return self.highest

    def room(self) -> float:
        return self.holds


def running_out(rank: int, ranks: int, options: dict[str, Any]) -> dict[str, Any]:
    """Train with passes that run out of a stand-in's memory, in the forward pass or half-way through the backward
    pass. ``fits``: samples that it has room for on each rank; "counts" and "elastic" as they say."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    fits, counts = options.pop("fits")[rank], options.pop("counts", False)
    where, norm = options.pop("where"), options.pop("norm", False)
    gauge = Fake(100.0, 10.0, 100.0 + 10.0 * fits * 1.2)  # what is known says a little more than what fits
    memory_limits.gauges = lambda device: [gauge]  # type: ignore[assignment]
    layers: list[nn.Module] = [nn.Linear(FEATURES, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh()]
    inner = nn.Sequential(*layers, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    size, outs = 0, 0

    def check(*_: Any) -> None:
        nonlocal outs
        outs += size > fits
        gauge.run(size if size <= fits else math.inf)

    def hook(grad: torch.Tensor) -> None:
        check()

    def forward(module: nn.Module, given: tuple[torch.Tensor], out: torch.Tensor) -> None:
        if where == "forward":
            check()
        elif out.requires_grad:
            out.register_hook(hook)  # when the last layer has its gradient, and the first has none

    inner[len(layers) - 1].register_forward_hook(forward)  # type: ignore[arg-type]
    model = DistributedDataParallel(inner) if ranks > 1 else inner
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    told: list[Any] = []
    pace = Pace(
        model,
        48,
        options.pop("policy", "level"),
        limits="memory",
        loop="round",
        callbacks=[OnRound(told.append)],
        **options,
    )
    loader = pace.loader(Data(96), seed=1)
    used: list[int] = []
    counted: list[float] = []
    factor = Counts.factor

    def corrected(own: Counts, *given: int) -> Any:
        counted.append(own._own)  # which only a device sums
        return factor(own, *given)

    Counts.factor = corrected  # type: ignore[method-assign]

    def loss_at(x: torch.Tensor, y: torch.Tensor) -> Any:
        nonlocal size
        size = len(x)
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        weights = float((y + 1).sum())  # something other than samples
        used.append(size)
        return (loss / weights, weights) if counts else loss / size

    for _ in range(3):
        for batch in loader:
            pace.round(batch, loss_at)
            pace.step(optimizer)
    pace.host.flush()
    found = {
        "parameters": [p.detach().numpy() for p in model.parameters()],
        "outs": outs,
        "most": max(used),
        "losses": [result.loss for result in told],
        "counted": counted,
        "ran_out": [result.ran_out.tolist() for result in told if result.ran_out is not None],
    }
    pace.close()
    return found


def one_process(counts: bool) -> tuple[list[Any], list[float], list[float]]:
    """The same model in one process, and the losses and the counts of its rounds."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    ).double()
    optimizer, data = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), Data(96)
    losses, counted = list[float](), list[float]()
    for epoch in range(3):
        order = Order(96, 1).epoch(epoch)
        for at in (0, 48):
            x, y = data.x[order[at : at + 48]], data.y[order[at : at + 48]]
            many = float((y + 1).sum()) if counts else 48
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / many
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            counted.append(many)
    return [p.detach().numpy() for p in model.parameters()], losses, counted


def too_small(rank: int, ranks: int, loop: str) -> str:
    """The sentence of a rank whose part does not fit, or of one that waits for it."""
    model = DistributedDataParallel(nn.Linear(FEATURES, CLASSES).double())
    pace = Pace(model, 8, "level", limits="memory", loop=loop)
    try:
        with pace:
            for batch in pace.loader(Data(16)):
                if loop == "round":
                    pace.round(batch, lambda x, y: fail(rank, model(x), y))
                else:
                    pace.backward(fail(rank, model(batch[0]), batch[1]))
                pace.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except (RuntimeError, PacelineError) as error:
        return " ".join([str(error), *getattr(error, "__notes__", [])])
    return ""


def out_behind_its_forward_pass(rank: int, ranks: int) -> str:
    """The sentence with which this rank ends if rank 1 has no memory left for the loss of a round's last pass."""
    model = DistributedDataParallel(nn.Linear(FEATURES, CLASSES).double())
    pace = Pace(model, 8, "equal", limits="memory", loop="round")  # never a load of one sample

    def loss_at(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        return fail(rank if pace.rounds == 1 and pace.host.last else 0, out, y)

    try:
        with pace:
            for batch in pace.loader(Data(32)):
                pace.round(batch, loss_at)
                pace.step(torch.optim.SGD(model.parameters(), lr=0.1))
    except (RuntimeError, PacelineError) as error:
        return str(error)
    return ""


def fail(rank: int, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if rank == 1:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes")
    return nn.functional.cross_entropy(out, y)
