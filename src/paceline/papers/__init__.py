"""Each paper's experiments, by name: ``paceline reproduce PAPER``.

A paper's module offers ``EXPERIMENTS``: name -> function(out, quick) that writes NAME.png, NAME.csv and
NAME.json into ``out`` (``write`` does) and returns what is in the JSON file.
"""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import PacelineError, among
from paceline.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS = {
    "dolbie": "paceline.papers.dolbie",
    "coded": "paceline.papers.coded",
    "dbw": "paceline.papers.dbw",
    "lbbsp": "paceline.papers.lbbsp",
    "wlbs": "paceline.papers.wlbs",
}

Result = dict[str, Any]
Experiment = Callable[[Path, bool], Result]

REQUIRED = ("claim", "ours", "setting", "command", "why")


def experiments(paper: str) -> dict[str, Experiment]:
    """A paper's experiments by name; PacelineError for a paper that is not there."""
    if paper not in PAPERS:
        raise PacelineError(f"paper {paper!r}: expected one of {among(paper, PAPERS)}")
    found: dict[str, Experiment] = importlib.import_module(PAPERS[paper]).EXPERIMENTS
    return found


def write(out: Path, name: str, picture: Figure, rows: Sequence[Mapping[str, Any]], result: Result) -> Result:
    """NAME.png, NAME.csv (one line for each of rows, columns by their keys) and NAME.json; returns result.

    result must tell the paper's claim, ours, the setting, the command, and why they differ where they do.
    """
    missing = [key for key in REQUIRED if key not in result]
    if missing:
        raise PacelineError(
            f"the result of {name!r} lacks {', '.join(missing)}; give all of {', '.join(REQUIRED)}"
        )
    out.mkdir(parents=True, exist_ok=True)
    picture.savefig(out / f"{name}.png", dpi=150)
    with (out / f"{name}.csv").open("w", newline="") as file:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        table = csv.DictWriter(file, columns, restval="")
        table.writeheader()
        table.writerows(rows)
    write_whole(out / f"{name}.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return result
