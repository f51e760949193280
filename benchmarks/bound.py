"""What a policy makes of given paces on the virtual clock, as a share of what no division can go beyond."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from paceline import policies
from paceline.rounds import Array, Cluster, PieceTimes, Round
from paceline.shares import whole_samples
from paceline.simulate.pieces import PlayedRound, play
from paceline.simulate.scenario import PIECE_SECONDS

WARM_UP = 20  # rounds


def share_of_the_bound(
    policy: str,
    paces: Array,
    batch: int,
    piece: float = PIECE_SECONDS,
    unsteady: float = 0.0,
    played: Callable[[PlayedRound], object] | None = None,
    over: Callable[[float, float], object] | None = None,
) -> float:
    """Seconds at the sum of all speeds over those taken, after the warm-up.

    paces: seconds per sample, (rounds, realizations, n). piece: seconds that each piece costs beyond its samples,
    a whole round as planned among them. unsteady: sd of the logarithm of each piece's own pace, where a round is
    run in pieces. played: called with each measured round that was run in pieces. over: called, for each measured
    round, with the seconds that it would have taken at the sum of all speeds and with those that it took, each added
    over the realizations.

    Raises PacelineError for an unknown policy.
    """
    rng = np.random.default_rng(5)
    _, realizations, workers = paces.shape
    cluster = Cluster(workers, batch, realizations=(realizations,))
    chosen = policies.create(policy, cluster)
    plan, state = chosen.init()
    ideal = taken = 0.0
    for t, pace in enumerate(paces):
        loads = whole_samples(plan, batch, cluster.least, cluster.most)
        seconds, pieces = piece + loads * pace, np.ones_like(loads)
        times = PieceTimes(np.full(pace.shape, piece), *np.zeros((2, *pace.shape)))
        if plan.piece_plan is not None:
            ran = play(
                plan.piece_plan,
                loads,
                pace,
                np.zeros(pace.shape),
                piece,
                rng=rng,
                unsteady=unsteady,
            )
            loads, seconds, pieces = ran.loads, ran.seconds, ran.pieces
            if played is not None and t >= WARM_UP:
                played(ran)
            times = times._replace(expected=ran.expected, strayed=ran.strayed, pace=ran.pace)
        if t >= WARM_UP:
            best, took = float((batch / (1 / pace).sum(-1)).sum()), float(seconds.max(-1).sum())
            ideal, taken = ideal + best, taken + took
            if over is not None:
                over(best, took)
        plan, state = chosen.step(
            state, Round(loads / batch, seconds, batch, piece * pieces.astype(float), pieces=times)
        )
    return ideal / taken
