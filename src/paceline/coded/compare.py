"""Which code suits a plan: mean completion times by Monte Carlo, and a warning where another would be
faster.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paceline.coded.coded_plan import CodedPlan, finish
from paceline.coded.codes import LT
from paceline.coded.simulate import simulate
from paceline.errors import PacelineError, among

MESSAGES = 8  # parts in which a worker delivers under "chunked" and "lt"
LT_BLOCKS = 100
REDUNDANCY = 2.0  # of a rateless plan: the fast workers must not run out of rows
WORSE = 0.05  # portion by which another code must be faster before it is worth a word


def stretched(made: CodedPlan, redundancy: float) -> CodedPlan:
    """The same plan with more rows for everyone, for codes that use what a straggler has finished.

    redundancy: coded rows over L. Raises PacelineError below 1.
    """
    if not redundancy >= 1:
        raise PacelineError(f"redundancy={redundancy:g}: expected at least 1, the rows themselves")
    return replace(made, loads=made.loads * (redundancy / made.redundancy)[:, None])


def mean_times(made: CodedPlan, runs: int = 4000, seed: int = 0) -> dict[str, float]:
    """Mean system time in ms of each code on the plan's workers, every one on the same draws' seed.

    mds: the plan as it is; chunked: the same loads delivered in 8 parts; lt: rateless, redundancy 2, in 8
    parts, with the overhead measured for 100 blocks; uncoded: the same assignment without redundancy.
    """

    def mean(of: CodedPlan, messages: int = 1, overhead: float = 0.0) -> float:
        done = simulate(of, runs, np.random.default_rng(seed), messages, overhead)
        return done.mean().value

    times = {
        "mds": mean(made),
        "chunked": mean(made, MESSAGES),
        "lt": mean(stretched(made, REDUNDANCY), MESSAGES, LT(LT_BLOCKS, 2 * LT_BLOCKS).overhead()),
    }
    if set(np.unique(made.probability)) <= {0.0, 1.0}:
        phi, rate = made.problem.delay.peak()
        times["uncoded"] = mean(finish(made.problem, made.assign, made.probability, False, phi, rate))
    return times


def advice(made: CodedPlan, code: str) -> list[str]:
    """A sentence where the code would be slower on this plan than the best one by more than 5 %, else
    nothing.

    code: "mds", "chunked", "lt" or "uncoded".
    """
    times = mean_times(made)
    if code not in times:
        raise PacelineError(f"code={code!r}: expected one of {among(code, times)}")
    best = min(times, key=lambda name: times[name])
    if times[code] <= times[best] * (1 + WORSE):
        return []
    return [
        f"{code!r} takes {times[code]:.4g} ms on average with this plan, {best!r} {times[best]:.4g} ms; "
        f"consider {best!r}"
    ]
