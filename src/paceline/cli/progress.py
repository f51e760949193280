"""Live progress of a training run."""

from __future__ import annotations

from typing import Any

from paceline.cli.counter import Counter

SHOWN = 8  # workers whose loads have a place in the line


class Progress:
    """Takes the events of a training run and shows them; call it with each event.

    counter: in whose context that is.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter

    def __call__(self, event: dict[str, Any]) -> None:
        if event["type"] == "starting":
            self._counter.note(f"starting workers {event['ready']}/{event['workers']}")
        elif event["type"] == "start":
            self._counter.begin(event["first"], event["rounds"])
        elif event["type"] == "note":
            self._counter.console.print(event["text"], markup=False)
        elif event["type"] == "test":
            self._counter.note("testing")
        elif event["type"] == "round":
            loads = "/".join(map(str, event["loads"][:SHOWN])) + "..." * (len(event["loads"]) > SHOWN)
            note = f"loss {event['loss']:.3f}  {event['seconds'] * 1e3:.0f} ms  loads {loads}"
            self._counter(event["round"] + 1, event["rounds"], note)
