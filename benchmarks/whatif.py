"""Does `paceline whatif` foretell the truth? Predicts other policies from a recorded run, then runs them.

    python benchmarks/whatif.py [--steps 80] [--seeds 3]

Four workers that sleep for their samples, so that they fit on few cores; three of them within a factor of 1.6, the
last four times slower than the first, all with 5 % noise and a competing load that comes and goes. Recorded under
equal shares; `off` is the predicted time relative to the real one, `rounds` the same of the median round, which a
busy machine's hiccups move less.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from scaffold import command_line

from paceline import runs
from paceline.data import traces
from paceline.simulate.whatif import of_run

POLICIES = ("level", "dolbie")
SLOWNESS = (1.0, 1.2, 1.6, 4.0)
FASTEST = 1e-3  # seconds per sample
OVERHEAD = 5e-3


def changing(seed: int, rounds: int) -> traces.Trace:
    """Paces with noise, and loads that double a worker's time for a while."""
    rng = np.random.default_rng(seed)
    shape = (rounds, len(SLOWNESS))
    busy, loaded = np.zeros(shape[1], bool), np.empty(shape, bool)
    for t in range(rounds):
        busy = np.where(busy, rng.random(shape[1]) > 0.08, rng.random(shape[1]) < 0.03)
        loaded[t] = busy
    noise = np.exp(0.05 * rng.standard_normal(shape))
    pace = FASTEST * np.array(SLOWNESS) * np.where(loaded, 2.0, 1.0) * noise
    return traces.Trace(pace, np.full(shape, OVERHEAD))


def train(policy: str, trace: Path, steps: int, out: Path) -> runs.Run:
    """One real run, in processes of its own."""
    words = ["train", "--policy", policy, "--slowdown-trace", trace, "--steps", steps, "--out", out]
    code = "import sys; from paceline.cli import run; sys.exit(run(sys.argv[1:]))"
    subprocess.run(
        [sys.executable, "-c", code, *map(str, words)],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    return runs.read(out)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    print(
        f"{'seed':>4} {'policy':10}{'predicted':>11}{'real':>11}{'off':>8}{'rounds':>9}   (equal as recorded)"
    )
    off: list[float] = []
    typical: list[float] = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            trace = traces.write(folder / "pace.csv", changing(seed, options.steps))
            equal = train("equal", trace, options.steps, folder / "equal")
            answer = of_run(equal, POLICIES)
            for policy in POLICIES:
                rounds = train(policy, trace, options.steps, folder / policy).seconds
                real, predicted = float(rounds.sum()), answer.policies[policy].seconds
                off.append(predicted / real - 1)
                typical.append(float(np.median(answer.policies[policy].rounds / rounds)) - 1)
                print(
                    f"{seed:>4} {policy:10}{predicted:>10.2f}s{real:>10.2f}s{off[-1]:>+8.1%}{typical[-1]:>+9.1%}"
                    f"   ({answer.seconds:.2f} s)",
                    flush=True,
                )
    print(f"median rounds: largest difference {max(map(abs, typical)):.1%}")
    print(f"largest difference {max(map(abs, off)):.1%}, mean {np.mean(off):+.1%}")


if __name__ == "__main__":
    main()
