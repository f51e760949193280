"""What happened to the workers of a run that goes on without the lost, in sentences."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.runs.run import Run
from paceline.runs.words import plural, seconds

MOST = 5  # that are told one by one
JOINED = " joined"


def sentences(run: Run) -> list[str]:
    """Who was lost, when, and what it cost: each of a few, or how many and the worst."""
    told, cost = [], {}
    for number, event in _events(run):
        lost = float(event.get("seconds_lost") or 0.0)
        if not event["what"].endswith(JOINED):
            told.append(f"{_capital(event['what'])} in round {number}; {seconds(lost)} lost, and no sample.")
            cost[number] = lost
    if len(told) <= MOST:
        return told
    worst = max(cost, key=lambda number: cost[number])
    return [
        f"{plural(len(told), 'worker')} were lost or left on the way: {seconds(sum(cost.values()))} lost in all, "
        f"{seconds(cost[worst])} of it in round {worst}, and no sample."
    ]


def _events(run: Run) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, events in zip(run.round.tolist(), run.extras.get("events") or (), strict=False):
        for event in events or ():
            if isinstance(event, dict) and isinstance(event.get("what"), str):
                yield number, event


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
