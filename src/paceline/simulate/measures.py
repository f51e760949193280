"""The figures of a simulation: totals, ratios to the oracle, regret and its bound, with confidence intervals."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

import paceline
from paceline.rounds import Array
from paceline.simulate.rounds import Outcome, Played

AT = (1, 10, 40, 100)  # rounds, counted from 1, whose latency is shown


class Estimate(NamedTuple):
    """A mean over realizations and its 95 % confidence interval's half width (0 for a single one)."""

    mean: float
    half: float


def estimate(values: Array) -> Estimate:
    """The estimate from values (R,), by Student's t."""
    return Estimate(*map(float, band(values)))


def band(values: Array) -> tuple[Array, Array]:
    """Mean and half width of the 95 % interval, each (...), from values (..., R)."""
    mean, count = values.mean(-1), values.shape[-1]
    half = np.zeros_like(mean)
    if count > 1:
        half = stats.t.ppf(0.975, count - 1) * values.std(-1, ddof=1) / np.sqrt(count)
    return mean, half


def oracle_ratio(played: Played, outcome: Outcome, start: int = 1) -> Array:
    """Total seconds divided by the oracle's, from round ``start`` on (counted from 1), (R,)."""
    return played.latency[start - 1 :].sum(0) / outcome.oracle[start - 1 :].sum(0)


def regret(played: Played, outcome: Outcome) -> Array:
    """Dynamic regret after each round: the sum of seconds beyond the oracle's, (T, R)."""
    return np.cumsum(played.latency - outcome.oracle, axis=0)


def regret_bound(played: Played, outcome: Outcome) -> Array | None:
    """The bound of DOLBIE, Theorem 1, on these rounds, (R,); None if the theorem does not apply.

    It holds for DOLBIE with steps that never grow, on fractions, with all workers present and plans that take effect
    at once. The paper's constants are corrected:
    L sqrt(T [(1 + P_T) / alpha_T + T min((N-1)/4, 1) + N(N-1)/2 sum_t alpha_t]).
    """
    scenario = outcome.scenario
    applies = (
        scenario.fractional and outcome.whole_cluster and not (scenario.decision_delay or scenario.batches)
    )
    limited = scenario.cluster().limited
    if played.steps is None or not applies or limited or not scenario.known_overhead:
        return None
    if np.any(np.diff(played.steps, axis=0) > 0):  # the proof needs steps that never grow
        return None
    rounds, workers = scenario.rounds, scenario.size
    inside = (1 + outcome.path) / played.steps[-1]
    inside += rounds * min((workers - 1) / 4, 1.0)
    inside += workers * (workers - 1) / 2 * played.steps.sum(0)
    return outcome.steepest * np.sqrt(rounds * inside)


def idle_share(played: Played) -> Array:
    """Portion of the workers' time spent waiting for the slowest, (R,)."""
    paid = played.compute + played.overhead + played.wait
    return played.wait / np.where(paid > 0, paid, 1.0)


def seconds_at(played: Played) -> dict[int, Estimate]:
    """Seconds of the rounds ``AT``, counted from 1, as far as the simulation goes."""
    return {t: estimate(played.latency[t - 1]) for t in AT if t <= len(played.latency)}


def to_json(outcome: Outcome) -> dict[str, Any]:
    """The whole outcome for JSON: every policy's figures, latency and shares, and the scenario."""
    scenario = outcome.scenario
    return {
        "policies": {name: _policy(played, outcome) for name, played in outcome.policies.items()},
        "oracle": {
            "total_seconds": float(outcome.oracle.sum(0).mean()),
            "latency": outcome.oracle[:, 0].tolist(),
            "mean_latency": outcome.oracle.mean(-1).tolist(),
        },
        "scenario": describe(scenario),
        "seed": scenario.seed,
        "version": paceline.__version__,
    }


def _policy(played: Played, outcome: Outcome) -> dict[str, Any]:
    figures = {
        "total_seconds": estimate(played.latency.sum(0)),
        "idle_share": estimate(idle_share(played)),
        "oracle_ratio": estimate(oracle_ratio(played, outcome)),
        "regret": estimate(regret(played, outcome)[-1]),
    }
    bound = regret_bound(played, outcome)
    means, halves = (
        {name: each[part] for name, each in figures.items()}
        | {"seconds_at": {str(t): each[part] for t, each in seconds_at(played).items()}}
        for part in (0, 1)
    )
    return {
        **means,
        "regret_bound": None if bound is None else float(bound.mean()),
        "decide_seconds": played.decide_seconds,
        "confidence_95": halves,
        "latency": played.latency[:, 0].tolist(),
        "mean_latency": played.latency.mean(-1).tolist(),
        "shares": [  # JSON has no NaN
            [None if np.isnan(item) else item for item in row] for row in played.first_shares.tolist()
        ],
        "mean_shares": played.shares.tolist(),
    }


def describe(value: Any) -> Any:
    """A scenario's fields as plain values; a trace is described by its size."""
    if isinstance(value, np.ndarray):
        return {"rounds": len(value), "workers": value.shape[1]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: describe(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"model": type(value).__name__.lower()} | fields if hasattr(value, "stream") else fields
    return [describe(item) for item in value] if isinstance(value, tuple) else value
