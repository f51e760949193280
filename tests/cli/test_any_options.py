"""Whatever options a command is given, it answers: with what was asked for, or in a sentence, never a traceback."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("torch")
pytest.importorskip("fastapi")
pytest.importorskip("ray")

from support import any_options
from support.commands import paceline

GUARANTEES = (
    "Wrong, mistyped or huge options give one message with what was perhaps meant and exit status 2; "
    "never a traceback.",
)

COMMANDS = any_options.commands()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("files")
    any_options.make_files(place)
    with any_options.no_work():
        yield place


@pytest.mark.parametrize("name", COMMANDS)
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_every_command_answers_any_options(
    name: str, files: Path, tmp_path: Path, data: st.DataObject
) -> None:
    line = data.draw(any_options.arguments(COMMANDS[name]))
    scratch = tmp_path / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(files, scratch)
    with contextlib.chdir(scratch):
        said = paceline(name, *line)
    assert said.status in (0, 1, 2)
    assert "Traceback" not in said.stdout + said.stderr
    if said.status == 2:
        assert said.stderr.strip().splitlines()[-1].startswith("paceline: ")
