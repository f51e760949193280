"""The ports of other people's programs: each is well formed, and a program of another version is refused."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.guarantees import guarantee

PORTS = Path(__file__).parents[2] / "examples" / "ports"
NAMES = sorted(path.stem for path in PORTS.glob("*.toml"))
PROGRAM = """\
from accelerate import Accelerator


def training_function(config, args):
    for epoch in range(num_epochs):
        for step, batch in enumerate(train_dataloader):
            accelerator.backward(loss)
            if step % gradient_accumulation_steps == 0:
                optimizer.step()
"""


def port(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PORTS / "port.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


@pytest.mark.parametrize("name", NAMES)
def test_is_well_formed(name: str) -> None:
    import tomllib

    files = tomllib.loads((PORTS / f"{name}.toml").read_text())["file"]
    edits = [edit for part in files for edit in part["edit"]]
    assert sum(len(edit.get(way, [])) for edit in edits for way in ("before", "after", "replace")) <= 8
    for edit in edits:
        re.compile(edit["line"])
        assert set(edit) - {"line"} <= {"before", "after", "replace", "delete"}
        assert len(edit) >= 2


def test_shows_the_change_and_makes_it(tmp_path: Path) -> None:
    program = tmp_path / "nlp_example.py"
    program.write_text(PROGRAM)
    shown = port("nlp_example", str(tmp_path))
    assert shown.returncode == 0
    assert program.read_text() == PROGRAM, "only shown"
    made = port("nlp_example", str(tmp_path), "--write")
    assert "6 lines added or changed, 0 left out" in made.stderr
    lines = program.read_text().splitlines()
    assert lines[1] == "from paceline.hosts.accelerate import AcceleratePace"
    assert "            pace.backward(loss)" in lines, "indented as what it replaces"
    assert "+            pace.backward(loss)" in shown.stdout.splitlines()


@guarantee(
    "A program of another version than a port was written for (`examples/ports`) is refused and stays "
    "unchanged."
)
def test_another_program_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    program = tmp_path / "nlp_example.py"
    program.write_text(PROGRAM.replace("accelerator.backward(loss)", "loss.backward()"))
    before = program.read_text()
    refused = port("nlp_example", str(tmp_path), "--write")
    assert refused.returncode == 2
    assert "0 lines match" in refused.stderr
    assert "make the change by hand" in refused.stderr
    assert program.read_text() == before
    missing = port("nanogpt", str(tmp_path))
    assert missing.returncode == 2
    assert "train.py is not there" in missing.stderr
    unknown = port("nobody", str(tmp_path))
    assert unknown.returncode == 2
    assert "expected one of accelerate_performance, imagenet" in unknown.stderr
