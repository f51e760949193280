"""Whatever a record holds, the page has something to say of it, without a warning and without a NaN."""

import json
import re
import time
import warnings
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from paceline.live import panel
from paceline.runs import charts, report
from paceline.runs.columns import Columns
from support.any_run import any_run


def served(run, random):
    """The same rounds, as a parameter server records them; some without its fields."""
    fields = {"quorum": 2, "present": 3, "staleness": [0, 4], "dropped": {"late": 2}}
    missing = random.random(len(run.round)) < random.choice([0.0, 0.5, 1.0])
    return replace(run, extras={name: [None if m else v for m in missing] for name, v in fields.items()})


def shown(run, columns):
    """The panel of a page that follows this run."""
    facts = {"config": run.config, "summary": {}, "gone": "", "damaged": "", "more": False, "silent": 0.0}
    tail = SimpleNamespace(columns=columns, touched=time.time(), **facts)
    return panel.panel(tail, panel.saving(columns), panel.speeds(columns))


@pytest.mark.parametrize("seed", range(40))
def test_any_record(seed, tmp_path):
    random = np.random.default_rng(seed)
    run = any_run(random, tmp_path)
    if seed % 2:
        run = served(run, random)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        columns = Columns.of(run)
        content = shown(run, columns)
        start = int(random.integers(len(columns)))
        pictures = [charts.overview(columns.window(recent=1)), *report.figures(columns, start, None, 50)]
        said = json.dumps(content, allow_nan=False)
    for text in (said, *pictures):
        assert not re.search(r"\b(nan|inf|None)\b", re.sub(r'base64,[^"]*', "", text))
    for worker in content["workers"]:
        assert all(0 <= width <= 1 for width in worker["widths"])


def test_a_round_without_workers(tmp_path):
    run = any_run(np.random.default_rng(0), tmp_path)
    nobody = np.zeros((len(run.round), 0))
    empty = replace(run, **dict.fromkeys(("loads", "compute", "overhead", "wait"), nobody))
    columns = Columns.of(empty)
    assert shown(run, columns)["rounds"] == len(run.round)
    assert report.figures(columns)
