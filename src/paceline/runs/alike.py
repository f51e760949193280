"""Several runs beside each other: what to call them, and whether their policies can be compared at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.runs.run import Run
from paceline.runs.words import listing

SAME = {
    "workers": "the number of workers",
    "global_batch": "the global batch",
    "data": "the data",
    "model": "the model",
}


def labels(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its policy; its directory with it where two share one, the whole path if need be."""
    policies = [run.policy for run in runs]
    named = [
        policy if policies.count(policy) == 1 else f"{policy} ({run.path.name})"
        for policy, run in zip(policies, runs, strict=True)
    ]
    paths = [
        {run.path for run, name in zip(runs, named, strict=True) if name == each} for each in named
    ]  # of all that go by one name
    return [
        name if len(same) == 1 else f"{run.policy} ({run.path})"
        for name, run, same in zip(named, runs, paths, strict=True)
    ]


def differences(runs: Sequence[Run]) -> str:
    """What else than the policy differs, as a clause; "" where nothing does that is on record."""
    found = []
    for key, words in SAME.items():
        values = list(
            dict.fromkeys(_text(run.workers if key == "workers" else run.config.get(key)) for run in runs)
        )
        if len(values) > 1:
            found.append(f"{words} ({listing(values)})")
    return listing(found) if found else ""


def _text(value: Any) -> str:
    return "not known" if value is None else str(value)
