"""What does it gain to move work within the round? Real gloo ranks that sleep for each sample.

    python benchmarks/within.py [--workers 3] [--only noise-0.3] [--policy level] [--all] [--steps 60]

Groups of 3 and 6 workers, one in three of them four times slower (1, 1, 4 ms a sample): constant, the slow role
moving on every 40 steps, each worker's pace random in every round (log-normal, sd 0.3 and 0.7). A group
of 4 at recorded speeds (ByteDance, jobs ST and SE), and of 4 even ones, where the last column is the cost of it
all against plain DDP. "Equal" and "by hand" are plain DDP with an equal split and with one set for the mean speeds
(both measured over the first 40 steps: they take long, and do not change). In each scenario every way runs in the
same processes on the same speeds, one after the other, and one scenario after the other: ranks that wake up
together already share the processors. Share of the bound: the seconds that the sum of the sleeping speeds would
take over those taken, after 20 warm-up steps (the role's first move is among those measured: it cannot be
expected, the later ones can).

--workers, --only and --policy choose (repeat for several), --all adds every other policy; --round-seconds sets the
batch such that the best round takes so long. About 30 minutes as it stands. With --virtual, instead, a few minutes:
the same questions on the virtual clock. Ranks that compute are in compute.py.
"""

from __future__ import annotations

import tempfile

import numpy as np
import throughput
from bound import share_of_the_bound
from scaffold import PLAIN, command_line, count, way_name

from paceline import policies

WAYS = (*PLAIN, "level", "factoring", "auto")
SCHEMES = ("factoring:scheme=factoring", "factoring:scheme=guided", "factoring:scheme=self,piece=16")
PARTS = ("auto", *(f"auto:part={part}" for part in (0.3, 0.5, 0.7, 0.95)))
STEPS = {"constant": 40, "moving": 180, "noise": 60, "recorded": 60, "even": 60}
PLAIN_STEPS = 40
ROUND_SECONDS = 1024 / 3000  # a batch of 768 for 3 workers
SCENARIOS = ("constant", "moving", "noise-0.3", "noise-0.7", "even", "recorded-ST", "recorded-SE")
UNFIT = ("optimum", "equal")  # looks ahead; is plain DDP's


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
    return round(seconds * (1e3 / speeds).sum(axis=1).mean() / 48) * 48


def table(name: str, speeds: np.ndarray, batch: int, ways: list[str]) -> str:
    with tempfile.TemporaryDirectory() as directory:
        results = throughput.measure(speeds, batch, ways, directory, PLAIN_STEPS)
    ideal = batch / (1e3 / speeds).sum(axis=1)
    kept = len(speeds) - throughput.WARM_UP
    lines = [
        f"\n{name}: {speeds.shape[1]} sleeping workers, batch {batch}, {kept} steps measured",
        f"{'':34}{'of the bound':>13}{'ms a step':>11}{'slowest 5%':>12}{'of ' + ways[0]:>25}",
    ]
    first = results[ways[0]]
    for way in ways:
        measured = slice(throughput.WARM_UP, len(results[way]))
        seconds = results[way][measured]
        both = slice(throughput.WARM_UP, min(len(results[way]), len(first)))
        lines.append(
            f"{way:34}{ideal[measured].sum() / seconds.sum():13.1%}{1e3 * seconds.mean():11.1f}"
            f"{1e3 * np.quantile(seconds, 0.95):12.1f}{results[way][both].sum() / first[both].sum():25.3f}"
        )
    return "\n".join(lines)


def virtual() -> str:
    """Shares of the bound where pieces cost 1 ms each; then by the part that a claim is, for unsteady pieces, too."""
    rng = np.random.default_rng(11)
    paces = {
        "constant": np.tile(base(3), (100, 1, 1)),
        "moving": throughput.moving(3, 180)[:, None],
        **{f"noise-{sd}": base(3) * np.exp(sd * rng.standard_normal((100, 6, 3))) for sd in (0.3, 0.7)},
    }
    for job in ("ST", "SE"):
        if (recorded := throughput.recorded(job, 100)) is not None:
            paces[f"recorded-{job}"] = recorded[:, None]
    lines = []
    for unsteady, columns in ((0.0, ("level", "factoring", "auto", *SCHEMES)), (0.0, PARTS), (0.3, PARTS)):
        told = f"each piece's pace scattered by {unsteady:g}" if unsteady else "paces hold within a round"
        lines.append(f"\nvirtual clock, batch 768, {told}")
        lines.append(f"{'':14}" + "".join(f"{column.removeprefix('factoring:'):>22}" for column in columns))
        for name, each in paces.items():
            shares = [share_of_the_bound(way, each / 1e3, 768, unsteady=unsteady) for way in columns]
            lines.append(f"{name:14}" + "".join(f"{share:22.1%}" for share in shares))
    return "\n".join([*lines, *lost_to_moves()])


def lost_to_moves() -> list[str]:
    """Where the slow role moves: what of the time, by auto, the first move costs, the later ones, and the rest."""
    heads = "".join(f"{head:>22}" for head in ("the first move", "later moves", "other rounds"))
    lines = [
        "\nvirtual clock, rounds of 341 ms, auto, the slow role moves; of the time lost to",
        f"{'':14}{heads}",
    ]
    for workers in (3, 6):
        speeds = throughput.moving(workers, STEPS["moving"])
        rounds: list[tuple[float, float]] = []

        def over(ideal: float, took: float, rounds: list[tuple[float, float]] = rounds) -> None:
            rounds.append((ideal, took))

        share_of_the_bound("auto", speeds[:, None] / 1e3, batch_for(speeds, ROUND_SECONDS), over=over)
        ideal, took = np.array(rounds).T
        moved = np.flatnonzero((speeds[1:] != speeds[:-1]).any(1)) + 1 - throughput.WARM_UP
        lost = (took - ideal) / took.sum()
        parts = lost[moved[0]], lost[moved[1:]].sum(), lost.sum() - lost[moved].sum()
        lines.append(f"{workers:2} workers    " + "".join(f"{part:22.1%}" for part in parts))
    return lines


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--workers", type=int, action="append", choices=(3, 4, 6))
    parser.add_argument("--only", action="append", choices=SCENARIOS)
    parser.add_argument("--all", action="store_true", help="every policy")
    parser.add_argument("--policy", type=way_name, action="append")
    parser.add_argument("--steps", type=count)
    parser.add_argument("--round-seconds", type=float, default=ROUND_SECONDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--virtual", action="store_true", help="on the virtual clock")
    options = parser.parse_args()
    if options.steps is not None and options.steps <= throughput.WARM_UP:
        parser.error(f"--steps {options.steps}: expected more than the {throughput.WARM_UP} that warm up")
    if options.virtual and (
        options.workers or options.only or options.all or options.policy or options.steps
    ):
        parser.error(
            "--virtual plays all of it: expected none of --workers, --only, --all, --policy and --steps"
        )
    if options.virtual:
        print(virtual())
        return
    more = [name for name in policies.names() if name not in WAYS and name not in UNFIT] + list(SCHEMES)
    for workers in options.workers or (3, 6, 4):
        for name, speeds in scenarios(workers, options.steps, options.seed).items():
            if speeds is None or (options.only and name not in options.only):
                continue
            ways = list(options.policy or (*WAYS, *(more if options.all else ())))
            print(table(name, speeds, batch_for(speeds, options.round_seconds), ways), flush=True)


if __name__ == "__main__":
    main()
