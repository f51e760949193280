"""What does not waiting for everybody bring on Ray, and what does the server itself cost?

First table: 8 workers that sleep for their samples (1 ms each) and stall now and then (shifted-exponential
stalls from one recorded trace, the same for all), on one machine: samples a second that moved the parameters,
and seconds to a training loss, under plain DDP and under the server. Second: an update's time beside a bare
loop of ray.put and ray.wait over actors that do the same transfers and no more, for a small model and for 45
MB; the two take turns in one run. On a busy machine repeat, or run it with a priority of its own (chrt -f 10).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from scaffold import command_line

WORKERS, STEPS, LOSS = 8, 45, 1.5
RUNS = {
    "DDP": {"engine": "torch"},
    "bsp": {},
    "static:6": {"backup": "static:6"},
    "dbw": {"backup": "dbw"},
    "dbw, noise": {"backup": "dbw:worth=noise"},
    "static:6 + level": {"backup": "static:6", "policy": "level"},
    "ssp:3": {"sync": "ssp:3"},
    "lsp:4:3": {"sync": "lsp:4:3"},
    "level": {"policy": "level"},
    "auto": {"policy": "auto"},
}


def begin() -> None:
    """Start one Ray for all runs."""
    import ray

    if not ray.is_initialized():
        ray.init(
            num_cpus=WORKERS + 1, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR
        )


def trace(path: Path, rounds: int) -> Path:
    """Stalls: 20 ms and an exponential of 60 ms in mean, in each round of each worker."""
    from paceline.data import traces

    stalls = 0.02 + np.random.default_rng(0).exponential(0.06, (rounds, WORKERS))
    return traces.write(path, traces.Trace(np.full((rounds, WORKERS), 1e-3), stalls))


def policies() -> None:
    """The first table."""
    from paceline.runs import read
    from paceline.train import launch, ray_engine
    from paceline.train.config import TrainConfig

    base = TrainConfig(
        workers=WORKERS,
        global_batch=256,
        policy="equal",
        steps=STEPS,
        lr=0.2,
        momentum=0.0,
        engine="ray",
        elastic=False,
    )
    print(f"{'':>18} {'samples/s':>10} {'seconds to ' + str(LOSS):>15} {'loss':>7} {'dropped':>8}")
    with tempfile.TemporaryDirectory() as folder:
        stalls = str(trace(Path(folder) / "stalls.csv", 40 * STEPS))
        for number, (name, choice) in enumerate(RUNS.items()):
            part = {"ssp": 10, "lsp": 4}.get(choice.get("sync", "bsp")[:3], 1)  # updates with as many samples
            steps = STEPS * part
            config = dataclasses.replace(base, slowdown_trace=stalls, steps=steps, **choice)  # type: ignore[arg-type]
            out = Path(folder) / str(number)
            if config.engine == "torch":
                launch.run(config, out, lambda event: None)
            else:
                begin()
                ray_engine.run(config, out, lambda event: None)
            run = read(out)
            smooth = np.convolve(run.loss, np.ones(5) / 5, "valid")
            below = np.flatnonzero(smooth < LOSS)
            to_loss = f"{run.time[below[0] + 4]:.2f}" if len(below) else "-"
            skip = 3  # the first rounds start everything up
            rate = run.batch[skip:].sum() / (run.time[-1] - run.time[skip - 1])
            dropped = sum(sum(d.values()) for d in run.extras.get("dropped", []) if d)
            print(f"{name:>18} {rate:>10.0f} {to_loss:>15} {smooth[-1]:>7.3f} {dropped:>8}", flush=True)


def constant(size: int) -> Any:
    """A program whose gradients cost nothing: what remains is the server."""

    def program(worker: int) -> Any:
        gradient = np.ones(size, np.float32)
        return np.zeros(size, np.float32), lambda values, samples: (gradient, 1.0)

    return program


def overhead(size: int, updates: int, turns: int = 5, **choice: Any) -> tuple[float, float]:
    """Median seconds of an update, and of the bare loop's round."""
    import ray

    from paceline.paramserver.config import ServerConfig
    from paceline.paramserver.samples import Draws
    from paceline.ray import Server

    class Bare:
        def __init__(self) -> None:
            self.gradient = np.ones(size, np.float32)

        def compute(self, values: Any) -> Any:
            return self.gradient

    made: Any = ray.remote(Bare)
    seconds: list[float] = []
    ours, bare = [], []
    with Server(
        constant(size),
        ServerConfig(WORKERS, 8 * WORKERS, **choice),
        Draws(1000, 0),
        lambda u: seconds.append(u.seconds),
    ) as server:
        actors: list[Any] = [made.options(num_cpus=0).remote() for _ in range(WORKERS)]
        values = np.zeros(size, np.float32)
        for turn in range(1, turns + 1):
            seconds.clear()
            server.run(updates=turn * updates)
            ours += seconds[2:]  # the first began in the turn before
            time.sleep(0.3)  # what workers have begun ends
            for number in range(updates):
                began = time.perf_counter()
                ref = ray.put(values)
                rest = [actor.compute.remote(ref) for actor in actors]
                total = np.zeros(size, np.float32)
                while rest:
                    ready, rest = ray.wait(rest, num_returns=1)
                    total += ray.get(ready[0])
                values = values - np.float32(0.1 / WORKERS) * total
                if number > 1:
                    bare.append(time.perf_counter() - began)
        for actor in actors:
            with contextlib.suppress(Exception):
                ray.kill(actor)
    return float(np.median(ours)), float(np.median(bare))


def main() -> None:
    """Print both tables."""
    command_line(__doc__).parse_args()
    import ray

    policies()
    begin()
    print(f"\n{'parameters':>12} {'':>16} {'update ms':>10} {'bare loop ms':>13} {'ratio':>6}")
    for size, updates, choice in (
        (5_000, 40, {}),
        (11_250_000, 8, {}),
        (11_250_000, 8, {"momentum": 0.9}),
        (11_250_000, 8, {"backup": "dbw"}),
    ):
        ours, bare = overhead(size, updates, **choice)
        named = " ".join(f"{key} {value}" for key, value in choice.items())
        print(
            f"{size * 4 / 1e6:>9.2f} MB {named:>16} {ours * 1e3:>10.1f} {bare * 1e3:>13.1f} {ours / bare:>6.2f}",
            flush=True,
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
