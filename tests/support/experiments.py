"""Experiments of the papers, and the files that they leave."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from paceline.papers import experiments


def ran(paper: str, name: str, out: Path, quick: bool = True) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What an experiment found, and its table; its three files are there and agree with that."""
    result = experiments(paper)[name](out, quick)
    assert {"claim", "ours", "why", "setting", "command"} <= set(result)
    assert json.loads((out / f"{name}.json").read_text()) == json.loads(json.dumps(result))
    assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    with (out / f"{name}.csv").open(newline="") as file:
        return result, list(csv.DictReader(file))
