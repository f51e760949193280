"""How long does it take to deal a round's samples by what they cost, against one sample after another?

For each number of samples and workers: seconds to divide them, and their ratio to the longest-processing-time rule
with a heap in plain Python, both measured in turn within one run. The heap takes all workers to be equal, as it
has to: for unequal ones, who ends soonest depends on the sample. Lengths are lognormal(5, 1), cut to 16 to 1024.
The last columns are the time at which the last worker ends, divided by a bound below which no division ends: of
the heap on equal workers, of Paceline on equal ones, and of Paceline on speeds of 1 to 4.

    python benchmarks/division.py [--sizes 4096x64,1000000x64,...]
"""

from __future__ import annotations

import heapq
import time
from statistics import median

import numpy as np
from scaffold import command_line

from paceline.costs import Array
from paceline.samples.divide import longest_first, lower_bound

SIZES = "256x8,4096x64,65536x64,1000000x64"


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--sizes", default=SIZES)
    heads = (
        "heap (ms)",
        "equal (ms)",
        "uneven (ms)",
        "of the heap",
        "heap/bound",
        "equal/bound",
        "uneven/bound",
    )
    print(f"{'samples x workers':>18s}" + "".join(f"{head:>13s}" for head in heads))
    for size in parser.parse_args().sizes.split(","):
        batch, workers = (int(part) for part in size.split("x"))
        print(f"{size:>18s}" + "".join(f"{figure:13.5g}" for figure in measure(batch, workers)), flush=True)


def measure(batch: int, workers: int) -> tuple[float, ...]:
    """Median milliseconds of the heap, of Paceline on equal and on uneven workers, the ratio, and the qualities."""
    rng = np.random.default_rng(0)
    lengths = np.clip(np.rint(rng.lognormal(5, 1, batch)), 16, 1024)
    costs = lengths + 0.001 * lengths**2
    even, uneven = np.ones(workers), rng.uniform(1, 4, workers)
    ways = (
        lambda: heap(costs, workers),
        lambda: longest_first(costs, even),
        lambda: longest_first(costs, uneven),
    )
    took: list[list[float]] = [[], [], []]
    found = [way() for way in ways]
    for _ in range(3 if batch > 100_000 else 21):
        for times, way in zip(took, ways, strict=True):
            begun = time.perf_counter()
            way()
            times.append(1e3 * (time.perf_counter() - begun))
    quality = [
        float((np.bincount(who, costs, workers) * pace).max()) / lower_bound(costs, pace)
        for who, pace in zip(found, (even, even, uneven), strict=True)
    ]
    middle = [median(times) for times in took]
    return (*middle, middle[2] / middle[0], *quality)


def heap(costs: Array, workers: int) -> np.ndarray:
    """The worker of each sample: the longest first, each to whoever has least."""
    ends = [(0.0, worker) for worker in range(workers)]
    who = np.empty(len(costs), np.int64)
    sizes = costs.tolist()
    for sample in sorted(range(len(sizes)), key=lambda sample: -sizes[sample]):
        end, worker = ends[0]
        who[sample] = worker
        heapq.heapreplace(ends, (end + sizes[sample], worker))
    return who


if __name__ == "__main__":
    main()
