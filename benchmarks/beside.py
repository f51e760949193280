"""How fast are other systems where one worker of three is four times slower?

    python benchmarks/beside.py
    python benchmarks/beside.py --torchft PYTHON --hivemind PYTHON --adaptdl PYTHON

Three processes sleep 1, 1 and 4 ms for each sample of a small network; 384 samples make a step. Printed: samples a
second of all of them together, the share of the bound, which is the sum of the workers' speeds, 2,250 samples/s, and
how many times as fast that is as the fastest worker alone.
The other systems are installed into environments of their own, whose pythons are given; a Ray task queue is always
measured. Plain DDP, a split by hand and Paceline's policies: ``benchmarks/throughput.py --scenario constant-3``, the
same workers and the same batch. The figures are wall-clock, from sleeping workers.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from scaffold import command_line

MILLISECONDS = (1.0, 1.0, 4.0)  # that each worker sleeps for a sample
BATCH = 384
BOUND = sum(1e3 / each for each in MILLISECONDS)  # samples a second
SECONDS, WARM_UP = 20.0, 5.0  # measured, and before that
PIECES = (8, 16, 32, 64)  # samples of a task in the queue
HERE = Path(__file__).resolve()
Step = Callable[[], int]  # runs one step, or a part of one; samples of all workers that are done


def network() -> tuple[Any, Any]:
    """The model and its optimizer."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def loss_of(model: Any, samples: int, rank: int) -> Any:
    """The mean loss of so many samples, which takes this worker its time."""
    import torch

    time.sleep(MILLISECONDS[rank] * samples / 1e3)
    return torch.nn.functional.cross_entropy(model(torch.randn(samples, 20)), torch.randint(10, (samples,)))


def torchft(rank: int, folder: Path) -> Step:
    """A replica group of one rank: equal parts, averaged in every step."""
    import torch.distributed as dist
    from torchft import Manager, ProcessGroupGloo

    model, optimizer = network()
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=len(MILLISECONDS),
        use_async_quorum=False,
        init_sync=False,
        replica_id=f"r{rank}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr="http://127.0.0.1:29612",
        hostname="127.0.0.1",
    )

    def step(_: object = store) -> int:  # the store lives as long as this
        try:
            manager.start_quorum()
        except Exception:  # the others are not there yet
            return 0
        optimizer.zero_grad()
        loss_of(model, BATCH // len(MILLISECONDS), rank).backward()
        for work in [manager.allreduce(each.grad) for each in model.parameters()]:
            work.wait()
        if not manager.should_commit():
            return 0
        optimizer.step()
        return BATCH

    return step


def hivemind(rank: int, folder: Path, times: int = 1) -> Step:
    """A peer that collects gradients at its own pace until all together have the batch."""
    import hivemind as hm
    import torch

    model, _ = network()
    known = folder / "peer"
    if rank:
        while not known.exists():
            time.sleep(0.1)
    table = hm.DHT(initial_peers=known.read_text().split() if rank else [], start=True)
    if not rank:
        (folder / "written").write_text("\n".join(map(str, table.get_visible_maddrs())))
        (folder / "written").rename(known)
    part = 16
    shared = hm.Optimizer(
        dht=table,
        run_id="beside",
        batch_size_per_step=part,
        target_batch_size=BATCH * times,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        params=model.parameters(),
        use_local_updates=False,
        matchmaking_time=1.0,
        averaging_timeout=10.0,
    )

    def step() -> int:
        before = shared.local_epoch
        loss_of(model, part, rank).backward()
        shared.step()
        shared.zero_grad()
        return BATCH * times * (shared.local_epoch - before)

    return step


def hivemind_10(rank: int, folder: Path) -> Step:
    """The same with a batch ten times as large, as its matchmaking asks for."""
    return hivemind(rank, folder, 10)


def adaptdl(rank: int, folder: Path) -> Step:
    """A replica whose local batch is as large as all others'."""
    os.environ |= {
        "ADAPTDL_MASTER_ADDR": "127.0.0.1",
        "ADAPTDL_MASTER_PORT": "29613",
        "ADAPTDL_REPLICA_RANK": str(rank),
        "ADAPTDL_NUM_REPLICAS": str(len(MILLISECONDS)),
        "ADAPTDL_NUM_NODES": "1",
        "ADAPTDL_CHECKPOINT_PATH": str(folder),
    }
    import adaptdl.torch as adl
    import torch

    adl.init_process_group("gloo")
    model, optimizer = network()
    samples = torch.utils.data.TensorDataset(torch.arange(BATCH * 1000))
    loader = adl.AdaptiveDataLoader(samples, batch_size=BATCH, drop_last=True)
    replica = adl.AdaptiveDataParallel(model, optimizer)

    def turns() -> Any:
        for _ in adl.remaining_epochs_until(10**6):
            for (batch,) in loader:
                optimizer.zero_grad()
                loss_of(replica, len(batch), rank).backward()
                optimizer.step()
                yield len(batch) * len(MILLISECONDS)

    return turns().__next__


WAYS: dict[str, Callable[[int, Path], Step]] = {
    "torchft": torchft,
    "hivemind": hivemind,
    "hivemind-10": hivemind_10,
    "adaptdl": adaptdl,
}


def work(way: str, rank: int, folder: Path) -> None:
    """One worker: measures its steps once all have had time to warm up, and leaves the figure in the folder."""
    step = WAYS[way](rank, folder)
    while not step():
        pass
    begun, start, done, since = time.perf_counter(), 0.0, 0, 0.0
    while since < WARM_UP + SECONDS:
        samples = step()
        since = time.perf_counter() - begun
        if since < WARM_UP:
            start, done = since, 0
        else:
            done += samples
    if rank == 0:
        (folder / "rate").write_text(str(done / (since - start)))
    while not (folder / "rate").exists():  # the others go on until it is measured
        step()
    os._exit(0)


def beside(way: str, python: str) -> float:
    """Samples a second of three workers of another system."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    quiet: dict[str, Any] = {"env": environment, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    quiet["start_new_session"] = True  # each ends with all that it started
    running = []
    if way == "torchft":
        lighthouse = [str(Path(python).with_name("torchft_lighthouse")), "--bind", "127.0.0.1:29612"]
        least = ["--min_replicas", str(len(MILLISECONDS)), "--join_timeout_ms", "400"]
        running.append(subprocess.Popen([*lighthouse, *least], **quiet))
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(len(MILLISECONDS)):
            command = [python, str(HERE), "--way", way, "--rank", str(rank), "--folder", folder]
            with open(Path(folder) / f"said-{rank}", "wb") as said:
                running.append(subprocess.Popen(command, **quiet | {"stderr": said}))
        try:
            until = time.monotonic() + 180
            while not (Path(folder) / "rate").exists():
                if time.monotonic() > until or any(each.poll() for each in running):
                    raise SystemExit(f"{way}: " + (Path(folder) / "said-0").read_text()[-2000:])
                time.sleep(0.2)
            time.sleep(0.2)
            return float((Path(folder) / "rate").read_text())
        finally:
            for each in running:
                with suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGKILL)
                each.wait()


def queue(samples: int) -> float:
    """Samples a second of a Ray task queue: the next piece of so many samples goes to whoever is free."""
    import numpy as np
    import ray
    from ray.util import ActorPool

    @ray.remote(num_cpus=0)
    class Worker:
        def __init__(self, rank: int) -> None:
            self.rank = rank
            self.model, _ = network()

        def gradient(self, values: Any, count: int) -> Any:
            """Of a piece, as its part of the batch's mean."""
            import torch

            torch.nn.utils.vector_to_parameters(torch.from_numpy(values.copy()), self.model.parameters())
            self.model.zero_grad()
            (loss_of(self.model, count, self.rank) * (count / BATCH)).backward()
            return torch.cat([each.grad.flatten() for each in self.model.parameters()]).numpy()

    workers = [Worker.remote(rank) for rank in range(len(MILLISECONDS))]  # type: ignore[attr-defined]
    pool, values = ActorPool(workers), np.zeros(20 * 64 + 64 + 64 * 10 + 10, np.float32)
    # Loads PyTorch.
    list(pool.map_unordered(lambda worker, sent: worker.gradient.remote(sent, 1), [values] * 30))
    begun, start, done, since = time.perf_counter(), 0.0, 0, 0.0
    while since < WARM_UP + SECONDS:
        tasks = [(ray.put(values), samples)] * (BATCH // samples)
        parts = pool.map_unordered(lambda worker, task: worker.gradient.remote(*task), tasks)
        values = values - 0.01 * sum(parts)
        since = time.perf_counter() - begun
        if since < WARM_UP:
            start, done = since, 0
        else:
            done += BATCH
    for worker in workers:
        ray.kill(worker)
    return done / (since - start)


def say(name: str, rate: float) -> None:
    """One line of the result."""
    alone = rate * min(MILLISECONDS) / 1e3
    figures = f"{100 * rate / BOUND:3.0f} % of the bound   {alone:.1f} times the fastest alone"
    print(f"{name:32} {rate:7,.0f} samples/s   {figures}", flush=True)


def main() -> None:
    """Every system that was given, one after the other; or one worker of one of them."""
    parser = command_line(__doc__)
    for name in ("torchft", "hivemind", "adaptdl"):
        parser.add_argument(f"--{name}", default="", help=f"python of an environment that has {name}")
    parser.add_argument("--way")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args()
    if asked.way is not None:
        work(asked.way, asked.rank, asked.folder)
        return
    for name in WAYS:
        if python := getattr(asked, name.partition("-")[0]):
            say(name, beside(name, python))
    import ray

    ray.init(num_cpus=4, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    for samples in PIECES:
        say(f"Ray task queue, {samples} samples a task", queue(samples))


if __name__ == "__main__":
    main()
