"""DOLBIE's Figs. 3 to 5 and 9 to 11: seconds of each round, regret, loads and waiting of workers; and its clusters.

Thirty workers, each with one of five processors at random, and a global batch of 256; paces and overheads drift. The
paper's traces are not public. "measured" is built from published throughputs of CIFAR-10 training; A and B are
invented profiles, with speeds and overheads in round numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from paceline.papers import Found, table
from paceline.rounds import Array
from paceline.simulate import Outcome, Scenario, WorkerClass, run
from paceline.simulate.measures import estimate, idle_share, oracle_ratio, regret, regret_bound
from paceline.simulate.plots import bands, figure
from paceline.simulate.rounds import Played
from paceline.simulate.timing import Ar1

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PROCESSORS = ("V100", "P100", "T4", "Cascade Lake", "Broadwell")
COLOURS = ("tab:green", "tab:olive", "tab:blue", "tab:orange", "tab:red")
WORKERS, BATCH = 30, 256
PACE_SD, OVERHEAD_SD = 0.05, 0.1  # of the logarithms; correlation 0.9 from round to round

# ResNet-18 on CIFAR-10, seconds per sample and seconds per step: V100 and P100 fitted to the throughputs measured for
# Gavel (MIT licence), T4 read from a figure of Sia's; two Xeons take 21 to 32 times as long as a P100 for a sample.
RESNET_SAMPLE = np.array([0.277e-3, 0.446e-3, 0.664e-3, 21 * 0.446e-3, 32 * 0.446e-3])
RESNET_STEP = np.array([24.2e-3, 18.9e-3, 17.7e-3, 18.9e-3, 18.9e-3])
LINK = 56e9 / 8  # bytes per second to the parameter server: InfiniBand of those machines' time


class Network(NamedTuple):
    """A model's size: parameters, multiply-adds per sample of 32 x 32 pixels, layers with weights."""

    title: str
    parameters: int
    work: float
    layers: int


NETWORKS = {
    "lenet5": Network("LeNet-5", 62_006, 0.65e6, 5),
    "resnet18": Network("ResNet-18", 11_173_962, 556e6, 18),
    "vgg16": Network("VGG-16", 14_728_266, 313e6, 16),
}
LEAST_WORK = 0.02  # of ResNet-18's seconds per sample: the time to load a sample, for any network

POLICIES = {
    "EQU": "equal",
    "OGD": "ogd:rate=0.001",
    "LB-BSP": "lbbsp:delta=5,rounds=5",
    "ABS": "abs:window=5",
    "DOLBIE": "dolbie:alpha=0.001",
    "level": "level",
    "OPT": "optimum",
}
VARIANTS = {"DOLBIE, steps may grow": "dolbie:alpha=0.001,monotone=false", "ABS, x / T": "abs:reading=share"}
RIVALS = ("EQU", "OGD", "LB-BSP", "ABS")
CLUSTER = (
    "30 workers of 5 processors at random, B = 256 in fractions, pace and overhead AR(1) 0.9, sd 5 % and 10 %"
)
DRAWN = "the paper's traces are not public and its figures' numbers are of one draw of them; "


def measured(network: str, realizations: int = 1, rounds: int = 100) -> Scenario:
    """The cluster of measured throughputs, training this network.

    Seconds per sample grow with its multiply-adds, seconds per step with its layers; its parameters are sent twice.
    """
    this, resnet = NETWORKS[network], NETWORKS["resnet18"]
    sample = RESNET_SAMPLE * max(this.work / resnet.work, LEAST_WORK)
    overhead = RESNET_STEP * this.layers / resnet.layers + 2 * 4 * this.parameters / LINK
    return _scenario(f"measured, {this.title}", sample, overhead, realizations, rounds)


def profile(name: str, realizations: int = 1, rounds: int = 100) -> Scenario:
    """Profile "A" or "B"."""
    speeds = {"A": (3000, 1700, 1000, 90, 45), "B": (3000, 1700, 1000, 40, 12)}[name]
    overheads = {"A": (0.02,) * 5, "B": (0.035, 0.03875, 0.0425, 0.04625, 0.05)}[name]
    sample = 1 / np.array(speeds, float)
    return _scenario(f"profile {name}", sample, np.array(overheads), realizations, rounds)


def settings(realizations: int) -> dict[str, Scenario]:
    """All three clusters, for experiments on ResNet-18 (DOLBIE, setting)."""
    return {
        "measured": measured("resnet18", realizations),
        "A": profile("A", realizations),
        "B": profile("B", realizations),
    }


def _scenario(
    name: str, sample: np.ndarray, overhead: np.ndarray, realizations: int, rounds: int
) -> Scenario:
    classes = tuple(
        WorkerClass(Ar1(s, 0.9, PACE_SD), Ar1(c, 0.9, OVERHEAD_SD), name=processor)
        for processor, s, c in zip(PROCESSORS, sample.tolist(), overhead.tolist(), strict=True)
    )
    return Scenario(
        classes,
        draw=WORKERS,
        global_batch=BATCH,
        rounds=rounds,
        realizations=realizations,
        fractional=True,
        name=name,
    )


def compare(realizations: int) -> dict[str, Outcome]:
    """All policies in all settings, and the variants that explain the printed numbers."""
    names = list((POLICIES | VARIANTS).values())
    return {label: run(what, names) for label, what in settings(realizations).items()}


def less(outcome: Outcome, than: str, what: str = "DOLBIE") -> float:
    """Percent by which a policy's round 40 is shorter than another's, on average over the realizations."""
    named = POLICIES | VARIANTS
    mine, theirs = (outcome.policies[named[name]].latency[39].mean() for name in (what, than))
    return float(100 * (1 - mine / theirs))


def _reductions(outcome: Outcome, what: str = "DOLBIE") -> str:
    return "/".join(f"{less(outcome, rival, what):.0f}" for rival in RIVALS)


def _curves(
    realizations: int, column: str, says: str, of: Callable[[Played, Outcome], Array]
) -> tuple[dict[str, Outcome], Figure, list[dict[str, Any]]]:
    """The result of ``compare``, and ``of`` applied to each policy's rounds: drawn, and as a table."""
    outcomes, picture, rows = compare(realizations), figure(3, width=5), list[dict[str, Any]]()
    for axes, (label, outcome) in zip(picture.axes, outcomes.items(), strict=True):
        played = {name: of(outcome.policies[policy], outcome) for name, policy in POLICIES.items()}
        for name, (mean, half) in bands(axes, played).items():
            values = {column: mean, "half_95": half}
            rows += table(setting=label, policy=name, round=range(1, len(mean) + 1), **values)
        axes.set(title=outcome.scenario.name, xlabel="round", ylabel=says)
    return outcomes, picture, rows


def _latencies(name: str, realizations: int) -> Found:
    outcomes, picture, rows = _curves(realizations, "seconds", "seconds", lambda played, _: played.latency)
    for axes in picture.axes:
        axes.set_ylim(0, None)
    many = f"{realizations} realizations" if realizations > 1 else "one realization, seed 0"
    percents = {
        label: {rival: less(outcome, rival) for rival in RIVALS} for label, outcome in outcomes.items()
    }
    growing = {label: _reductions(outcome, "DOLBIE, steps may grow") for label, outcome in outcomes.items()}
    return Found(
        picture,
        rows,
        claim="by round 40 DOLBIE's round is 89.6/82.2/67.4/47.6 % shorter than with EQU/OGD/LB-BSP/ABS"
        + ("" if name == "fig3" else " (one realization); ordering over 100 realizations"),
        ours="; ".join(
            f"{label}: {_reductions(o)} %, level {_reductions(o, 'level')} %" for label, o in outcomes.items()
        ),
        why=DRAWN
        + "as printed, DOLBIE's step can only shrink, so it stops improving early; with steps that may grow "
        f"again it reaches {growing['measured']} % (measured), {growing['A']} % (A), {growing['B']} % (B). No "
        "division is faster than the workers' overhead. level is optimal after two rounds",
        setting=f"{CLUSTER}; {many}",
        figures={
            "percent_less_at_40": percents,
            "oracle_ratio": {
                label: {
                    shown: estimate(oracle_ratio(outcome.policies[policy], outcome)).mean
                    for shown, policy in (POLICIES | VARIANTS).items()
                }
                for label, outcome in outcomes.items()
            },
        },
    )


def fig3(quick: bool) -> Found:
    """Seconds of each round, one realization (DOLBIE, Fig. 3)."""
    return _latencies("fig3", 1)


def fig4(quick: bool) -> Found:
    """Seconds of each round with 95 % intervals (DOLBIE, Fig. 4)."""
    return _latencies("fig4", 10 if quick else 100)


def fig5(quick: bool) -> Found:
    """Cumulative dynamic regret with 95 % intervals, and the bound of Theorem 1 (DOLBIE, Fig. 5)."""
    realizations = 10 if quick else 100
    outcomes, picture, rows = _curves(realizations, "regret_s", "seconds beyond the oracle's", regret)
    totals: dict[str, dict[str, float]] = {label: {} for label in outcomes}
    for row in rows:  # keeps the last value of each curve
        totals[row["setting"]][row["policy"]] = float(row["regret_s"])
    lowest = all(
        min(each[name] for name in (*RIVALS, "DOLBIE")) == each["DOLBIE"] for each in totals.values()
    )
    bounds: dict[str, float] = {}
    for label, outcome in outcomes.items():
        bound = regret_bound(outcome.policies[POLICIES["DOLBIE"]], outcome)
        if bound is not None:
            bounds[label] = float(bound.mean())
    return Found(
        picture,
        rows,
        claim="DOLBIE has the least regret of all but OPT",
        ours=("true among the paper's policies" if lowest else "not in every setting")
        + "; after 100 rounds "
        + "; ".join(
            f"{label}: " + ", ".join(f"{name} {each[name]:.1f} s" for name in POLICIES if name != "OPT")
            for label, each in totals.items()
        )
        + "; the bound on DOLBIE's: "
        + ", ".join(f"{label} {bound:,.0f} s" for label, bound in bounds.items()),
        why=DRAWN
        + "OGD's step is its rate times the straggler's seconds, so it adapts fast if stragglers are "
        "very slow (B) and slowly otherwise; "
        "level, which is not in the paper, has a tenth of DOLBIE's regret or less, nearly all from its first round",
        setting=f"{CLUSTER}; {realizations} realizations",
        figures={"regret_seconds": totals, "bound_seconds": bounds},
    )


def fig9(quick: bool) -> Found:
    """Seconds of each worker in each round (DOLBIE, Fig. 9)."""
    return _workers("fig9")


def fig10(quick: bool) -> Found:
    """Samples of each worker in each round (DOLBIE, Fig. 10)."""
    return _workers("fig10")


def _workers(name: str) -> Found:
    what = measured("resnet18")
    outcome = run(what, list(POLICIES.values()))
    of = what.classes()[0]
    kinds = [PROCESSORS[kind] for kind in of]
    picture = figure(len(POLICIES), width=3)
    rows: list[dict[str, Any]] = []
    t = np.arange(1, what.rounds + 1)
    spread: dict[str, float] = {}
    for axes, (shown, policy) in zip(picture.axes, POLICIES.items(), strict=True):
        played = outcome.policies[policy]
        values = played.first_seconds if name == "fig9" else played.first_shares * what.global_batch
        for worker, kind in enumerate(of):
            axes.plot(t, values[:, worker], color=COLOURS[kind], linewidth=0.6)
        for index, line in enumerate(values, 1):
            rows += table(policy=shown, round=index, worker=range(len(of)), processor=kinds, value=line)
        last = played.first_seconds[-10:]
        spread[shown] = float(((last.max(1) - last.min(1)) / last.max(1)).mean())
        axes.set(title=shown, xlabel="round")
    highest = max(axes.get_ylim()[1] for axes in picture.axes)
    for axes in picture.axes:
        axes.set_ylim(0, highest)
    picture.axes[0].set_ylabel("seconds" if name == "fig9" else "samples")
    for colour, processor in zip(COLOURS, PROCESSORS, strict=True):
        picture.axes[0].plot([], [], color=colour, label=processor)
    picture.axes[0].legend(fontsize="x-small")
    return Found(
        picture,
        rows,
        claim="OGD, LB-BSP and DOLBIE bring the workers' times together, DOLBIE much sooner; ABS fluctuates; "
        "under OPT all take about as long",
        ours="difference of the fastest worker's time from the slowest's, rounds 91 to 100: "
        + ", ".join(f"{shown} {100 * value:.0f} %" for shown, value in spread.items()),
        why="the order is the paper's; after 100 rounds the slow processors are still behind under all of the "
        "paper's policies, since steps shrink (DOLBIE) or move a fixed amount (LB-BSP)",
        setting=f"{CLUSTER}, {what.name}; one realization, seed 0",
        figures={"spread": spread},
    )


def fig11(quick: bool) -> Found:
    """Computation, communication and waiting of a worker, and the time to decide (DOLBIE, Fig. 11)."""
    realizations = 10 if quick else 100
    what = measured("resnet18", realizations)
    names = POLICIES | VARIANTS
    outcome = run(what, list(names.values()))
    alone = measured("resnet18", 1)
    run(measured("resnet18", 1, rounds=3), list(names.values()))  # the first calls load libraries
    timed = [run(alone, list(names.values())) for _ in range(3 if quick else 20)]
    picture = figure(2)
    above, below = picture.axes
    left = np.zeros(len(names))
    parts: dict[str, Any] = {}
    for part in ("compute", "overhead", "wait"):
        width = np.array([getattr(outcome.policies[p], part).mean() / what.size for p in names.values()])
        parts[part] = width
        label = {"compute": "computation", "overhead": "communication and start", "wait": "waiting"}[part]
        above.barh(list(names), width, left=left, label=label)
        left += width
    decide = {
        shown: [1e6 * each.policies[policy].decide_seconds / what.rounds for each in timed]
        for shown, policy in names.items()
    }
    above.set(xlabel="seconds of a worker in 100 rounds")
    above.invert_yaxis()
    above.legend(fontsize="small")
    below.boxplot(list(decide.values()), orientation="horizontal", tick_labels=list(decide))
    below.set(xlabel="microseconds per decision, one run of 30 workers", xscale="log")
    below.invert_yaxis()
    waits = dict(zip(names, parts["wait"], strict=True))
    percents = {rival: float(100 * (1 - waits["DOLBIE"] / waits[rival])) for rival in RIVALS}
    micro = {shown: float(np.median(values)) for shown, values in decide.items()}
    return Found(
        picture,
        table(
            policy=names,
            computation_s=parts["compute"],
            communication_s=parts["overhead"],
            waiting_s=parts["wait"],
            idle_share=[idle_share(outcome.policies[policy]).mean() for policy in names.values()],
            decide_us=micro.values(),
        ),
        claim="DOLBIE's workers idle 84.6/71.1/67.2/42.8 % less than under EQU/OGD/LB-BSP/ABS; deciding takes OPT "
        "and OGD longest, DOLBIE little",
        ours="/".join(f"{percents[rival]:.0f}" for rival in RIVALS)
        + f" % less; level {100 * (1 - waits['level'] / waits['EQU']):.0f} % less than EQU; a decision takes "
        + ", ".join(f"{shown} {value:.0f} us" for shown, value in micro.items()),
        why=DRAWN
        + "deciding takes microseconds in every policy here: OPT and level solve a linear system of "
        "one unknown in closed form, not by a general solver",
        setting=f"{CLUSTER}, {what.name}; {realizations} realizations; decisions timed on single runs",
        figures={"idle_percent_less": percents, "decide_microseconds": micro},
    )
