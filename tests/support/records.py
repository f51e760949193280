"""Rounds of records that tests write by hand."""

from __future__ import annotations

from typing import Any

from paceline.runs import Recorder


def line(recorder: Recorder, t: int, **changes: Any) -> None:
    """Round t, with these fields. By default, two workers take a second, the batch is the sum of the loads, and each
    round before took as long."""
    fields: dict[str, Any] = {"seconds": 1.0, "loads": [6, 2], "compute": [0.5, 1.0]} | changes
    batch = int(sum(load or 0 for load in fields["loads"]))
    recorder.round(**{"round": t, "epoch": 0, "time": (t + 1) * fields["seconds"], "batch": batch} | fields)
