"""What the doctor prints: whole at 80 columns, and never a figure cut."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from doctor.test_findings import diagnosis
from paceline.doctor.findings import show
from paceline.doctor.phases import Phase


@pytest.fixture(autouse=True)
def a_script(monkeypatch: pytest.MonkeyPatch) -> None:
    """The script whose command the doctor repeats: however the tests were started, it is this one."""
    monkeypatch.setattr("sys.argv", ["train.py"])


def shown(place: Path, ranks: int, width: int) -> tuple[list[str], list[float]]:
    """The lines on a terminal of that width, and the computing seconds of each rank."""
    spread = np.linspace(0.0123, 0.0456, ranks)
    parts = {Phase.FETCH: spread / 3, Phase.FORWARD: spread, Phase.BACKWARD: 2 * spread}
    parts |= {Phase.MOVE: spread / 7, Phase.FINISH: spread / 9, Phase.PREPARE: spread / 99}
    found = diagnosis(place, parts, exchanging=0.0123)
    text = StringIO()
    show(found, Console(file=text, force_terminal=True, width=width, soft_wrap=True, color_system=None))
    return text.getvalue().splitlines(), found.spent.computing.tolist()


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_eighty_columns_are_enough(tmp_path: Path, ranks: int) -> None:
    lines, computing = shown(tmp_path, ranks, 80)
    assert max(map(len, (line.rstrip() for line in lines))) <= 80
    text = "\n".join(lines)
    assert "…" not in text
    for seconds in computing:
        assert f" {1e3 * seconds:.3g} " in text, "each rank's figures are whole"
    assert "+ import paceline.torch" in text


def test_a_narrow_window_cuts_nothing(tmp_path: Path) -> None:
    lines, _ = shown(tmp_path, 8, 40)
    assert "…" not in "\n".join(lines)
    assert lines[0].startswith("Ranks 7, 6 and 5 take")
    assert len(lines[0]) <= 40, "sentences are broken between words"
