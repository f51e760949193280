"""DBW against every static number of backup workers: the runs, and their times in words.

Static k follow the proportional rule, as in the paper; static k at the full rate, which DBW always uses, stand beside
them as a control: they show what the rate alone gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.papers.dbw_runs import (
    learner,
    play,
    reached,
    said,
)
from paceline.paramserver.engine import Update
from paceline.simulate.timing import TimingModel

DYNAMIC = ("dbw", "dbw:worth=noise", "blind")


def compare(
    configs: Sequence[tuple[str, str]], delay: TimingModel, seeds: int, **setting: Any
) -> tuple[dict[str, list[float]], dict[str, list[Update]]]:
    """Seconds to the target of each (backup, rate rule) on the same clusters; and the runs of the first
    seed."""
    times: dict[str, list[float]] = {}
    first: dict[str, list[Update]] = {}
    for seed in range(seeds):
        learner.cache_clear()  # what it remembers is of use within a seed and a kind of cluster
        for backup, rate in configs:
            label = backup if rate == "fixed" and not backup.startswith("static") else f"{backup} {rate}"
            updates, _ = play(backup, delay, seed=seed, rate=rate, **setting)
            times.setdefault(label, []).append(reached(updates, setting.get("target", 0.2)))
            first.setdefault(label, updates)
    return times, first


def statics(ks: Sequence[int], control: Sequence[int] = ()) -> list[tuple[str, str]]:
    return [(f"static:{k}", "proportional") for k in ks] + [(f"static:{k}", "fixed") for k in control]


def best(times: dict[str, list[float]], ending: str) -> tuple[str, float]:
    found = {name: float(np.mean(t)) for name, t in times.items() if name.endswith(ending)}
    name = min(found, key=lambda each: found[each])
    return name, found[name]


def table(times: dict[str, list[float]], **columns: Any) -> list[dict[str, Any]]:
    return [
        {**columns, "policy": name, "seed": seed, "seconds": seconds}
        for name, found in times.items()
        for seed, seconds in enumerate(found)
    ]


def summary(times: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {said(found)}" for name, found in times.items())


def ratios(times: dict[str, list[float]]) -> str:
    name, seconds = best(times, "proportional")
    control, full = best(times, "fixed") if any(n.endswith("fixed") for n in times) else ("", np.nan)
    text = f"dbw {seconds / np.mean(times['dbw']):.2f}x as fast as the best static k ({name})"
    if "dbw:worth=noise" in times:
        text += f", with worth=noise {seconds / np.mean(times['dbw:worth=noise']):.2f}x"
    if control:
        text += f"; the best static k at the full rate ({control}) {seconds / full:.2f}x"
    return text
