"""Waiting for fewer, or giving less to who is slow? Half of the workers are three times slower, on the virtual clock.

    python benchmarks/speeds.py [--seeds 2] [--batch 500] [--target 0.2]

DBW takes workers to be exchangeable: whoever comes i-th. Beside it are the same with a model of each worker's own
round trips (``times=workers``), with a gain that needs no losses (``worth=noise``), and balancing, alone and with
each of them. MNIST, 16 workers, rate .08; a sample takes 1 or 3 units times .8 + .2 Exp(1). Needs the shared MNIST;
about half an hour on one core.
"""

from __future__ import annotations

import numpy as np
from scaffold import command_line, count

from paceline.papers.dbw import WORKERS, play
from paceline.papers.dbw_training import reached
from paceline.simulate.timing import Exponential

RULES = (
    *(("equal", "everyone"), ("level", "everyone"), ("equal", "dbw"), ("equal", "dbw:times=workers")),
    *(("equal", "dbw:worth=noise"), ("equal", "dbw:worth=noise,times=workers"), ("level", "dbw")),
    *(("level", "dbw:worth=noise"), ("level", "dbw:worth=noise,times=workers")),
)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--seeds", type=count, default=2)
    parser.add_argument("--batch", type=count, default=500, help="samples of a worker")
    parser.add_argument("--target", type=float, default=0.2, help="mean loss of five updates")
    options = parser.parse_args()
    slow = np.repeat([1.0, 3.0], WORKERS // 2) / options.batch  # seconds a sample
    pace = Exponential(0.2 * slow, 0.8 * slow)
    print(f"{'policy':8}{'backup':34}{'virtual seconds':>16}   of each seed")
    for policy, backup in RULES:
        setting = {"batch": options.batch, "policy": policy, "target": options.target}
        found = []
        for seed in range(options.seeds):
            ran = play(backup, Exponential(1e-3), seed=seed, seconds_per_sample=pace, **setting)[0]
            found.append(reached(ran, options.target))
        each = ", ".join(f"{seconds:.0f}" for seconds in found)
        print(f"{policy:8}{backup:34}{np.mean(found):16.0f}   {each}", flush=True)


if __name__ == "__main__":
    main()
