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
    names = [run.policy for run in runs]
    for more in (lambda run: run.path.name, lambda run: str(run.path)):
        places = {
            name: {run.path for run, each in zip(runs, names, strict=True) if each == name} for name in names
        }
        names = [
            f"{run.policy} ({more(run)})" if len(places[name]) > 1 else name
            for name, run in zip(names, runs, strict=True)
        ]
    return names


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
