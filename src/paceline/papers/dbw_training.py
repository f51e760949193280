"""DBW's Figs. 4 to 10, which train models: loss and k over time, seconds to a loss.

Round trips are 1 - alpha + alpha Exp(1) in Figs. 4, 6 and 10, like those of a Spark cluster in 7 and 8, and half of
the workers slow down in Fig. 9. Static k follow the proportional rule, as in the paper; static k at the full rate,
which DBW always uses, are a control: they show the effect of the rate alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from paceline.papers import Found, table
from paceline.papers.dbw import (
    MNIST_RATE,
    NETWORKS,
    SMOOTHED,
    WORKERS,
    dataset,
    learner,
    network,
    play,
    shifted,
)
from paceline.paramserver import rates
from paceline.paramserver.engine import Update
from paceline.runs.words import percent
from paceline.simulate.plots import figure
from paceline.simulate.server import SpeedChange
from paceline.simulate.timing import Constant, Lognormal, TimingModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAP = 3000  # most updates of a run
DYNAMIC = ("dbw", "dbw:worth=noise", "blind")
SPARK = Lognormal(0.9, 0.4, 0.03, 3.0)  # the paper's trace is not public; this replaces it
Runs = dict[str, list[Update]]


def smoothed(updates: Sequence[Update]) -> np.ndarray:
    """The loss averaged over the last few updates, shape (T,)."""
    total = np.cumsum([0.0] + [update.loss for update in updates])
    end = np.arange(1, len(total))
    start = np.maximum(end - SMOOTHED, 0)
    return (total[end] - total[start]) / (end - start)


def reached(updates: Sequence[Update], target: float) -> float:
    """Seconds until the smoothed loss fell below the target; infinite if it did not."""
    below = np.flatnonzero(smoothed(updates) < target)
    return updates[below[0]].ended if len(below) else float("inf")


def waited(updates: Sequence[Update], quorum: int) -> float:
    """Total seconds of the updates from ``quorum`` gradients."""
    ends = np.array([0.0] + [update.ended for update in updates])
    return float(np.diff(ends)[[update.quorum == quorum for update in updates]].sum())


def compare(
    ks: Sequence[int], control: Sequence[int], delay: TimingModel, target: float, model: str
) -> tuple[dict[str, float], Runs]:
    """Seconds to the target and updates of the dynamic rules and of static k, ``control`` at the full rate."""
    learner.cache_clear()  # cached gradients are only shared by runs on the same kind of cluster
    runs = {name: play(name, delay, target=target, model=model)[0] for name in DYNAMIC}
    for k, rate in [(k, "proportional") for k in ks] + [(k, "fixed") for k in control]:
        runs[f"static:{k} {rate}"] = play(f"static:{k}", delay, rate=rate, target=target, model=model)[0]
    return {name: reached(updates, target) for name, updates in runs.items()}, runs


def best(times: dict[str, float], ending: str) -> str:
    """The fastest of the runs whose names end with ``ending``."""
    return min((name for name in times if name.endswith(ending)), key=lambda name: times[name])


def summary(times: dict[str, float]) -> str:
    """All times in words."""
    return ", ".join(f"{name} {seconds:.0f} s" for name, seconds in times.items())


def ratios(times: dict[str, float]) -> str:
    """A clause on how much faster DBW is than the best static k."""
    name, control = best(times, "proportional"), [other for other in times if other.endswith("fixed")]
    quicker = {other: f"{times[name] / seconds:.2f}x" for other, seconds in times.items()}
    text = f"dbw {quicker['dbw']} as fast as the best static k ({name})"
    text += f", with worth=noise {quicker['dbw:worth=noise']}"
    if control:
        text += (
            f"; the best static k at the full rate ({best(times, 'fixed')}) {quicker[best(times, 'fixed')]}"
        )
    return text


def timeline(runs: Runs) -> tuple[Figure, list[dict[str, Any]]]:
    """Loss and k over time, drawn and as a table."""
    picture, rows = figure(2), list[dict[str, Any]]()
    for name, updates in runs.items():
        now = [u.ended for u in updates]
        picture.axes[0].plot(now, smoothed(updates), label=name, linewidth=1)
        picture.axes[1].plot(now, k := [u.quorum for u in updates], label=name, linewidth=1)
        noise = [u.variance / u.norm2 for u in updates]
        rows += table(
            policy=name, seconds=now, loss=[u.loss for u in updates], k=k, variance_over_norm2=noise
        )
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss", yscale="log")
    picture.axes[1].set(xlabel="virtual seconds", ylabel="k", ylim=(0, WORKERS + 1))
    picture.axes[0].legend(fontsize="x-small")
    return picture, rows


def bars(times: Mapping[str, Mapping[str, float]], target: float) -> Figure:
    """Seconds to the target, a panel for each title."""
    picture = figure(len(times))
    for axes, (title, seconds) in zip(picture.axes, times.items(), strict=True):
        axes.barh(list(seconds), [min(value, 1e5) for value in seconds.values()])
        axes.set(title=title, xlabel=f"virtual seconds to loss {target}")
        axes.invert_yaxis()
    return picture


def fig4(quick: bool) -> Found:
    """MNIST, .3 + .7 Exp(1): loss and k over time (DBW, Fig. 4)."""
    ks, control = ((10,), (10,)) if quick else ((6, 8, 10, 12, 16), (8, 10))
    target = 1.0 if quick else 0.2
    times, runs = compare(ks, control, shifted(0.7), target, network(quick))
    dbw = [u.quorum for u in runs["dbw"]]
    third = max(1, len(dbw) // 3)
    return Found(
        *timeline(runs),
        claim="DBW converges fastest; its k is small at first and grows to 16; B-DBW stays at about "
        "9; the best static k is 10",
        ours=f"{summary(times)}; DBW's mean k {np.mean(dbw[:third]):.1f} in the first third, "
        f"{np.mean(dbw[-third:]):.1f} in the last; B-DBW's median "
        f"{np.median([u.quorum for u in runs['blind']]):.0f}",
        why="under push-wait k near 12 gives the most gradients per second; 9 belongs to "
        "push-interrupt. L is computed from differences of noisy losses, which makes k jump between few and all",
        setting=f"MNIST, {NETWORKS[network(quick)]}, n = 16, B = 500, "
        f"rate .08 (static: .005 k), loss {target}, 1 run",
    )


def fig6(quick: bool) -> Found:
    """Time to loss 0.2 under 1 - a + a Exp(1) for a = 0, 0.2 and 1 (DBW, Fig. 6)."""
    target = 1.0 if quick else 0.2
    chosen = {0.0: ((16,), ()), 0.2: ((12, 14, 16), (12, 16)), 1.0: ((4, 8, 12), (4, 8))}
    found: dict[float, dict[str, float]] = {}
    parts = []
    for alpha, (ks, control) in chosen.items():
        if quick:
            ks, control = ks[-1:], control[-1:]
        found[alpha], runs = compare(ks, control, shifted(alpha), target, network(quick))
        whole = waited(runs["dbw"], WORKERS) / runs["dbw"][-1].ended
        parts.append(
            f"alpha = {alpha:g}: {ratios(found[alpha])} ({summary(found[alpha])}; updates from all {WORKERS} take "
            f"{percent(whole)} of dbw's first run)"
        )
    return Found(
        bars({f"alpha = {alpha:g}": times for alpha, times in found.items()}, target),
        [row for a, times in found.items() for row in table(alpha=a, policy=times, seconds=times.values())],
        claim="the best static k are 16, 12 and 8; DBW is 1.2x as fast for alpha = 0.2 and 3x for "
        "alpha = 1, of which 1.5x is the adaptation and 2x the rate",
        ours="; ".join(parts),
        why="the paper's static k are compared at a rate in proportion to k, and most of the gain is the full "
        "rate that DBW keeps, as static k at that rate show; L, from differences of noisy losses in eq. (12), "
        "jumps, and if no k promises a gain DBW waits for all. The paper states neither the widths of its "
        "network nor how its pixels are scaled",
        setting=f"MNIST, {NETWORKS[network(quick)]}, n = 16, B = 500, "
        "full rate .08, 1 run, the loss averaged over 5 updates",
        figures={
            "ratios": {
                str(a): times[best(times, "proportional")] / times["dbw"] for a, times in found.items()
            }
        },
    )


def fig10(quick: bool) -> Found:
    """Push-and-interrupt: DBW against AdaSync for several alpha (DBW, Fig. 10)."""
    target, alphas = (1.0, (0.2, 1.0)) if quick else (0.07, (0.1, 0.3, 0.7, 1.0))
    picture = figure(1)
    times: dict[str, list[float]] = {}
    for name in ("dbw", "dbw:worth=noise", "adasync"):
        runs = [
            play(name, shifted(alpha), target=target, mode="push-interrupt", model=network(quick))[0]
            for alpha in alphas
        ]
        times[name] = [reached(updates, target) for updates in runs]
        picture.axes[0].plot(alphas, times[name], "o-", label=name)
    picture.axes[0].set(xlabel="alpha", ylabel=f"virtual seconds to loss {target}", ylim=(0, None))
    picture.axes[0].legend()
    return Found(
        picture,
        [row for name, values in times.items() for row in table(alpha=alphas, policy=name, seconds=values)],
        claim="DBW is faster below alpha = 0.3, AdaSync above it",
        ours="; ".join(
            f"alpha = {alpha:g}: " + summary({name: values[i] for name, values in times.items()})
            for i, alpha in enumerate(alphas)
        ),
        why="the paper states neither the K_0 of its AdaSync (ours is 1) nor the widths of its network"
        + (f"; to loss {target} instead of .07" if quick else ""),
        setting=f"MNIST, {NETWORKS[network(quick)]}, n = 16, B = 500, "
        f"rate {MNIST_RATE}, push-and-interrupt, 1 run",
    )


def fig7(quick: bool) -> Found:
    """The distribution of round trips in place of the Spark cluster's (DBW, Fig. 7)."""
    drawn = next(SPARK.stream((20000,), np.random.default_rng(0)))
    picture = figure(1)
    picture.axes[0].hist(drawn, bins=80, density=True)
    picture.axes[0].set(xlabel="round trip (s)", ylabel="density")
    return Found(
        picture,
        [{"percentile": p, "seconds": float(np.percentile(drawn, p))} for p in (1, 10, 50, 90, 99)],
        claim="round trips measured on a production Spark cluster with 16 servers",
        ours="lognormal, median .9 s, sd of the logarithm .4, 3 % of the trips three times as long: "
        f"90 % below {np.percentile(drawn, 90):.2f} s, 99 % below {np.percentile(drawn, 99):.2f} s",
        why="the trace is not public",
        setting="20,000 draws",
    )


def knee_rates(batch: int, ks: Sequence[int], runs: int, steps: int = 100) -> dict[int, float]:
    """The knee rule's rate for each k: the range test's on the mean loss of some runs from the same weights."""
    sweep = np.geomspace(1e-3, 10.0, steps)
    learns = learner()
    found = {}
    for k in ks:
        curves = []
        for seed in range(runs):
            rng = np.random.default_rng((seed, k))
            values, losses = learns.start(), []
            for rate in sweep:
                samples = rng.integers(len(dataset("mnist").x_train), size=k * batch)
                gradient, loss = learns.gradient(values, samples)
                losses.append(min(loss, 1e3) if np.isfinite(loss) else 1e3)
                values = values - np.float32(rate) * gradient
            curves.append(losses)
        found[k] = rates.knee(sweep, np.mean(curves, axis=0))
    return found


def fig8(quick: bool) -> Found:
    """Batch sizes 16, 128 and 500 under the knee rule, Spark-like round trips (DBW, Fig. 8)."""
    ks = (1, 8, 16) if quick else (1, 4, 6, 8, 12, 16)
    target, most = (1.0, 60) if quick else (0.2, CAP)
    found: dict[str, dict[str, float]] = {}
    rows: list[dict[str, Any]] = []
    parts = []
    for batch in (16, 128, 500):
        knees = knee_rates(batch, ks, 1, 36) if quick else knee_rates(batch, ks, 3)
        chosen = dict.fromkeys(DYNAMIC, knees[WORKERS]) | {f"static:{k}": knees[k] for k in ks}
        times = found[f"B = {batch}"] = {}
        for name, rate in chosen.items():
            updates, _ = play(name, SPARK, batch=batch, lr=rate, target=target, updates=most)
            times[name] = reached(updates, target)
            rows.append({"batch": batch, "policy": name, "seconds": times[name], "rate": rate})
        quickest = min(times.keys() - set(DYNAMIC), key=lambda name: (times[name], name))
        parts.append(
            f"B = {batch}: best {quickest} {times[quickest]:.0f} s, dbw {times['dbw']:.0f} s, with worth=noise "
            f"{times['dbw:worth=noise']:.0f} s, blind {times['blind']:.0f} s (rates "
            + ", ".join(f"{k}: {knees[k]:.3f}" for k in ks)
            + ")"
        )
    return Found(
        bars(found, target),
        rows,
        claim="the best static k falls from 6 (B = 16) to 1 (B = 500); DBW is close to it, and "
        "better than B-DBW for B = 128 and 500",
        ours="; ".join(parts),
        why="another network and stand-in round trips; where the range test gives about the same rate for every k, "
        "the shortest updates win",
        setting=f"MNIST, n = 16, lognormal round trips with a tail, knee rule, 1 run, at most {CAP} updates",
    )


def fig9(quick: bool) -> Found:
    """Half of the workers become five times slower at 160 s (DBW, Fig. 9)."""
    at, seconds = (12.0, 28.0) if quick else (160.0, 300.0)
    change = [SpeedChange(at, tuple(range(WORKERS // 2)), 5.0)]
    setting: dict[str, Any] = {"target": None, "seconds": seconds, "changes": change, "model": network(quick)}
    remembering = ("dbw:memory=0.9", "dbw:worth=noise,memory=0.9")  # forget old times within about 10 updates
    runs, ends = {}, []
    for name in (*DYNAMIC, *remembering, "static:8", "static:16"):
        rate = "proportional" if name.startswith("static") else "fixed"
        updates = runs[name] = play(name, Constant(1.0), rate=rate, **setting)[0]
        before = np.median([u.quorum for u in updates if u.ended <= at])
        after = np.median([u.quorum for u in updates if u.ended > at + 0.2 * (seconds - at)])
        ends.append(f"{name} {before:.0f} -> {after:.0f}, {smoothed(updates)[-1]:.3f}")
    return Found(
        *timeline(runs),
        claim="DBW waits for 16 before the slowdown and for 8 after it",
        ours="median k before and after, and the loss at the end: " + ", ".join(ends),
        why="where no k promises a gain, dbw waits for all; worth=noise does not use L. Eq. (17) gives all samples "
        "equal weight, 160 old ones against each new one; memory=0.9 gives old ones less",
        setting=f"MNIST, {NETWORKS[network(quick)]}, n = 16, B = 500, round trips of 1 s; "
        f"from {at:g} s on half of the workers take 5 s",
    )


def fig5(quick: bool) -> Found:
    """CIFAR-10 split among the workers, Exp(1): loss against time (DBW, Fig. 5)."""
    seconds, seeds = (20.0, 1) if quick else (150.0, 2)
    configs = [("dbw", "fixed"), ("blind", "fixed")]
    configs += [(f"static:{k}", "proportional") for k in ((8,) if quick else (4, 8, 12, 16))]
    setting: dict[str, Any] = {"lr": 0.05, "batch": 64 if quick else 256, "target": None, "seconds": seconds}
    setting |= {"name": "cifar10", "model": "mlp", "shards": WORKERS}
    runs: Runs = {}
    rows: list[dict[str, Any]] = []
    for backup, rate in [*configs, ("static:8", "fixed")]:
        for seed in range(seeds):
            updates, server = play(backup, shifted(1.0), seed=seed, rate=rate, **setting)
            accuracy = learner("cifar10", "mlp").test(server.parameters.values)[1]
            name = f"{backup} {rate}"
            rows.append({"policy": name, "seed": seed, "accuracy": accuracy, "loss": updates[-1].loss})
            runs.setdefault(name, updates)
    mean = {name: np.mean([row["accuracy"] for row in rows if row["policy"] == name]) for name in runs}
    return Found(
        timeline(runs)[0],
        rows,
        claim="DBW is best on average, by less than on MNIST; it starts with k of about 10",
        ours=f"test accuracy after {seconds:g} s: "
        + ", ".join(f"{name} {percent(float(found), 1)}" for name, found in mean.items()),
        why="a perceptron instead of ResNet-18, 20,000 images and few seeds, as ResNet-18 for 16 workers would "
        "take days on two cores; accuracies are therefore low, and only their order is meaningful",
        setting=f"CIFAR-10 split at random among 16 workers, B = 256, rate .05 k / 16, {seeds} runs",
    )
