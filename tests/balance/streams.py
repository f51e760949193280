"""Rounds on a virtual clock for the tests of single policies."""

import numpy as np

from paceline import Cluster, Round, policies
from paceline.costs import Linear
from paceline.shares import water_level, whole_samples


def play(text, costs, batch, whole=False, observed=None, **cluster):
    """Total seconds of a policy over the oracle's; the loads played; and the last plan and state.

    costs: one Linear a round, (..., n); observed: what is measured of them, if not the same.
    """
    shape = costs[0].overhead.shape
    policy = policies.create(text, Cluster(shape[-1], batch, realizations=shape[:-1], **cluster))
    plan, state = policy.init()
    total = best = 0.0
    played = []
    for t, cost in enumerate(costs):
        loads = whole_samples(plan, batch).astype(float) if whole else plan.shares * batch
        played.append(loads)
        total = total + cost.seconds(loads).max(-1)
        best = best + water_level(cost, batch).seconds
        seen = cost if observed is None else observed[t]
        coming = costs[min(t + 1, len(costs) - 1)]
        seen = Round(loads / batch, seen.seconds(loads), batch, seen.overhead, upcoming=coming)
        plan, state = policy.step(state, seen)
    return np.mean(total / best), np.array(played), plan, state


def constant(slopes, overheads, rounds):
    return [Linear(np.asarray(slopes, float), np.broadcast_to(overheads, np.shape(slopes)))] * rounds


def drifting(rounds, realizations, gammas=(3000, 1700, 1000, 90, 45), overhead=0.02, workers=30, seed=0):
    """Profile A: classes drawn uniformly, logs of speed and overhead AR(1) with rho .9, sd .05 and .1."""
    rng = np.random.default_rng(seed)
    shape = (realizations, workers)
    gamma = rng.choice(np.array(gammas, float), shape)
    rho, out = 0.9, []
    speed, wait = 0.05 * rng.standard_normal(shape), 0.1 * rng.standard_normal(shape)
    for _ in range(rounds):
        out.append(Linear(np.exp(-speed) / gamma, overhead * np.exp(wait)))
        fresh = np.sqrt(1 - rho**2) * rng.standard_normal((2, *shape))
        speed, wait = rho * speed + 0.05 * fresh[0], rho * wait + 0.1 * fresh[1]
    return out


def moving(rounds, every=40, workers=4, quick=1e-3, slow=4e-3):
    """One worker is slow, and every so often another one instead."""
    out = []
    for t in range(rounds):
        slopes = np.full(workers, quick)
        slopes[(t // every) % workers] = slow
        out.append(Linear(slopes, np.zeros(workers)))
    return out
