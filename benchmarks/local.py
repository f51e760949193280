"""Where links are slow: how far does training get in the same time, and with as many samples, if ranks merge seldom?

    python benchmarks/local.py [--images mnist.npz] [--torchft PYTHON] [--links 16,100] [--seeds 3] [--quick]

Three real gloo ranks in network namespaces on a bridge, whose rates ``tc`` sets (Linux, root). They really train: a
convolutional network on --images (as for ``paceline train --data``; by default the digits that come with Paceline),
and a small GPT on the help texts that come with Python. Their samples take times in the ratio 1/1/4, or "moving": the
slow one is another every 8 s. A rank sleeps what it does not compute of them, before its backward pass, and a model
is one bucket of DDP, so that no sum goes on beside a pass. Each way trains for --seconds with the same learning rate;
none was tuned to a way.

Printed: samples that all ranks together did in that time, the test loss and the accuracy then (of GPT: of the next
character), as mean and half the range over the seeds; loss and accuracy when as many samples were done as DDP did in
its time; and the time until the loss is what DDP's is in the end, as DDP's part: 33 % is three times as fast. The
model that is tested is the one that all share: behind a step, or behind a merge. "equal steps" are local SGD and
DiLoCo as published (arXiv 1805.09767; 2311.08105, Nesterov with 0.7 and 0.9), which wait for the slowest; --torchft
runs torchft's DiLoCo with the same numbers, from an environment of its own. "delayed" is Merge(delay=1), whose model
is the base, without what is on its way; "claimed" is policy factoring:scheme=self, under which each step of an
interval is claimed by itself, so that who becomes slow takes fewer.

With --keep the benchmark can be run in parts, such as --task text --links 16 --speeds 1/1/4 --way "level (exact)":
three seeds take three minutes. Begin with --way DDP. With --kept in place of --way it prints all that is kept.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

NEWNET = 0x40000000  # of setns: a network namespace
# Local steps between merges; seconds after which another rank is the slow one.
RANKS, EVERY, MOVES = (3, 8, 8.0)
SPEEDS = (1.0, 1.0, 4.0)
CLAIMED = "factoring:scheme=self"  # every step but a rank's last
SNAPSHOTS, LONGEST = 30, 120.0  # in a run; seconds until its clock starts, at most
DILOCO = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
CONTEXT, WIDTH, LAYERS = 32, 64, 2  # of the GPT


class Task(NamedTuple):
    """samples, test: inputs and labels. milliseconds: that a sample takes the quickest rank."""

    samples: tuple[Any, Any]
    test: tuple[Any, Any]
    model: Any
    optimizer: Callable[[Any], Any]
    batch: int
    milliseconds: float


def images(spec: str, torch: Any) -> Task:
    """A convolutional network of 104,000 parameters."""
    from paceline.data import datasets

    nn, data = torch.nn, datasets.load(spec)
    channels, height, width = data.shape
    first, second = nn.Conv2d(channels, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 2, 1)
    features = (first, nn.ReLU(), second, nn.ReLU(), nn.Flatten())
    inside = 16 * (-(-height // 4)) * (-(-width // 4))
    model = nn.Sequential(*features, nn.Linear(inside, 128), nn.ReLU(), nn.Linear(128, data.classes))
    parts = ((data.x_train, data.y_train), (data.x_test[:2000], data.y_test[:2000]))
    samples, test = ((torch.from_numpy(datasets.floats(x)), torch.from_numpy(y)) for x, y in parts)
    return Task(samples, test, model, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 96, 1.0)


def text(_: str, torch: Any) -> Task:
    """A GPT of 119,000 parameters, which guesses the next character of Python's help texts."""
    from pydoc_data.topics import topics

    from torch import nn

    letters = np.frombuffer("".join(topics.values()).encode("ascii", "replace"), np.uint8)
    cut = torch.tensor(letters[: len(letters) // CONTEXT * CONTEXT].astype(int)).view(-1, CONTEXT)
    mixed = cut[torch.randperm(len(cut), generator=torch.Generator().manual_seed(0))]

    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(128, WIDTH)
            self.places = nn.Parameter(0.02 * torch.randn(CONTEXT - 1, WIDTH))
            form: Any = {"activation": "gelu", "batch_first": True, "norm_first": True}
            layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, **form)
            self.layers = nn.TransformerEncoder(layer, LAYERS, nn.LayerNorm(WIDTH), False)
            self.out = nn.Linear(WIDTH, 128)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(CONTEXT - 1), False)

        def forward(self, x: Any) -> Any:
            inside = self.layers(self.letters(x) + self.places, self.mask, is_causal=True)
            return self.out(inside).transpose(1, 2)

    samples, test = ((part[:, :-1], part[:, 1:]) for part in (mixed[500:], mixed[:500]))
    return Task(samples, test, Gpt(), lambda p: torch.optim.AdamW(p, lr=2e-3), 24, 10.0)


TASKS = {"images": images, "text": text}


class Run:
    """One rank's training: what it is told, its data, and the snapshots that rank 0 takes."""

    def __init__(self, rank: int, job: dict[str, Any], folder: Path) -> None:
        import torch

        self.rank, self.job, self.folder, self.torch = rank, job, folder, torch
        torch.set_num_threads(1)
        torch.manual_seed(job["seed"])
        self.task = task_of(job["task"], job["images"])
        self.model, self.batch = self.task.model, self.task.batch
        self.optimizer = self.task.optimizer(self.model.parameters())
        self.done, self._kept = 0, list[tuple[float, int, Any]]()

    def start(self) -> None:
        self._began = time.perf_counter()

    def passes(self, model: Any, chosen: Any) -> Any:
        """The loss of these samples. With its backward pass, taken to be twice as long as the forward pass, it takes
        this rank its time, of which it sleeps what it does not compute."""
        began, slow = time.perf_counter(), self.rank == RANKS - 1
        if self.job["speeds"] == "moving":
            slow = int((began - self._began) / MOVES) % RANKS == RANKS - 1 - self.rank
        x, y = self.task.samples
        loss = self.torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen])
        own = self.task.milliseconds * (max(SPEEDS) if slow else min(SPEEDS)) * len(chosen) / 1e3
        time.sleep(max(own - 3 * (time.perf_counter() - began), 0.0))
        return loss

    def parts(self) -> Iterator[Any]:
        """Equal parts of each epoch's order, for ever."""
        generator, part = self.torch.Generator().manual_seed(self.job["seed"]), self.batch // RANKS
        while True:
            order = self.torch.randperm(len(self.task.samples[0]), generator=generator)
            for at in range(0, len(order) - self.batch + 1, self.batch):
                yield order[at + self.rank * part : at + (self.rank + 1) * part]

    def shared(self, samples: int, parameters: Any = None) -> None:
        """All ranks share a model now, by default the one that is trained, when so many samples are done in all."""
        now, seconds = time.perf_counter() - self._began, self.job["seconds"]
        if self.rank or (now < seconds and self._kept and now - self._kept[-1][0] < seconds / SNAPSHOTS):
            return
        vector = self.torch.nn.utils.parameters_to_vector(parameters or self.model.parameters())
        self._kept.append((now, samples, vector.detach().numpy().copy()))
        if now >= seconds:
            part = self.folder / "part.npz"
            times, done, vectors = map(np.array, zip(*self._kept, strict=True))
            np.savez(part, now=times, samples=done, vectors=vectors)
            part.rename(self.folder / "done.npz")
            time.sleep(LONGEST)  # until it is killed, with the others

    def step(self, loss: Any) -> None:
        """A step of the rank's own optimizer."""
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def hooked(run: Run, hook: str) -> Any:
    """The model in DDP, with one of torch's communication hooks."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    ddp = run.torch.nn.parallel.DistributedDataParallel(run.model)
    if hook == "fp16":
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp


def equally(run: Run, hook: str = "") -> None:
    """DDP: every rank has an equal part of each batch."""
    ddp = hooked(run, hook)
    for chosen in run.parts():
        run.step(run.passes(ddp, chosen))
        run.done += run.batch
        run.shared(run.done)


def balanced(run: Run, hook: str = "", policy: str = "level", merge: Any = None, **options: Any) -> None:
    """Paceline: exact under "level", or local steps, whose ``merge`` is given in words."""
    from torch.utils.data import TensorDataset

    from paceline.torch import LocalSGD, Merge, Pace

    many, local = len(run.task.samples[0]), merge is not None
    model = run.model if local else hooked(run, hook)
    pace: Any = (
        LocalSGD(model, run.batch, policy, merge=Merge(**merge), **options)
        if merge is not None
        else Pace(model, run.batch, policy, **options)
    )
    loader = pace.loader(TensorDataset(run.torch.arange(many)), seed=run.job["seed"])
    for _ in range(10**6):
        for (chosen,) in loader:
            rounds = pace.rounds
            pace.backward(run.passes(model, chosen))
            pace.step(run.optimizer)
            if pace.rounds > rounds:  # with a delay, the base is what all share
                base = None
                if local and not pace.merged:
                    base = pace._loop.merges.base[: len(list(model.parameters()))]
                run.shared(pace.epoch * many + pace.host.progress.samples_done, base)


def locally(run: Run, every: int | str, policy: str = "level", **merge: Any) -> None:
    """Paceline's local steps."""
    balanced(run, "", policy, merge, every=every)


def seldom(run: Run, outer: dict[str, Any] | None = None) -> None:
    """Local SGD, or DiLoCo: as many local steps on each rank, and the mean of what they changed."""
    import torch.distributed as dist

    nn = run.torch.nn.utils
    common = nn.parameters_to_vector(run.model.parameters()).detach().clone()
    common.requires_grad_()
    optimizer = run.torch.optim.SGD([common], **outer or {"lr": 1.0})
    for steps, chosen in enumerate(run.parts(), 1):
        run.step(run.passes(run.model, chosen))
        run.done += run.batch
        if steps % EVERY == 0:
            changed = common.detach() - nn.parameters_to_vector(run.model.parameters()).detach()
            dist.all_reduce(changed)
            common.grad = changed / RANKS
            optimizer.step()
            nn.vector_to_parameters(common.detach().clone(), run.model.parameters())
            run.shared(run.done)


def torchft(run: Run) -> None:
    """torchft's DiLoCo, between replica groups of one rank each."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    own = run.job["addresses"][run.rank]
    store = dist.TCPStore(own, 0, None, True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=lambda _: None,
        state_dict=dict,
        min_replica_size=RANKS,
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"r{run.rank}_",
        store_addr=own,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{run.job['addresses'][0]}:29612",
        hostname=own,
    )
    outer = run.torch.optim.SGD(run.model.parameters(), **DILOCO)
    with DiLoCo(manager, [run.model], run.optimizer, outer, EVERY, use_bucketization=True) as diloco:
        for chosen in run.parts():
            run.step(run.passes(run.model, chosen))
            run.done += run.batch
            if diloco._local_step == 0:
                run.shared(run.done)


WAYS: dict[str, Callable[[Run], None]] = {
    "DDP": equally,
    "DDP, fp16 hook": lambda run: equally(run, "fp16"),
    "DDP, PowerSGD": lambda run: equally(run, "PowerSGD"),
    "level (exact)": balanced,
    "level, PowerSGD": lambda run: balanced(run, "PowerSGD"),
    "local SGD, equal steps": seldom,
    "DiLoCo, equal steps": lambda run: seldom(run, DILOCO),
    "torchft DiLoCo": torchft,
    "local, every=8": lambda run: locally(run, EVERY),
    "local, every=auto": lambda run: locally(run, "auto"),
    "local, every=8, by ranks": lambda run: locally(run, EVERY, by="ranks"),
    "local, every=8, delayed": lambda run: locally(run, EVERY, delay=1),
    "local, every=auto, delayed": lambda run: locally(run, "auto", delay=1),
    "local, every=8, claimed": lambda run: locally(run, EVERY, CLAIMED),
    "local, every=8, claimed, delayed": lambda run: locally(run, EVERY, CLAIMED, delay=1),
}


def rank_of(rank: int, job: dict[str, Any], space: str | None, folder: Path) -> None:
    """One rank: joins the others in its network namespace, and trains until it is killed."""
    if space is not None:
        with open(f"/var/run/netns/{space}") as entry:
            if ctypes.CDLL(None, use_errno=True).setns(entry.fileno(), NEWNET):
                raise OSError(ctypes.get_errno(), f"the network namespace {space} can't be entered")
    quiet = {"RES_OPTIONS": "attempts:0", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # no name server is asked
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0", "MASTER_ADDR": job["addresses"][0]} | quiet
    run = Run(rank, job, folder)
    if job["way"] != "torchft DiLoCo":
        import torch.distributed as dist
        from scaffold import join

        join(rank, RANKS, str(folder))
        dist.barrier()
    run.start()
    WAYS[job["way"]](run)


def train(job: dict[str, Any], rate: str, python: str) -> Any:
    """A run's snapshots: seconds, samples and parameters of each."""
    import network  # not at the top, since each rank imports this file
    from scaffold import forks

    context = forks()
    context.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "paceline.torch"])
    job = job | {"addresses": [network.address(rank) for rank in range(RANKS)]}
    with tempfile.TemporaryDirectory() as directory, network.cables([rate] * RANKS) as spaces:
        folder, running, ranks = Path(directory), list[Any](), list[Any]()
        quiet: dict[str, Any] = {
            "start_new_session": True,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        try:
            if job["way"] == "torchft DiLoCo":
                within = [["ip", "netns", "exec", space] for space in spaces]
                lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--bind", "0.0.0.0:29612"]
                running = [subprocess.Popen([*within[0], *lighthouse, "--min_replicas", str(RANKS)], **quiet)]
                for rank in range(RANKS):
                    command = [
                        *within[rank],
                        python,
                        __file__,
                        "--rank",
                        str(rank),
                        json.dumps(job),
                        directory,
                    ]
                    with open(folder / f"said-{rank}", "wb") as said:
                        ranks.append(subprocess.Popen(command, **quiet | {"stderr": said}))
            else:
                for rank, space in enumerate(spaces):
                    ranks.append(context.Process(target=rank_of, args=(rank, job, space, folder)))
                    ranks[-1].start()
            until = time.monotonic() + LONGEST + job["seconds"]
            while not (folder / "done.npz").exists():
                ended = any(each.poll() if python and running else each.exitcode for each in ranks)
                if ended or time.monotonic() > until:
                    raise SystemExit(f"a rank of {job['way']!r} has failed or is late" + "".join(
                        each.read_text()[-2000:] for each in folder.glob("said-*")))  # fmt: skip
                time.sleep(0.1)
            return dict(np.load(folder / "done.npz"))
        finally:
            for each in running + ranks if running else []:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()
            for each in [] if running else ranks:
                each.kill()
            for each in [] if running else ranks:
                each.join()


@functools.lru_cache
def task_of(name: str, spec: str) -> Task:
    """A task, with its data read once."""
    import torch

    return TASKS[name](spec, torch)


def tested(job: dict[str, Any], found: Any) -> Any:
    """Of each snapshot its seconds, samples, test loss and accuracy; shape (snapshots, 4)."""
    import torch

    task = task_of(job["task"], job["images"])
    rows, (x, y) = [], task.test
    for now, samples, vector in zip(found["now"], found["samples"], found["vectors"], strict=True):
        torch.nn.utils.vector_to_parameters(torch.from_numpy(vector), task.model.parameters())
        with torch.no_grad():
            out = task.model(x)
        loss = torch.nn.functional.cross_entropy(out, y)
        rows.append((now, samples, float(loss), float((out.argmax(1) == y).float().mean())))
    return np.array(rows)


def kept_at(keep: Path, job: dict[str, Any], rate: str) -> Path:
    """Where a run is kept."""
    named = "-".join(str(job[each]) for each in ("task", "speeds", "way", "seed", "seconds"))
    return keep / (f"{rate}-{named}".replace("/", "_") + ".npy")


def curve_of(job: dict[str, Any], rate: str, python: str, keep: Path | None) -> Any:
    """``tested`` of a run, or what is kept of one."""
    kept = keep and kept_at(keep, job, rate)
    if kept and kept.exists():
        return np.load(kept)
    curve = tested(job, train(job, rate, python))
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        np.save(kept, curve)
    return curve


def figures(curve: Any, ddp: Any, seconds: float) -> list[float]:
    """Samples, loss and accuracy in the same time; loss and accuracy at DDP's samples; part of DDP's time."""
    _, samples, loss, accuracy = curve[curve[:, 0] <= seconds][-1]
    end, needed, least, _ = ddp[ddp[:, 0] <= seconds][-1]
    equal = curve[np.searchsorted(curve[:, 1], needed) if samples >= needed else -1]
    there = curve[(curve[:, 2] <= least) & (curve[:, 0] <= seconds), 0]
    part = there[0] / end if len(there) else np.inf
    return [samples, loss, 100 * accuracy, equal[2], 100 * equal[3], 100 * part]


def spread(values: Any, digits: int) -> str:
    """Mean and half the range; infinite if one is."""
    reached = int(np.isfinite(values).sum())
    if reached < len(values):
        return f"in {reached} of {len(values)}" if reached else "never"
    return f"{np.mean(values):,.{digits}f} ±{np.ptp(values) / 2:,.{digits}f}"


def main() -> None:
    """One table for each task, link and kind of speeds; or one rank of torchft's."""
    if sys.argv[1:2] == ["--rank"]:
        rank_of(int(sys.argv[2]), json.loads(sys.argv[3]), None, Path(sys.argv[4]))
    import network
    from scaffold import command_line, count, counts

    from paceline.data import datasets
    from paceline.errors import PacelineError

    parser = command_line(__doc__)
    parser.add_argument("--links", type=counts, default=[16, 100], metavar="MBIT,...")
    parser.add_argument("--speeds", choices=("1/1/4", "moving"), action="append")
    parser.add_argument("--task", choices=TASKS, action="append")
    parser.add_argument("--way", choices=WAYS, action="append", help="beside DDP")
    parser.add_argument("--images", default="digits", metavar="DATA")
    parser.add_argument("--torchft", default="", metavar="PYTHON")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="runs that it holds are not run again")
    parser.add_argument("--kept", action="store_true", help="print what --keep holds, and run nothing")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--quick", action="store_true", help="one seed, one link, 8 s")
    asked = parser.parse_args()
    if asked.kept and not asked.keep:
        parser.error("--kept prints what --keep FOLDER holds; expected both")
    if asked.kept and not asked.keep.is_dir():
        parser.error(f"--keep {asked.keep}: no such folder; expected one that earlier runs were kept in")
    if asked.torchft and shutil.which(asked.torchft) is None:
        parser.error(
            f"--torchft {asked.torchft}: no such program; expected the python of an environment with torchft"
        )
    if "torchft DiLoCo" in (asked.way or ()) and not asked.torchft:
        parser.error("--way 'torchft DiLoCo' needs --torchft PYTHON, of an environment with torchft")
    try:
        datasets.load(asked.images)
    except PacelineError as error:
        parser.error(f"--images: {error}")
    if reason := network.missing():
        raise SystemExit(f"left out: {reason}")
    if asked.quick:
        asked.seconds, asked.seeds, asked.links = 8.0, 1, asked.links[:1]
    without = "DiLoCo, equal steps" if asked.torchft else "torchft DiLoCo"
    ways = ["DDP", *(way for way in asked.way or WAYS if way != "DDP" and (asked.way or way != without))]
    heads, digits = ("samples", "loss", "accuracy, %", "loss", "accuracy, %", "time, %"), (0, 3, 1, 3, 1, 0)
    settings = itertools.product(asked.task or TASKS, asked.links, asked.speeds or ("1/1/4", "moving"))
    for task, link, speeds in settings:
        rate, same = f"{link}mbit", {"task": task, "speeds": speeds, "images": asked.images}
        jobs = {
            way: [same | {"way": way, "seed": seed, "seconds": asked.seconds} for seed in range(asked.seeds)]
            for way in ways
        }
        if asked.kept:
            jobs = {
                way: runs
                for way, runs in jobs.items()
                if all(kept_at(asked.keep, each, rate).exists() for each in runs)
            }
        if not jobs:
            continue
        print(f"\n{task}, {link} Mbit/s, speeds {speeds}, {asked.seconds:g} s, {asked.seeds} seeds")
        print(f"{'':34}{'in the same time':>48}{'with equal samples':>32}{'to its loss':>16}")
        print(f"{'':34}" + "".join(f"{head:>16}" for head in heads), flush=True)
        ddp: list[Any] = []
        for way, runs in jobs.items():
            rows = []
            for seed, job in enumerate(runs):
                print(f"  {way}, seed {seed} ...", end="\r", file=sys.stderr, flush=True)
                curve = curve_of(job, rate, asked.torchft, asked.keep)
                ddp += [curve] if way == "DDP" else []
                rows.append(figures(curve, ddp[seed], asked.seconds))
            cells = map(spread, np.array(rows).T, digits)
            print(f"{way:34}" + "".join(f"{cell:>16}" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
