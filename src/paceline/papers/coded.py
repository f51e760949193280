"""Sun et al. (2019), "Heterogeneous Coded Computation across Heterogeneous Workers": Figs. 2, 3 and 4.

The printed setting is u uniform on [1, 5] per ms, a = 1 / u, L = 1e5. Two other settings explain the printed
numbers and are shown beside it: L = 1e4 (Fig. 2's seconds) and u either 1 or 5 (Fig. 3's reductions).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from paceline.coded import ShiftedExponential, plan, random_problem
from paceline.coded.delay import Array
from paceline.coded.simulate import Completion, simulate
from paceline.commands import installation
from paceline.errors import PacelineError, number
from paceline.papers import Found, table
from paceline.simulate.plots import figure


class Setting(NamedTuple):
    """The distribution of random clusters (Sun et al., setting)."""

    label: str
    rows: float
    speeds: Sequence[float] | None = None


PRINTED = Setting("u in [1, 5], L = 1e5 (as printed)", 1e5)
SHORT = Setting("u in [1, 5], L = 1e4", 1e4)
TWO_POINT = Setting("u = 1 or 5, L = 1e5", 1e5, (1.0, 5.0))

METHODS = {
    "uncoded": "-",
    "uniform": "-",
    "simple": "--",
    "iterated": "-.",
    "exact": ":",
    "probabilistic": "-",
}
PROPOSED = ("simple", "iterated", "probabilistic")


def _runs(setting: Setting, masters: int, workers: int, draws: int, runs: int) -> dict[str, list[Completion]]:
    """Completion times of every method on the same clusters."""
    times: dict[str, list[Completion]] = {method: [] for method in METHODS}
    for seed in range(draws):
        rng = np.random.default_rng(seed)
        problem = random_problem(masters, workers, setting.rows, rng, setting.speeds)
        for method in METHODS:
            coded = method != "uncoded"
            made = plan(problem, method if coded else "uniform", coded)
            times[method].append(simulate(made, runs, np.random.default_rng([seed, masters])))
    return times


def _reached(times: dict[str, list[Completion]]) -> dict[str, float]:
    """Portions of the clusters in which every proposed algorithm saves as much as the paper claims."""
    mean = {method: np.array([each.mean().value for each in drawn]) for method, drawn in times.items()}
    slowest = np.max([mean[method] for method in PROPOSED], axis=0)
    return {
        "80 % less than uncoded": float((slowest <= 0.2 * mean["uncoded"]).mean()),
        "49 % less than coded uniform": float((slowest <= 0.51 * mean["uniform"]).mean()),
    }


def fig2(quick: bool) -> Found:
    """CDF of the completion time, 2 masters and 20 workers (Sun et al., Fig. 2)."""
    draws, runs = (4, 5_000) if quick else (40, 100_000)
    picture = figure(2)
    rows: list[dict[str, Any]] = []
    seconds: dict[str, dict[str, float]] = {}
    for axes, setting in zip(picture.axes, (PRINTED, SHORT), strict=True):
        times = _runs(setting, 2, 20, draws, runs)
        seconds[setting.label] = {}
        for method, drawn in times.items():
            every = Completion(np.concatenate([each.times for each in drawn]) / 1000)
            t, portion = every.cdf(200)
            axes.plot(t, portion, METHODS[method], label=method)
            rows += table(setting=setting.label, method=method, seconds=t, cdf=portion)
            worst = [max(each.quantile(0.98, m).value for m in range(2)) for each in drawn]
            seconds[setting.label][method] = float(np.mean(worst)) / 1000
        axes.set(title=setting.label, xlabel="completion time of both tasks (s)", ylabel="CDF", ylim=(0, 1))
        axes.set_xlim(0, seconds[setting.label]["uncoded"])
        axes.legend()
    short, printed = seconds[SHORT.label], seconds[PRINTED.label]
    return Found(
        picture,
        rows,
        claim="with success probability 0.98 the dedicated assignments all take 1.40 s, the probabilistic 1.38 s",
        ours=f"the slower master's 98 % quantile with L = 1e5: iterated {printed['iterated']:.2f} s, exact "
        f"{printed['exact']:.2f} s, probabilistic {printed['probabilistic']:.2f} s; with L = 1e4: "
        f"{short['iterated']:.3f}, {short['exact']:.3f} and {short['probabilistic']:.3f} s",
        why="the printed seconds fit L = 1e4, a tenth of the printed rows; the order of the methods holds in both",
        setting=f"2 masters, 20 workers, a = 1 / u, {draws} clusters, {runs} runs of each",
        figures={"seconds_98": seconds},
    )


def fig3(quick: bool) -> Found:
    """Mean time of each master and of the system, 4 masters and 50 workers (Sun et al., Fig. 3)."""
    draws, runs = (3, 5_000) if quick else (60, 20_000)
    picture = figure(2)
    rows: list[dict[str, Any]] = []
    system: dict[str, dict[str, float]] = {}
    reached: dict[str, dict[str, float]] = {}
    for axes, setting in zip(picture.axes, (PRINTED, TWO_POINT), strict=True):
        times = _runs(setting, 4, 50, draws, runs)
        system[setting.label] = {}
        for i, (method, drawn) in enumerate(times.items()):
            masters = (0, 1, 2, 3, None)  # none: the system
            bars = [float(np.mean([each.mean(m).value for each in drawn])) / 1000 for m in masters]
            system[setting.label][method] = bars[-1]
            axes.bar(np.arange(5) + (i - 2.5) * 0.14, bars, 0.14, label=method)
            groups = ("1", "2", "3", "4", "system")
            rows += table(setting=setting.label, method=method, group=groups, mean_seconds=bars)
        reached[setting.label] = _reached(times)
        axes.set_xticks(range(5), ["master 1", "2", "3", "4", "system"])
        axes.set(title=setting.label, ylabel="mean completion time (s)")
        axes.margins(y=0.2)
        axes.legend(loc="upper left", ncols=3)

    def less(setting: Setting, than: str) -> float:
        means = system[setting.label]
        return 100 * (1 - max(means[m] for m in PROPOSED) / means[than])

    def sentence(setting: Setting) -> str:
        share = 100 * reached[setting.label]["49 % less than coded uniform"]
        return (
            f"{less(setting, 'uncoded'):.0f} % less than uncoded and {less(setting, 'uniform'):.0f} % less than "
            f"coded uniform on average (49 % or more in {share:.0f} % of the clusters)"
        )

    means = system[PRINTED.label]
    return Found(
        picture,
        rows,
        claim="every proposed algorithm takes over 80 % less than uncoded and over 49 % less than coded uniform",
        ours="as printed: "
        + ", ".join(f"{method} {value:.2f} s" for method, value in means.items())
        + f"; {sentence(PRINTED)}; with u = 1 or 5: {sentence(TWO_POINT)}",
        why="clusters differ widely; with u drawn from the two values 1 and 5 the printed reductions are common, "
        "with u from the interval [1, 5] they are not",
        setting=f"4 masters, 50 workers, a = 1 / u, L = 1e5, {draws} clusters, {runs} runs of each",
        figures={"system_mean_seconds": system, "portion_of_clusters": reached},
    )


class Iterate(NamedTuple):
    """z_r: probabilities and loads, shape (M, N), and their completion time in ms."""

    k: Array
    loads: Array
    t: float


def successive(
    delay: ShiftedExponential, rows: Array, alpha: float = 1e-3, stop: float = 1e-6
) -> Iterator[Iterate]:
    """Algorithm 3: yields z_0, z_1, ... from k = 1 / M with its best loads, until they are stationary.

    It serves for comparison: ``probabilistic`` reaches the same optimum as one linear programme (docs/coded.md has
    the proof). Needs cvxpy.

    alpha: decreasing ratio of the step sizes gamma_{r+1} = gamma_r (1 - alpha gamma_r), in (0, 1).
    stop: the iterate with |1 - t' / t| below it is the last; 0 never stops.

    Loads are in units of the largest L times M / N, and times accordingly: with unscaled rows the solver's tolerance
    is larger than the constraint's slack, and its answers are infeasible by tens of percent. Sun et al.,
    eqs. (10), (11), Lemma 2, Alg. 3, lines 1 to 6.
    """
    try:
        import cvxpy as cp
    except ImportError as error:
        raise PacelineError(
            f"the successive convex approximation needs cvxpy; {installation('sca')}, or choose "
            "'probabilistic', which finds the same optimum without it"
        ) from error
    number("alpha", alpha, "a decreasing ratio between 0 and 1", lambda alpha: 0 < alpha < 1)
    masters, workers = delay.shape
    phi, rate = delay.peak()
    load_unit = float(rows.max()) * masters / workers
    time_unit = load_unit * float(np.median(phi))
    u = delay.u * time_unit / load_unit
    weight = np.exp(np.minimum(delay.u * delay.a, 500.0))
    need = rows / load_unit

    k = np.full((masters, workers), 1 / masters)
    t = float((rows * masters / rate.sum(1)).max()) / time_unit
    loads = t * time_unit / phi / load_unit
    gamma = 1.0

    k_next = cp.Variable((masters, workers), nonneg=True)
    l_next = cp.Variable((masters, workers), nonneg=True)
    late = cp.Variable((masters, workers), nonneg=True)  # at least l exp(-u t / l)
    t_next = cp.Variable(nonneg=True)
    k_at, l_at = (cp.Parameter((masters, workers)) for _ in range(2))  # slopes at z_r
    constant = cp.Parameter(masters)
    t_slope = cp.Parameter(masters)
    # g~ + e^{ua} h~ of Lemma 2: the convex parts stay, the concave ones are linear at z_r
    convex = (cp.square(k_next) + cp.square(l_next)) / 2 + cp.multiply(weight, cp.square(k_next + late)) / 2
    linear = cp.multiply(k_at, k_next) + cp.multiply(l_at, l_next)
    shortfall = cp.sum(convex - linear, axis=1) - t_slope * t_next + constant + need
    problem = cp.Problem(
        cp.Minimize(t_next),
        [
            shortfall <= 0,
            cp.sum(k_next, axis=0) <= 1,
            cp.constraints.ExpCone(-cp.multiply(u, t_next * np.ones((masters, workers))), l_next, late),
        ],
    )
    while True:
        yield Iterate(k.copy(), loads * load_unit, t * time_unit)
        e = np.exp(-u * t / np.maximum(loads, 1e-300))
        # g- = (k + l)^2 / 2 and h- = (k^2 + l^2 e^{-2ut/l}) / 2
        k_slope = (k + loads) + weight * k
        l_slope = (k + loads) + weight * e * e * (loads + u * t)
        time_slope = weight * -u * loads * e * e
        minus = (k + loads) ** 2 / 2 + weight * (k * k + (loads * e) ** 2) / 2
        k_at.value, l_at.value = k_slope, l_slope
        t_slope.value = time_slope.sum(1)
        constant.value = (k_slope * k + l_slope * loads + time_slope * t - minus).sum(1)
        with warnings.catch_warnings():
            # Near the fixed point the solver warns that it is inaccurate.
            warnings.simplefilter("ignore", UserWarning)
            problem.solve(solver=cp.CLARABEL)
        if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE):
            raise PacelineError(
                f"the convex approximation was not solved ({problem.status}); choose 'probabilistic'"
            )
        k = k + gamma * (np.clip(np.asarray(k_next.value), 0, 1) - k)
        loads = loads + gamma * (np.maximum(np.asarray(l_next.value), 0) - loads)
        before, t = t, t + gamma * (float(np.asarray(t_next.value)) - t)
        gamma *= 1 - alpha * gamma
        if abs(1 - t / before) < stop:
            yield Iterate(k, loads * load_unit, t * time_unit)
            return


def fig4(quick: bool) -> Found:
    """Successive convex approximation for several decreasing ratios alpha (Sun et al., Fig. 4)."""
    masters, workers, iterations = (2, 12, 25) if quick else (4, 50, 200)
    problem = random_problem(masters, workers, PRINTED.rows, np.random.default_rng(0))
    delay = problem.delay
    assert isinstance(delay, ShiftedExponential)
    levels = {
        method: float(plan(problem, method).t_star.max()) for method in ("iterated", "exact", "probabilistic")
    }
    picture = figure(1, width=7)
    axes = picture.axes[0]
    rows: list[dict[str, Any]] = []
    last: dict[str, float] = {}
    for alpha in (0.1, 0.01, 0.001):
        trace = [z.t for z in islice(successive(delay, problem.rows, alpha, stop=0), iterations + 1)]
        axes.plot(np.array(trace) / 1000, label=f"SCA, alpha = {alpha:g}")
        last[f"{alpha:g}"] = trace[-1]
        below = next((i for i, t in enumerate(trace) if t < levels["iterated"]), None)
        last[f"{alpha:g} below iterated after"] = -1 if below is None else below
        rows += table(alpha=alpha, iteration=range(len(trace)), t_ms=trace)
    for method, style in (("iterated", "--"), ("probabilistic", ":")):
        label = "linear programme" if method == "probabilistic" else "iterated greedy"
        axes.axhline(levels[method] / 1000, color="black", linestyle=style, label=label)
    axes.set(xlabel="iteration", ylabel="t (s)", title=f"{masters} masters, {workers} workers")
    axes.legend()
    crossed = last["0.001 below iterated after"]
    return Found(
        picture,
        rows,
        claim="with a proper alpha the SCA converges after 100 iterations and outperforms the iterated greedy",
        ours=f"alpha = 0.001: {last['0.001']:.1f} ms after {iterations} iterations, "
        + (
            f"below the iterated greedy from iteration {crossed:.0f}"
            if crossed >= 0
            else "never below the greedy"
        )
        + f"; alpha = 0.1 ends at {last['0.1']:.1f}, iterated greedy {levels['iterated']:.1f}, exact dedicated "
        f"{levels['exact']:.1f}, linear programme {levels['probabilistic']:.1f} ms",
        why="the SCA's problem is a linear programme (docs/coded.md), so one solve gives its limit",
        setting=f"{masters} masters, {workers} workers, u in [1, 5], a = 1 / u, L = 1e5, one cluster",
        figures={"milliseconds": {**levels, **last}},
    )
