"""Tables for a terminal: narrow, and whole."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from paceline import tables
from paceline.cli.report import comparison_table
from paceline.runs import Recorder, read
from paceline.simulate import whatif as compared
from support.records import line


def printed(table: Table, width: int = 80) -> list[str]:
    out = io.StringIO()
    tables.print_whole(Console(file=out, width=width), table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def record(folder: Path, policy: str, loads: list[int], **finished: Any) -> Any:
    """A run of workers that all take 1 ms for a sample, the last one 4 ms."""
    each = np.array([1e-3] * (len(loads) - 1) + [4e-3]) * loads
    facts = {"policy": policy, "workers": len(loads), "global_batch": sum(loads)}
    with Recorder.create(folder, facts) as run:
        for t in range(30):
            line(run, t, seconds=float(each.max()), loads=loads, compute=each, loss=2.0 / (1 + t))
        run.finish(**finished)
    return read(folder)


def test_wide_heads_wrap_to_the_width_of_their_cells() -> None:
    shown = tables.begun("policy", figures=("portion of the combined speed", "loads in the last round"))
    shown.add_row("equal", "33.8 %", "86/85/85")
    shown.add_row("factoring", "82.2 %", "113/115/28")
    assert printed(shown) == [
        "            portion",
        "             of the    loads in",
        "           combined    the last",
        "policy        speed       round",
        "─" * 31,
        "equal        33.8 %    86/85/85",
        "factoring    82.2 %  113/115/28",
    ]


def test_narrow_heads_stay_on_one_line_and_wide_cells_whole() -> None:
    shown = tables.begun("policy", figures=("as fast",))
    shown.add_row("x" * 20, "1.00x")
    assert len(printed(shown)) == 3
    shown.add_row("x" * 90, "1.00x")
    assert printed(shown, width=40)[-1] == "x" * 90 + "  1.00x"


@pytest.mark.parametrize("finished", [{"test_accuracy": 0.902}, {}])
def test_comparison_of_runs_fits_60_columns(tmp_path: Path, finished: dict[str, Any]) -> None:
    runs = [
        record(tmp_path / "equal", "equal", [128] * 4, **finished),
        record(tmp_path / "level", "level", [158, 157, 157, 140], **finished),
    ]
    lines = printed(comparison_table(runs))
    assert max(map(len, lines)) <= 60
    assert "158/157/157/140" in lines[-1]
    assert ("accuracy" in lines[0]) is bool(finished)


def test_other_policies_of_a_run_fit_60_columns(tmp_path: Path) -> None:
    answer = compared.of_run(record(tmp_path / "equal", "equal", [128] * 4), ["equal", "level"])
    assert max(map(len, printed(compared.table(answer)))) <= 60
