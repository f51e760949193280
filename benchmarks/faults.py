"""What is lost when ranks are killed, freeze, leave and join, and whether the training stays exact?

    python benchmarks/faults.py [--faults 100] [--kinds kill,freeze,leave] [--ranks 4] [--seed 0]

Real gloo ranks train a small float64 model under Adam with a scheduler, with rounds of some 30 ms, and one fault
after another is injected at a random moment, the next soon after all members are there again; each lost rank is
replaced by one that joins. Printed, by kind of fault: the seconds from the round before the fault to the one after
it beyond a usual round, median and worst; the largest difference between the parameters at the end and those of one
process; and the rounds in which a sample was missing or counted twice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))


def main() -> None:
    """Inject the faults and print what became of the run."""
    from support.elastic_jobs import BATCH, FOR_EVER, Told, alone, faults, run

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--kinds", default="kill,freeze,leave")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dead", type=float, default=0.5, help="seconds without a sign of life")
    parser.add_argument("--seconds", type=float, default=600.0, help="that the run may take")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        plan = faults(out, asked.kinds.split(","), asked.faults, 0.05, asked.seed)
        slow = [1, 2, *[1] * (asked.ranks - 2)]
        told: Told = run(
            out,
            asked.ranks,
            FOR_EVER,
            plan,
            restarts=10 * asked.faults,
            nap=1e-4,
            dead=asked.dead,
            seconds=asked.seconds,
            slow=slow,
        )
    ended: dict[int, float] = {}  # each round's, as the first rank told
    loads: dict[int, list[int]] = {}
    for _, line in told.of("round"):
        ended[line["step"]] = min(ended.get(line["step"], line["at"]), line["at"])
        loads[line["step"]] = line["loads"]
    times = [ended[step] for step in sorted(ended)]
    usual = statistics.median(b - a for a, b in pairwise(times))
    print(
        f"{asked.ranks} ranks, {len(times)} rounds of usually {usual * 1e3:.0f} ms, {len(told.faults)} faults"
    )
    for kind in sorted({fault.kind for fault in told.faults}):
        lost = []
        for fault in told.faults:
            if fault.kind == kind:
                after = next((step for step in sorted(ended) if ended[step] > fault.at + usual / 2), None)
                if after and after - 1 in ended:
                    lost.append(max(ended[after] - max(ended[after - 1], fault.at - usual) - usual, 0.0))
        print(
            f"{kind:>8}: {len(lost):3} times, {statistics.median(lost):.2f} s lost, at worst {max(lost):.2f} s"
        )
    wrong = [step for step, each in loads.items() if sum(each) != BATCH]
    ends = [end for _, end in told.of("end")]
    expected = alone(ends[0]["rounds"])
    import torch

    most = max((torch.tensor(end["parameters"], dtype=torch.float64) - expected).abs().max() for end in ends)
    print(
        f"rounds with a sample too few or too many: {len(wrong)}; survivors that ended: {len(told.of('crash'))}"
    )
    print(f"difference to the parameters of one process: {float(most):.1e}")


if __name__ == "__main__":
    main()
