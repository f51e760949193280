"""DBW on other clusters: data that are split (Fig. 5), a slowdown (Fig. 9), and beyond the paper two speeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from paceline.papers import Found
from paceline.papers.dbw import (
    DYNAMIC,
    NETWORKS,
    WORKERS,
    learner,
    network,
    play,
    reached,
    shifted,
    smoothed,
    statics,
)
from paceline.runs.words import percent
from paceline.simulate.plots import figure
from paceline.simulate.server import Change
from paceline.simulate.timing import Constant, Exponential


def fig9(out: Path, quick: bool) -> Found:
    """Half of the workers become five times slower at 160 s (DBW, Fig. 9)."""
    at, seconds = (20.0, 40.0) if quick else (160.0, 300.0)
    change = [Change(at, tuple(range(WORKERS // 2)), 5.0)]
    picture = figure(2)
    rows, ends = [], {}
    setting: dict[str, Any] = {"target": None, "seconds": seconds, "changes": change, "model": network(quick)}
    remembering = ("dbw:memory=0.9", "dbw:worth=noise,memory=0.9")  # old times fade: within about 10 updates
    for name in (*DYNAMIC, *remembering, "static:8", "static:16"):
        rate = "proportional" if name.startswith("static") else "fixed"
        updates, _ = play(name, Constant(1.0), rate=rate, **setting)
        now = [u.now for u in updates]
        picture.axes[0].plot(now, smoothed(updates), label=name, linewidth=1)
        picture.axes[1].plot(now, [u.quorum for u in updates], label=name, linewidth=1)
        rows += [{"policy": name, "seconds": u.now, "loss": u.loss, "k": u.quorum} for u in updates]
        before = [u.quorum for u in updates if u.now <= at]
        after = [u.quorum for u in updates if u.now > at + 0.2 * (seconds - at)]
        ends[name] = (float(np.median(before)), float(np.median(after)), float(smoothed(updates)[-1]))
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss", yscale="log")
    picture.axes[1].set(xlabel="virtual seconds", ylabel="k")
    picture.axes[0].legend(fontsize="x-small")
    return Found(
        picture,
        rows,
        claim="DBW waits for 16 before the slowdown and for 8 after it",
        ours="median k before and after, and the loss at the end: "
        + ", ".join(f"{name} {b:.0f} -> {a:.0f}, {loss:.3f}" for name, (b, a, loss) in ends.items()),
        why="eq. (17) averages all samples alike, 160 old ones against each new one; memory=0.9 lets "
        "old ones fade",
        setting=f"MNIST, {NETWORKS[network(quick)]}, n = 16, B = 500, round trips of 1 s; "
        f"from {at:g} s on half of the workers take 5 s",
    )


def fig5(out: Path, quick: bool) -> Found:
    """CIFAR-10 split among the workers, Exp(1): loss against time (DBW, Fig. 5)."""
    seconds, seeds = (20.0, 1) if quick else (150.0, 2)
    ks = (8,) if quick else (4, 8, 12, 16)
    configs = [("dbw", "fixed"), ("blind", "fixed"), *statics(ks, (8,))]
    setting: dict[str, Any] = {"lr": 0.05, "batch": 64 if quick else 256, "target": None, "seconds": seconds}
    setting |= {"name": "cifar10", "model": "mlp", "shards": WORKERS}
    picture = figure(1)
    rows: list[dict[str, Any]] = []
    final: dict[str, list[float]] = {}
    for backup, rate in configs:
        name = f"{backup} {rate}"
        for seed in range(seeds):
            updates, server = play(backup, shifted(1.0), seed=seed, rate=rate, **setting)
            accuracy = learner("cifar10", "mlp").test(server.parameters.values)[1]
            final.setdefault(name, []).append(accuracy)
            rows.append({"policy": name, "seed": seed, "accuracy": accuracy, "loss": updates[-1].loss})
            if seed == 0:
                picture.axes[0].plot([u.now for u in updates], smoothed(updates), label=name, linewidth=1)
    picture.axes[0].set(xlabel="virtual seconds", ylabel="loss")
    picture.axes[0].legend(fontsize="x-small")
    return Found(
        picture,
        rows,
        claim="DBW is best on average, by less than on MNIST; it begins with k of about 10",
        ours=f"test accuracy after {seconds:g} s: "
        + ", ".join(f"{name} {percent(float(np.mean(found)), 1)}" for name, found in final.items()),
        why="a perceptron in place of ResNet-18, 20,000 images and few seeds, as ResNet-18 for 16 workers would "
        "take days on two cores; accuracies are therefore low, and only their order means something",
        setting=f"CIFAR-10 split at random among 16 workers, B = 256, rate .05 k / 16, {seeds} runs",
    )


def speeds(out: Path, quick: bool) -> Found:
    """Half of the workers three times slower: exchangeable arrivals, a model of each, and balancing besides."""
    batch, target, seeds = (100, 1.0, 1) if quick else (500, 0.2, 2)
    slow = np.repeat([1.0, 3.0], WORKERS // 2) / batch  # seconds a sample
    trips: dict[str, Any] = {
        "delay": Exponential(1e-3),
        "seconds_per_sample": Exponential(0.2 * slow, 0.8 * slow),
    }
    configs = [
        ("equal", "everyone"),
        ("level", "everyone"),
        ("equal", "dbw"),
        ("equal", "dbw:times=workers"),
        ("equal", "dbw:worth=noise"),
        ("equal", "dbw:worth=noise,times=workers"),
        ("level", "dbw"),
        ("level", "dbw:worth=noise"),
        ("level", "dbw:worth=noise,times=workers"),
    ]
    rows: list[dict[str, Any]] = []
    times: dict[str, list[float]] = {}
    for policy, backup in configs:
        name = f"{policy} + {backup}"
        for seed in range(seeds):
            updates, _ = play(backup, seed=seed, batch=batch, policy=policy, target=target, **trips)
            times.setdefault(name, []).append(reached(updates, target))
            rows.append({"policy": policy, "backup": backup, "seed": seed, "seconds": times[name][-1]})
    picture = figure(1)
    picture.axes[0].barh(list(times), [float(np.mean(found)) for found in times.values()])
    picture.axes[0].set(xlabel=f"virtual seconds to loss {target}")
    picture.axes[0].invert_yaxis()
    base = float(np.mean(times["equal + dbw"]))
    return Found(
        picture,
        rows,
        claim="(not in the paper) DBW takes workers to be exchangeable",
        ours="; ".join(
            f"{name} {np.mean(found):.0f} s ({min(found):.0f} to {max(found):.0f}), {base / np.mean(found):.2f}x"
            for name, found in times.items()
        ),
        why="backup workers leave half of the cluster's work unused where half of the workers are "
        "slow; balancing uses it",
        setting=f"MNIST, n = 16, B = {batch}, rate .08; a sample takes 1 or 3 units times .8 + .2 "
        f"Exp(1); {seeds} runs",
    )
