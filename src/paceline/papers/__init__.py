"""Each paper's experiments, by name: ``paceline reproduce PAPER``.

An experiment is a public function (quick) that returns what it ``Found``; ``experiments`` gives it with what
writes NAME.png, NAME.csv and NAME.json into the folder ``out``.
"""

from __future__ import annotations

import csv
import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.errors import PacelineError, among
from paceline.files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAPERS = {
    "dolbie": ("dolbie", "dolbie_accuracy"),
    "coded": ("coded",),
    "dbw": ("dbw", "dbw_training"),
    "lbbsp": ("lbbsp", "lbbsp_clusters"),
    "wlbs": ("wlbs",),
}


class Found(NamedTuple):
    """What an experiment found.

    rows: the lines of the table, columns by their keys; the file has six digits of each. claim: the paper's. ours:
    our result. why: the reason if they differ. figures: all numbers of ours.
    """

    picture: Figure
    rows: Sequence[Mapping[str, Any]]
    claim: str
    ours: str
    why: str
    setting: str
    figures: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


def table(**columns: Any) -> list[dict[str, Any]]:
    """Rows of these columns: arrays of one length, and single values that are the same in each row."""
    many = {
        key: each for key, each in columns.items() if isinstance(each, Iterable) and not isinstance(each, str)
    }
    return [columns | dict(zip(many, row, strict=True)) for row in zip(*many.values(), strict=True)]


def experiments(paper: str) -> dict[str, Callable[[Path, bool], dict[str, Any]]]:
    """A paper's experiments by name, in the order of its figures; PacelineError for a paper that is not there.

    Each takes a folder and whether it must be quick, writes its three files there and returns what the JSON file has.
    """
    if paper not in PAPERS:
        raise PacelineError(f"paper {paper!r}: expected one of {among(paper, PAPERS)}")
    found: dict[str, Callable[[bool], Found]] = {}
    for module in PAPERS[paper]:
        for name, each in vars(importlib.import_module(f"paceline.papers.{module}")).items():
            if name[0] != "_" and getattr(each, "__annotations__", {}).get("return") == Found.__name__:
                found[name] = each
    order = sorted(found, key=lambda name: int("0" + re.sub(r"\D", "", name)))
    return {name: functools.partial(_written, paper, found[name]) for name in order}


def _written(paper: str, experiment: Callable[[bool], Found], out: Path, quick: bool) -> dict[str, Any]:
    name, found = experiment.__name__, experiment(quick)
    command = f"paceline reproduce {paper} {name}" + (" --quick" if quick else "")
    told = {key: getattr(found, key) for key in ("claim", "ours", "why", "setting")}
    result = told | {"command": command} | found.figures
    out.mkdir(parents=True, exist_ok=True)
    found.picture.savefig(out / f"{name}.png", dpi=150)
    with (out / f"{name}.csv").open("w", newline="") as file:
        columns = list(dict.fromkeys(key for row in found.rows for key in row))
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in found.rows:
            writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
    write_whole(out / f"{name}.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return result


def data_folder() -> Path:
    """The folder of the traces and data sets that experiments, benchmarks and tests use; it need not exist.

    $PACELINE_DATA, else shared/data beside the repository.
    """
    named = os.environ.get("PACELINE_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
