"""What does Paceline do on a GPU? Two to four ranks share one over gloo, since NCCL refuses two ranks on one device.

    python benchmarks/gpu.py [--ranks 2] [--steps 60] [--only exact] [--dry-run]

exact: three optimizer steps of uneven ranks against one process with the whole batch, for each way in which a loop
    on a GPU differs from one on a CPU: single and double precision, bf16 autocast, float16 with a GradScaler,
    torch.compile, and batches from pinned memory. Printed: the greatest difference of a parameter from one
    process's, over the greatest distance that a parameter moved, beside what rounding allows. The status is 1 where
    a difference is larger.
round: what a round costs where there is nothing to balance. Blocks of steps of plain DDP and of Pace alternate in the
    same processes; each step is timed between two CUDA events. Printed: microseconds added to a step, with quartiles.
uneven: the last rank also keeps a stream of its own busy with matrix products, so that its part of the device is
    shared. Samples a second of plain DDP with an equal split, and of Pace.
memory: limits="memory" where every rank may take a part of the device alone, the last one half of the others' part.
    The batch is larger than all of it. Printed: of each rank, the largest pass, its peak and its part of the device,
    and the greatest difference from one process's parameters, as above.

It needs a GPU. ``--dry-run`` goes through the same steps on the CPU, with small sizes, to see that the program itself
works; its figures say nothing about a GPU.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from scaffold import command_line

if TYPE_CHECKING:
    import torch
    from torch.nn.parallel import DistributedDataParallel

PARTS = ("exact", "round", "uneven", "memory")
BLOCK, WARM_UP = 5, 10  # steps


class Setting(NamedTuple):
    """What all ranks are told."""

    directory: str
    ranks: int
    device: str  # cuda or cpu
    width: int  # of the hidden layers
    batch: int
    steps: int
    only: tuple[str, ...]


class Way(NamedTuple):
    """One way to compute on a device."""

    name: str
    allowed: float  # difference from one process over the distance moved, as rounding allows
    dtype: str = "float32"
    autocast: str = ""
    scaler: bool = False
    compiled: bool = False
    pinned: bool = False


# Sums of n products round by about sqrt(n) units of the last place: 6e-8 for float32, 4e-3 for bfloat16, 5e-4 for
# float16. Autocast rounds the gradients of a part of the batch and of the whole of it differently.
WAYS = (
    Way("float32", 1e-4),
    Way("float64", 1e-12, dtype="float64"),
    Way("bf16 autocast", 3e-2, autocast="bfloat16"),
    Way("float16, GradScaler", 1e-2, autocast="float16", scaler=True),
    Way("torch.compile", 1e-4, compiled=True),
    Way("pinned loading", 1e-4, pinned=True),
)


class Samples:
    """Inputs and labels in the host's memory, given out in batches."""

    def __init__(self, count: int, width: int, dtype: str = "float32") -> None:
        import torch

        made = torch.Generator().manual_seed(1)
        self.x = torch.randn(count, width, generator=made, dtype=torch.float64).to(getattr(torch, dtype))
        self.y = torch.randint(10, (count,), generator=made)

    def __len__(self) -> int:
        return len(self.x)

    def __getitems__(self, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[indices], self.y[indices]


def network(setting: Setting, dtype: str = "float32") -> torch.nn.Module:
    """Alike in every process."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    width = setting.width
    layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    layers.append(nn.Linear(width, 10))
    return layers.to(setting.device, getattr(torch, dtype))


def as_given(batch: Any) -> Any:
    return batch


# -- exact ---------------------------------------------------------------------------------------------------


def one_process(setting: Setting, way: Way, data: Samples, steps: int) -> list[torch.Tensor]:
    """The parameters after so many steps with the whole batch, in this process alone."""
    import torch

    model = network(setting, way.dtype)
    run = torch.compile(model) if way.compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(setting.device, init_scale=1024.0) if way.scaler else None
    x, y = data.x.to(setting.device), data.y.to(setting.device)
    for _ in range(steps):
        with casting(setting, way):
            loss = torch.nn.functional.cross_entropy(run(x), y)
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def casting(setting: Setting, way: Way) -> contextlib.AbstractContextManager[Any]:
    import torch

    if not way.autocast:
        return contextlib.nullcontext()
    return torch.autocast(setting.device, dtype=getattr(torch, way.autocast))


def together(setting: Setting, way: Way, data: Samples, steps: int) -> list[torch.Tensor]:
    """The same with all ranks, the first of which gets less than its part."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import Pace

    model = network(setting, way.dtype)
    ddp: Any = DistributedDataParallel(model)
    run = torch.compile(ddp) if way.compiled else ddp
    fewer = len(data) // setting.ranks // 3
    limits = [(1, fewer), *[(None, None)] * (setting.ranks - 1)]
    pace = Pace(ddp, len(data), "level", limits=limits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(setting.device, init_scale=1024.0) if way.scaler else None
    loader = pace.loader(data, collate_fn=as_given, pin_memory=way.pinned and setting.device == "cuda")
    for _ in range(steps):  # a round is an epoch, so that the order of the samples does not matter
        for x, y in loader:
            x, y = (part.to(setting.device, non_blocking=way.pinned) for part in (x, y))
            with casting(setting, way):
                loss = torch.nn.functional.cross_entropy(run(x), y)
            pace.backward(loss, scaler=scaler)
            pace.step(optimizer, scaler)
    pace.host.detach()
    return [parameter.detach().double().cpu() for parameter in model.parameters()]


def exact(setting: Setting, tell: Callable[[Any], None]) -> None:
    begin = [parameter.detach().double().cpu() for parameter in network(setting).parameters()]
    for way in WAYS:
        data = Samples(min(setting.batch, 240), setting.width, way.dtype)
        ours, theirs = together(setting, way, data, 3), one_process(setting, way, data, 3)
        apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
        moved = max(float((a - b).abs().max()) for a, b in zip(theirs, begin, strict=True))
        tell((way.name, apart / moved, way.allowed))


# -- round and uneven ----------------------------------------------------------------------------------------


class Timer:
    """Seconds between marks: CUDA events on a GPU, whose host runs ahead; the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        import torch

        if self._cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between each mark and the next. Waits for the device."""
        import torch

        marks, self._marks = self._marks, []
        if not self._cuda:
            return [after - before for before, after in itertools.pairwise(marks)]
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def plain(setting: Setting, rank: int, ddp: Any, data: Samples) -> Iterator[None]:
    """Endless steps of an ordinary DDP loop with an equal split."""
    import torch

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    part = setting.batch // setting.ranks
    while True:
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        for start in range(0, len(order) - setting.batch + 1, setting.batch):
            chosen = order[start + rank * part : start + (rank + 1) * part].tolist()
            x, y = (each.to(setting.device) for each in data.__getitems__(chosen))
            torch.nn.functional.cross_entropy(ddp(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


def paced(setting: Setting, policy: str, ddp: Any, data: Samples) -> Iterator[None]:
    """Endless steps under Pace."""
    import torch

    from paceline.torch import Pace

    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    pace = Pace(ddp, setting.batch, policy, loop="pieces")
    loader = pace.loader(data, collate_fn=as_given)
    while True:
        for x, y in loader:
            x, y = x.to(setting.device), y.to(setting.device)
            pace.backward(torch.nn.functional.cross_entropy(ddp(x), y))
            if pace.step(optimizer):
                yield


def measured(setting: Setting, rank: int) -> dict[str, np.ndarray]:
    """Seconds of each step, (steps,), by way; blocks of the ways alternate."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    data = Samples(setting.batch * 20, setting.width)

    def wrapped() -> DistributedDataParallel:
        return DistributedDataParallel(network(setting))

    loops = {
        "plain DDP": plain(setting, rank, wrapped(), data),
        "level": paced(setting, "level", wrapped(), data),
        "auto": paced(setting, "auto", wrapped(), data),
    }
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    timer = Timer(setting.device)
    for block in range((WARM_UP + setting.steps) // BLOCK):
        names = list(loops)
        for name in names if block % 2 else reversed(names):
            dist.barrier()
            timer.mark()
            for _ in range(BLOCK):
                next(loops[name])
                timer.mark()
            seconds[name] += timer.seconds()
    return {name: np.array(each[WARM_UP:]) for name, each in seconds.items()}


@contextlib.contextmanager
def competing(setting: Setting) -> Iterator[None]:
    """Matrix products on a stream of their own (on a CPU: in a thread), until the end."""
    import torch

    over = threading.Event()
    side = 4096 if setting.device == "cuda" else 256

    def keep_busy() -> None:
        stream = torch.cuda.Stream() if setting.device == "cuda" else None
        with torch.cuda.stream(stream) if stream else contextlib.nullcontext():
            a = torch.randn(side, side, device=setting.device)
            while not over.is_set():
                for _ in range(4):
                    a @ a
                if stream:
                    stream.synchronize()

    thread = threading.Thread(target=keep_busy, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def limited(setting: Setting, rank: int) -> list[tuple[int, float, float, float]]:
    """Of each rank: samples of the largest pass, bytes at its peak and allowed, difference from one process."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import Pace, peers

    data, way, part = (
        Samples(setting.batch * 8, setting.width),
        WAYS[0],
        0.02 / (1 + (rank == setting.ranks - 1)),
    )
    cuda = setting.device == "cuda"
    if cuda:
        torch.cuda.set_per_process_memory_fraction(part)
        torch.cuda.reset_peak_memory_stats()
    model, largest = DistributedDataParallel(network(setting)), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, len(x))
        return torch.nn.functional.cross_entropy(model(x.to(setting.device)), y.to(setting.device))

    highest = 0.0  # the peak is forgotten after each look
    with Pace(model, len(data), "level", loop="round", limits="memory") as pace:
        loader = pace.loader(data, shuffle=False, collate_fn=as_given)
        for _ in range(3):
            for batch in loader:
                pace.round(batch, loss_of)
                highest = max(highest, float(torch.cuda.max_memory_allocated())) if cuda else highest
                pace.step(optimizer)
        if cuda:
            torch.cuda.set_per_process_memory_fraction(1.0)
        expected = one_process(setting, way, data, 3)
        begun = [parameter.detach().double().cpu() for parameter in network(setting).parameters()]
        found = [parameter.detach().double().cpu() for parameter in model.parameters()]
        moved = max(float((a - b).abs().max()) for a, b in zip(expected, begun, strict=True))
        apart = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) / moved
        allowed = part * torch.cuda.get_device_properties(0).total_memory if cuda else float("nan")
        return peers.gather((largest, highest, allowed, apart))


# -- the ranks -----------------------------------------------------------------------------------------------


def rank_of(rank: int, setting: Setting, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    from paceline.torch import leave

    torch.set_num_threads(1)
    if setting.device == "cuda":
        torch.cuda.set_device(0)
    store = dist.FileStore(os.path.join(setting.directory, "store"), setting.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=setting.ranks)

    def tell(part: str, figure: Any) -> None:
        if rank == 0:
            pipe.send((part, figure))

    if "exact" in setting.only:
        exact(setting, lambda figure: tell("exact", figure))
    if "round" in setting.only:
        tell("round", measured(setting, rank))
    if "uneven" in setting.only:
        last = rank == setting.ranks - 1
        with competing(setting) if last else contextlib.nullcontext():
            tell("uneven", measured(setting, rank))
    if "memory" in setting.only:
        tell("memory", limited(setting, rank))
    tell("end", None)
    dist.barrier()
    leave()
    os._exit(0)


def told(part: str, figure: Any, setting: Setting) -> list[str]:
    """Lines for the terminal."""
    if part == "exact":
        name, apart, allowed = figure
        return [f"exact   {name:22}{apart:10.1e} of the distance moved; rounding allows {allowed:.0e}"]
    if part == "memory":
        return [
            f"memory  rank {rank}: at most {largest} samples at once, {peak / 2**20:.0f} of "
            f"{allowed / 2**20:.0f} MiB, {apart:.1e} of the distance moved"
            for rank, (largest, peak, allowed, apart) in enumerate(figure)
        ]
    before = figure["plain DDP"]
    lines = [f"{part:8}{'plain DDP':12}{1e3 * np.median(before):9.3f} ms a step"]
    for name, seconds in figure.items():
        if name == "plain DDP":
            continue
        if part == "round":
            low, middle, high = 1e6 * np.quantile(seconds - before, [0.25, 0.5, 0.75])
            lines.append(f"{part:8}{name:12}{middle:9.0f} us added to a step ({low:.0f} to {high:.0f})")
        else:
            rates = [setting.batch * len(each) / each.sum() for each in (seconds, before)]
            lines.append(f"{part:8}{name:12}{rates[0]:9.0f} samples/s, {rates[0] / rates[1]:.2f}x plain DDP")
    return lines


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 3, 4))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", action="append", choices=PARTS)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with small sizes")
    options = parser.parse_args()
    import torch

    if not (options.dry_run or torch.cuda.is_available()):
        print(
            "benchmarks/gpu.py needs a GPU that torch can use, and finds none; run it where there is one, or try the "
            "program itself on the CPU with --dry-run",
            file=sys.stderr,
        )
        raise SystemExit(2)
    device, width, batch = ("cpu", 48, 96) if options.dry_run else ("cuda", 4096, 2048)
    os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    wrong = False
    name = "the CPU (dry run: the figures say nothing about a GPU)"
    print(
        f"{options.ranks} ranks on {name if device == 'cpu' else torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}"
    )
    with tempfile.TemporaryDirectory() as directory:
        only = tuple(options.only or PARTS)
        setting = Setting(directory, options.ranks, device, width, batch, options.steps, only)
        ranks = [
            context.Process(target=rank_of, args=(rank, setting, theirs)) for rank in range(setting.ranks)
        ]
        for process in ranks:
            process.start()
        try:
            while True:
                while not ours.poll(1.0):
                    if not all(process.is_alive() for process in ranks):
                        raise SystemExit("a rank has failed; see above")
                part, figure = ours.recv()
                if part == "end":
                    break
                print("\n".join(told(part, figure, setting)), flush=True)
                wrong |= part == "exact" and not figure[1] <= figure[2]
            for process in ranks:
                process.join(30)
        finally:
            for process in ranks:
                process.kill()
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
