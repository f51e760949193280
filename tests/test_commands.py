"""A printed command works in the shell where it was printed: as ``make demo`` starts it, on the PATH, as a module."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import commands

SCRIPT = '#!{python}\nfrom paceline.cli import main\n\nif __name__ == "__main__":\n    main()\n'
PLAIN = "/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"  # without any Python environment


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with an environment's ``.venv/bin/paceline``, which is not on the PATH."""
    script = tmp_path / ".venv" / "bin" / "paceline"
    script.parent.mkdir(parents=True)
    script.write_text(SCRIPT.format(python=sys.executable))
    script.chmod(0o755)
    return tmp_path


def shell(line: str, place: Path, path: str = PLAIN) -> str:
    """What a line prints in a shell with this PATH."""
    source = Path(commands.__file__).parents[1]
    env = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=place,
        env=env | {"PATH": path, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("start", "path"),
    [
        (".venv/bin/paceline", PLAIN),
        ("paceline", "{place}/.venv/bin:" + PLAIN),
        (f"{sys.executable} -m paceline", PLAIN),
    ],
)
def test_printed_command_starts_the_program_as_it_was_started(place: Path, start: str, path: str) -> None:
    path = path.format(place=place)
    said = shell(f"{start} whatif --polcy level", place, path)
    found = re.search(r"[Ss]ee (.*) --help$", said.strip())
    assert found is not None, said
    assert found[1] == f"{start} whatif"
    assert "For example: " + start in " ".join(shell(f"{found[1]} --help", place, path).split())


def test_another_paceline_on_the_path_is_not_taken_for_this_one(place: Path) -> None:
    other = place / "other" / "paceline"
    other.parent.mkdir()
    other.write_text("#!/bin/sh\necho another\n")
    other.chmod(0o755)
    said = shell(".venv/bin/paceline whatif --polcy level", place, f"{other.parent}:{PLAIN}")
    assert ".venv/bin/paceline whatif --help" in said


def test_a_path_with_a_space_is_quoted(place: Path) -> None:
    spaced = place / "my env"
    (place / ".venv").rename(spaced)
    said = shell("'my env/bin/paceline' whatif --polcy level", place)
    found = re.search(r"[Ss]ee (.*) --help$", said.strip())
    assert found is not None, said
    assert "Show what each policy" in shell(f"{found[1]} --help", place)


def test_a_script_of_the_users_names_the_command_of_its_environment(place: Path) -> None:
    code = "from paceline import commands; print(commands.line('watch', 'my runs'))"
    said = shell(f'{sys.executable} -c "{code}"', place).strip()
    assert said.endswith(" watch 'my runs'")
    started = said.removesuffix(" watch 'my runs'")
    assert shell(f"{started} --version", place).strip() == __import__("paceline").__version__


def test_installation_names_the_folder_that_holds_the_project(place: Path) -> None:
    code = "from paceline import commands; print(commands.installation('plot'))"
    said = shell(f'{sys.executable} -c "{code}"', place).strip()
    assert said.startswith("run: ")
    folder = re.search(r"install '?(.*)\[plot\]'?$", said)
    assert folder is not None, said
    assert (Path(folder[1]) / "pyproject.toml").is_file()
    pip = said.removeprefix("run: ").split(" install ")[0]
    assert shell(f"{pip} --version", place).startswith("pip ")


def test_rank_of_torchrun_knows_the_command_that_started_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2"])
    for name, value in {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    assert " ".join(commands.training()) == "torchrun --standalone --nproc-per-node 3 train.py --epochs 2"
    monkeypatch.setenv("WORLD_SIZE", "6")  # of two machines: its addresses are the user's
    assert commands.training() == ["torchrun", "...", "train.py", "--epochs", "2"]
