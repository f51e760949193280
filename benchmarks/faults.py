"""What is lost when ranks are killed, freeze, leave and join, and whether the training stays exact?

    python benchmarks/faults.py [--faults 30] [--ranks 4] [--seed 0] [--kinds kill,...] [--way moves] [--out FILE]
    python benchmarks/faults.py --summary FILE

Real gloo ranks train a small float64 model under Adam with a scheduler, with rounds of some 30 ms, and one fault
after another is injected at a named instant: within a piece, in the backward pass, while sums are under way, after
some ranks have completed the round, in the meeting of the members, while they connect, while a joiner is handed over
the model. Each lost rank is replaced by one that joins.

kill: SIGKILL; freeze: SIGSTOP; thaw: SIGSTOP, and SIGCONT at about the time at which the rank is killed for it;
leave: SIGTERM; fail: a rank's sums fail though nobody is lost; two: two ranks, the second perhaps while the others
mend the round; joiner, joiner freezes: one that joins, while it does; first: the first of the members; stall: the
launcher stands still for 2 s, perhaps with a rank killed meanwhile.

--way: how rounds are divided. planned: as policy level plans; moves: work moves within the round; costs: the same,
by what samples cost, with a mean over tokens; bits: work moves under deterministic=True, and the parameters must be
those of one process to the last bit; local: each rank steps by itself, a round is what lies between two merges, and
the parameters must be those of one process that plays the steps that count.

Each run adds what it found to the file, so that many short runs come to a large one. Printed, by kind and by instant:
the longest time without a completed round, beyond a usual round, median and worst; the largest difference between
the parameters at the end and those of one process; the rounds in which a sample was missing or counted twice; and the
survivors that ended.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from scaffold import command_line, counter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
LOCAL_STEPS = 5  # of every rank between two merges
AFTER_SECONDS = 4.0  # a fault, in which a time without a round counts as its doing


def injected(asked: argparse.Namespace) -> dict[str, Any]:
    """One run, and what became of it."""
    import torch

    from support.elastic_local import counted, played, survive
    from support.elastic_phases import CLAIMS, KINDS, ROUND, phased
    from support.elastic_runs import BATCH, FOR_EVER, WAYS, Told, run, stayed

    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory)
        kinds = tuple(asked.kinds.split(",")) if asked.kinds else KINDS
        slow = [1, 2, *[1] * (asked.ranks - 2)]
        way, local = WAYS[asked.way], asked.way == "local"
        if local:  # of five steps, so that an epoch has whole intervals
            way = way._replace(options={**way.options, "job": survive, "every": LOCAL_STEPS})
        instants = ROUND + CLAIMS if "policy" in way.options else ROUND
        inject = phased(out, asked.faults, seed=asked.seed, kinds=kinds, dead=asked.dead, phases=instants)
        show = counter("faults")

        def plan(keeper: Any, told: Told, newest: int) -> None:
            inject(keeper, told, newest)
            show(len(told.faults), asked.faults)

        told: Told = run(
            out,
            asked.ranks,
            FOR_EVER,
            plan,
            restarts=10 * asked.faults,
            nap=2e-4,
            dead=asked.dead,
            seconds=asked.seconds,
            slow=slow,
            phases=True,
            **way.options,
        )
    ended: dict[int, float] = {}  # each round's, as the first rank told
    plans: dict[int, list[Any]] = {}
    unlike = 0
    for _, line in told.of("round"):
        ended[line["step"]] = min(ended.get(line["step"], line["at"]), line["at"])
    for line in stayed(told):
        both = [line["loads"], line["shares"]]
        unlike += plans.setdefault(line["step"], both) != both
    gaps = list(pairwise(sorted(ended.values())))
    usual = statistics.median(b - a for a, b in gaps)
    faults = sorted(told.faults, key=lambda fault: fault.at)
    until = [after.at for after in faults[1:]] + [float("inf")]
    found = []
    for fault, end in zip(faults, until, strict=True):
        # A time without a round in which the next fault came is that one's, but where this one came in it, too.
        own = [
            (b - a, b)
            for a, b in gaps
            if b > fault.at and a < fault.at + AFTER_SECONDS and (a <= fault.at or b <= end)
        ]
        longest, over = max(own, default=(0.0, 0.0))
        found.append([fault.kind, fault.phase, max(longest - usual, 0.0), *parts(told, fault, over)])
    ends = [end for _, end in told.of("end")]
    most, batch = 0.0, BATCH * (LOCAL_STEPS if local else 1)
    if ends:
        expected = played(counted(told)) if local else way.expected(ends[0]["rounds"])
        for end in ends:
            difference = torch.tensor(end["parameters"], dtype=torch.float64) - expected
            most = max(most, float(difference.abs().max()))
    return {
        "seed": asked.seed,
        "ranks": asked.ranks,
        "way": asked.way,
        "load": os.getloadavg()[0],
        "rounds": len(ended),
        "usual": usual,
        "faults": found,
        "wrong": sum(sum(loads) != batch for loads, _ in plans.values()) + len(ended) - max(ended) - 1,
        "unlike": unlike + len({end["rounds"] for end in ends}) - 1,
        "crashes": [line["words"] for _, line in told.of("crash")],
        "difference": most,
    }


def parts(told: Any, fault: Any, over: float) -> list[float]:
    """Seconds from a fault until the launcher saw it, from then until all members could go on, and from then until
    the round ended at ``over``: in these the samples of the lost are run. None where nobody was lost."""
    seen = [at for who, at in told.seen.items() if who == fault.who and at <= over]
    mended = [
        line
        for _, line in told.of("mended")
        if seen and seen[0] - 1.0 < line["at"] <= over and line["within"]
    ]
    after = [line for line in mended if fault.place not in line["members"] and line["at"] > fault.at]
    first = min((line["membership"] for line in after), default=-1)
    settled = max((line["at"] for line in after if line["membership"] == first), default=0.0)
    return [seen[0] - fault.at, settled - seen[0], over - settled] if after else []


def summary(parts: list[dict[str, Any]]) -> None:
    """All runs together."""
    every = [fault for part in parts for fault in part["faults"]]
    ranks = sorted({part["ranks"] for part in parts})
    usual = statistics.median(part["usual"] for part in parts)
    load = statistics.median(part["load"] for part in parts)
    print(
        f"{len(every)} faults in {len(parts)} runs of {', '.join(map(str, ranks))} ranks, "
        f"{sum(part['rounds'] for part in parts)} rounds of usually {usual * 1e3:.0f} ms, at a load of {load:.1f}"
    )
    for place, what in ((0, "kind"), (1, "instant")):
        for name in sorted({fault[place] for fault in every}):
            lost = [fault[2] for fault in every if fault[place] == name]
            print(
                f"{what:>8} {name:<15} {len(lost):4} times, {statistics.median(lost):.2f} s lost, at worst "
                f"{max(lost):.2f} s"
            )
    for kind in ("kill", "freeze"):
        whole = [fault for part in parts for fault in part["faults"] if fault[0] == kind and len(fault) > 3]
        for place, what in enumerate(
            ("until it was seen", "until all could go on", "to run what was missing"), 3
        ):
            if whole:
                each = [fault[place] for fault in whole]
                text = f"{statistics.median(each):.2f} s, at worst {max(each):.2f} s"
                print(f"{kind:>8} {what:<24} {len(each):4} times, {text}")
    print(
        f"rounds with a sample too few or too many: {sum(part['wrong'] for part in parts)}; unlike plans or ends: "
        f"{sum(part['unlike'] for part in parts)}; survivors that ended: {sum(len(p['crashes']) for p in parts)}; "
        f"largest difference to the parameters of one process: {max(part['difference'] for part in parts):.1e}"
    )


def main() -> None:
    """Inject the faults, or sum up what was found."""
    parser = command_line(__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--kinds", default="", help="separated by commas; all where left out")
    parser.add_argument("--way", default="planned", choices=["planned", "moves", "costs", "bits", "local"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dead", type=float, default=0.5, help="seconds without a heartbeat")
    parser.add_argument("--seconds", type=float, default=600.0, help="that the run may take")
    parser.add_argument("--out", type=Path, help="a file of JSON lines to add to")
    parser.add_argument("--summary", type=Path, help="print what this file holds, and inject nothing")
    asked = parser.parse_args()
    from support.elastic_phases import KINDS

    if asked.ranks < 3 or asked.faults < 1:
        parser.error(f"--ranks {asked.ranks} --faults {asked.faults}: expected 3 ranks and 1 fault, or more")
    if unknown := sorted({*filter(None, asked.kinds.split(","))} - {*KINDS}):
        parser.error(f"--kinds {unknown[0]} is unknown; expected some of {', '.join(KINDS)}")
    if asked.summary is not None and not asked.summary.is_file():
        parser.error(f"--summary {asked.summary}: no such file; expected what --out has written")
    if asked.summary is not None:
        summary([json.loads(line) for line in asked.summary.read_text().splitlines()])
        return
    found = injected(asked)
    if asked.out is not None:
        with asked.out.open("a") as file:
            file.write(json.dumps(found) + "\n")
    summary([found])


if __name__ == "__main__":
    main()
