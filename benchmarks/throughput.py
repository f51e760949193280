"""How much of the cluster does each policy use? Real gloo ranks that sleep for each sample.

    python benchmarks/throughput.py [--scenario constant-3] [--policy level] [--steps 80] [--stream]

For each scenario, in one run and one process group: plain DDP with an equal split, plain DDP with a split set
by hand for the mean speeds (loss times n b_i / B), and every policy under Pace. Share of the bound: samples a
second over the sum of the workers' sleeping speeds, after 20 warm-up steps. Oracle ratio: seconds over those of
the best whole-sample division of each step, known beforehand. The figures are wall-clock, from sleeping workers.
--stream adds "level" over one stream that all ranks read whole, ``pace.stream(stream, shared=True)``.
"""

from __future__ import annotations

import csv
import sys
import time
from typing import Any

import numpy as np
from scaffold import PLAIN, command_line, forks, join, policy_name

from paceline.papers import data_folder

WARM_UP = 20
STREAM = "level, shared stream"
POLICIES = ("equal", "dolbie", "ogd", "abs", "lbbsp", "lbbsp-cpu", "wlbs", "level")


def constant(milliseconds: list[float], steps: int) -> np.ndarray:
    return np.tile(milliseconds, (steps, 1))


def moving(workers: int, steps: int, every: int = 40) -> np.ndarray:
    """1 ms a sample, and 4 ms for one worker, another one every ``every`` steps."""
    speeds = np.ones((steps, workers))
    for step in range(steps):
        speeds[step, workers - 1 - (step // every) % workers] = 4.0
    return speeds


def recorded(job: str, steps: int, workers: int = 4) -> np.ndarray | None:
    """Compute seconds of real ranks, scaled to 1 ms a sample on average, played forth and back."""
    path = data_folder() / "traces" / "bytedance_step_worker_times.csv"
    if not path.exists():
        print(f"{path} is not there; the recorded speeds are left out")
        return None
    times: dict[int, dict[int, float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            worker = int(row["stage"]) if job == "ST" else int(row["dp_rank"])
            wanted = row["dp_rank"] == "0" if job == "ST" else row["stage"] == "0"
            if row["trace"] == job and wanted and worker < workers:
                times.setdefault(int(row["step"]), {})[worker] = float(row["compute_s"])
    series = np.array([[times[step][worker] for worker in range(workers)] for step in sorted(times)])
    series /= series.mean()
    there_and_back = np.concatenate([series, series[-2:0:-1]])
    return there_and_back[np.arange(steps) % len(there_and_back)]


def oracle_seconds(speeds: np.ndarray, batch: int) -> np.ndarray:
    """Seconds of the best whole-sample division of each step."""
    from paceline.costs import Linear
    from paceline.shares import whole_samples

    cost = Linear(speeds / 1e3, np.zeros_like(speeds))
    return (whole_samples(cost, batch) * speeds / 1e3).max(axis=1)


class Batched:
    """Samples in memory, fetched a whole batch at a time, as the plain loops do."""

    def __init__(self, inputs: Any, labels: Any) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: list[int]) -> tuple[Any, Any]:
        return self.inputs[indices], self.labels[indices]


def rank_of(
    rank: int,
    ranks: int,
    directory: str,
    speeds: np.ndarray,
    batch: int,
    chosen: list[str],
    plain_steps: int,
    pipe: Any,
) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from paceline.torch import Pace, leave

    join(rank, ranks, directory)
    torch.manual_seed(0)
    steps = len(speeds)
    inputs, labels = torch.randn(batch * 8, 20), torch.randint(10, (batch * 8,))
    loss_of = nn.CrossEntropyLoss()

    def sleep(step: int, samples: int) -> None:
        time.sleep(speeds[step, rank] * samples / 1e3)

    for name in chosen:
        ddp = DistributedDataParallel(nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 10)))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        stamps: list[float] = []
        dist.barrier()
        if name.startswith("plain"):
            speed = 1 / speeds.mean(axis=0) if "hand" in name else np.ones(ranks)
            loads = np.floor(batch * speed / speed.sum()).astype(int)
            loads[: batch - loads.sum()] += 1
            mine = int(loads[rank])
            for step in range(min(steps, plain_steps)):
                stamps.append(time.perf_counter())
                sleep(step, mine)
                loss = loss_of(ddp(inputs[:mine]), labels[:mine]) * (ranks * mine / batch)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        else:
            shared = name == STREAM
            pace = Pace(ddp, batch, "level" if shared else name, loop="whole" if shared else "pieces")
            loader: Any
            if shared:
                loader = pace.stream(list(zip(inputs, labels, strict=True)), shared=True)
            else:
                loader = pace.loader(Batched(inputs, labels), collate_fn=lambda batch: batch)
            while pace.rounds < steps:
                for x, y in loader:
                    if pace.host.first:
                        stamps.append(time.perf_counter())
                    sleep(pace.rounds, len(x))
                    pace.backward(loss_of(ddp(x), y))
                    pace.step(optimizer)
                    if pace.rounds == steps:
                        break
            pace.host.detach()
        stamps.append(time.perf_counter())
        if rank == 0:
            pipe.send((name, np.diff(stamps)))
        ddp.reducer = None  # type: ignore[assignment]
    leave()


def measure(
    speeds: np.ndarray, batch: int, chosen: list[str], directory: str, plain_steps: int = 10**6
) -> dict[str, np.ndarray]:
    """Seconds of each step under each way of dividing; plain DDP only takes the first ``plain_steps``."""
    context = forks()
    ours, theirs = context.Pipe(duplex=False)
    ranks = speeds.shape[1]
    workers = [
        context.Process(
            target=rank_of, args=(r, ranks, directory, speeds, batch, chosen, plain_steps, theirs)
        )
        for r in range(ranks)
    ]
    for worker in workers:
        worker.start()
    results: dict[str, np.ndarray] = {}
    while len(results) < len(chosen):
        if not ours.poll(300):
            raise SystemExit("a rank has failed; see above")
        name, seconds = ours.recv()
        results[name] = seconds
        took = f"{name} took {float(np.sum(seconds)):.0f} s"
        print(f"{len(results)} of {len(chosen)} ways: {took}", file=sys.stderr, flush=True)
    for worker in workers:
        worker.join()
    return results


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--scenario", action="append")
    parser.add_argument("--policy", type=policy_name, action="append")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--stream", action="store_true")
    options = parser.parse_args()
    steps = options.steps
    if steps <= WARM_UP:
        parser.error(f"--steps {steps}: expected more than the {WARM_UP} that warm up")
    scenarios: dict[str, tuple[np.ndarray | None, int]] = {
        "constant-3": (constant([1, 1, 4], steps), 384),
        "constant-4": (constant([1, 1, 1, 4], steps), 512),
        "moving-4": (moving(4, WARM_UP + 120), 512),
        "recorded-ST": (recorded("ST", steps), 512),
        "recorded-SE": (recorded("SE", steps), 512),
    }
    if unknown := set(options.scenario or ()) - set(scenarios):
        parser.error(f"--scenario {min(unknown)}: expected one of {', '.join(scenarios)}")
    ways = [*PLAIN, *(options.policy or POLICIES), *([STREAM] if options.stream else [])]
    import tempfile

    for name, (speeds, batch) in scenarios.items():
        if speeds is None or (options.scenario and name not in options.scenario):
            continue
        with tempfile.TemporaryDirectory() as directory:
            results = measure(speeds, batch, ways, directory)
        ideal = batch / (1e3 / speeds).sum(axis=1)
        oracle = oracle_seconds(speeds, batch)
        kept = slice(WARM_UP, None)
        print(
            f"\n{name}: {speeds.shape[1]} sleeping workers, batch {batch}, {len(speeds) - WARM_UP} steps measured"
        )
        print(f"{'':22}{'samples/s':>10}{'of the bound':>14}{'oracle ratio':>14}{'ms a step':>11}")
        for way in ways:
            seconds = results[way][kept]
            print(
                f"{way:22}{batch * len(seconds) / seconds.sum():10.0f}{ideal[kept].sum() / seconds.sum():14.1%}"
                f"{seconds.sum() / oracle[kept].sum():14.2f}{1e3 * seconds.mean():11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
