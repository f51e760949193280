"""What does it gain to move work within the round? Real gloo ranks that sleep for each sample.

    python benchmarks/within.py [--group 3] [--scenario noise-0.3] [--policy level] [--steps 60]

Groups of 3 and 6 workers, one of them four times slower (1, 1, 4 ms a sample): constant, the slow role moving on
every 40 steps, each worker's pace scattered anew in every round (log-normal, sd 0.3 and 0.7). A group of 4 at
recorded speeds (ByteDance, jobs ST and SE), and of 4 even ones, whose last column is the cost of it all against
plain DDP. In each scenario every way runs in the same processes on the same speeds, one after the other; the
groups run side by side, since sleeping takes no processor. Share of the bound: the seconds that the sum of the
sleeping speeds would take over those taken, after 20 warm-up steps. "at once": mean portion of the plan that was
run before anything was claimed; "pieces": a worker's, in a round.

Then real computation: two ranks, each on a core, one of which it shares with a neighbour that comes and goes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading

import numpy as np
import throughput

WAYS = (
    "plain DDP, equal",
    "plain DDP, by hand",
    "level",
    "factoring:scheme=self,piece=16",
    "factoring",
    "auto",
)
STEPS = {"constant": 50, "moving": 140, "noise": 70, "recorded": 70, "even": 70}


def base(workers: int) -> np.ndarray:
    return np.array([4.0 if worker % 3 == 2 else 1.0 for worker in range(workers)])


def scenarios(workers: int, steps: int | None, seed: int) -> dict[str, np.ndarray | None]:
    """Milliseconds a sample, (steps, workers), by name."""
    rng = np.random.default_rng(seed)
    count = {kind: steps or most for kind, most in STEPS.items()}
    if workers == 4:
        return {
            "even": np.ones((count["even"], 4)),
            "recorded-ST": throughput.recorded("ST", count["recorded"]),
            "recorded-SE": throughput.recorded("SE", count["recorded"]),
        }
    scattered = {
        f"noise-{sd}": base(workers) * np.exp(sd * rng.standard_normal((count["noise"], workers)))
        for sd in (0.3, 0.7)
    }
    return {
        "constant": np.tile(base(workers), (count["constant"], 1)),
        "moving": throughput.moving(workers, count["moving"]),
        **scattered,
    }


def batch_for(speeds: np.ndarray, seconds: float) -> int:
    """Samples that the workers together run in about so many seconds."""
    return round(seconds * (1e3 / speeds.mean(axis=0)).sum() / 48) * 48


def table(name: str, speeds: np.ndarray, batch: int, ways: list[str]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        results = throughput.measure(speeds, batch, ways, directory)
    kept = slice(throughput.WARM_UP, None)
    ideal = (batch / (1e3 / speeds).sum(axis=1))[kept]
    lines = [
        f"\n{name}: {speeds.shape[1]} sleeping workers, batch {batch}, {len(ideal)} steps measured",
        f"{'':34}{'of the bound':>13}{'ms a step':>11}{'slowest 5%':>12}{'of DDP, equal':>15}",
    ]
    plain = results.get("plain DDP, equal")
    for way in ways:
        seconds = results[way][kept]
        against = f"{seconds.sum() / plain[kept].sum():15.3f}" if plain is not None else ""
        lines.append(
            f"{way:34}{ideal.sum() / seconds.sum():13.1%}{1e3 * seconds.mean():11.1f}"
            f"{1e3 * np.quantile(seconds, 0.95):12.1f}{against}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--group", type=int, action="append", help="3, 4 or 6 workers")
    parser.add_argument("--scenario", action="append")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--round-seconds", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--one-by-one", action="store_true", help="no groups side by side")
    options = parser.parse_args()
    ways = list(options.policy or WAYS)
    printing = threading.Lock()

    def group(workers: int) -> None:
        for name, speeds in scenarios(workers, options.steps, options.seed).items():
            if speeds is None or (options.scenario and name not in options.scenario):
                continue
            text = table(name, speeds, batch_for(speeds, options.round_seconds), ways)
            with printing:
                print(text, flush=True)

    threads = [threading.Thread(target=group, args=(workers,)) for workers in options.group or (3, 6, 4)]
    for thread in threads:
        thread.start()
        if options.one_by_one:
            thread.join()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
