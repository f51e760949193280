"""The papers' experiments by name, for ``paceline reproduce PAPER``.

An experiment is a public function of ``quick`` that returns a ``Found``; ``experiments`` wraps it so that it writes
NAME.png, NAME.csv and NAME.json into a folder.
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
    """The result of an experiment.

    rows: the rows of the table, columns by their keys; the file has six digits of each number. claim: the paper's.
    ours: our result. why: the reason if they differ. figures: all of our numbers.
    """

    picture: Figure
    rows: Sequence[Mapping[str, Any]]
    claim: str
    ours: str
    why: str
    setting: str
    figures: dict[str, Any] = {}  # noqa: RUF012 - never changed


def table(**columns: Any) -> list[dict[str, Any]]:
    """Rows of these columns: arrays of equal length, and single values that are repeated in each row."""
    many = {
        key: each for key, each in columns.items() if isinstance(each, Iterable) and not isinstance(each, str)
    }
    return [columns | dict(zip(many, row, strict=True)) for row in zip(*many.values(), strict=True)]


def experiments(paper: str) -> dict[str, Callable[[Path, bool], dict[str, Any]]]:
    """A paper's experiments by name, in the order of its figures. Raises PacelineError for an unknown paper.

    Each takes a folder and ``quick``, writes its three files there and returns the content of the JSON file.
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
    from paceline.simulate.plots import save

    name, found = experiment.__name__, experiment(quick)
    command = f"paceline reproduce {paper} {name}" + (" --quick" if quick else "")
    texts = {key: getattr(found, key) for key in ("claim", "ours", "why", "setting")}
    result = texts | {"command": command} | found.figures
    out.mkdir(parents=True, exist_ok=True)
    save(found.picture, out / f"{name}.png")
    with (out / f"{name}.csv").open("w", newline="") as file:
        columns = list(dict.fromkeys(key for row in found.rows for key in row))
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        for row in found.rows:
            writer.writerow({key: f"{v:.6g}" if isinstance(v, float) else v for key, v in row.items()})
    write_whole(out / f"{name}.json", json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    return result


def data_folder() -> Path:
    """The folder of the traces and data sets for experiments, benchmarks and tests, which may not exist.

    It is $PACELINE_DATA, or else shared/data in the repository, or else a folder shared/data beside the checkout.
    """
    named = os.environ.get("PACELINE_DATA")
    if named:
        return Path(named)
    root = Path(__file__).resolve().parents[3]
    beside = root.parent / "shared" / "data"
    return beside if beside.is_dir() and not (root / "shared" / "data").is_dir() else root / "shared" / "data"
