"""The built wheel in a clean environment, with each of its extras."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    code = f"from hatchling.build import build_wheel; print(build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return out / done.stdout.split()[-1]


def clean(place: Path) -> Path:
    """A new environment's folder of programs."""
    subprocess.run([sys.executable, "-m", "venv", place / "env"], check=True)
    return place / "env" / "bin"


def run(*command: object, status: int = 0) -> str:
    """What a command prints, outside of the repository."""
    left = (
        "PYTHONPATH",
        "VIRTUAL_ENV",
        "RES_OPTIONS",
    )  # the last keeps other tests from asking a name server
    env = {name: value for name, value in os.environ.items() if name not in left}
    done = subprocess.run([*map(str, command)], cwd="/", env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_installed_without_extras_it_names_the_installation_of_the_command_line(
    wheel: Path, tmp_path: Path
) -> None:
    programs = clean(tmp_path)
    run(programs / "python", "-m", "pip", "install", "-q", wheel)
    run(programs / "python", "-c", "import paceline, paceline.policies, paceline.client")
    said = run(programs / "paceline", "--version", status=2)
    assert "in Paceline's folder, run: " in said
    assert "install '.[cli]'" in said


def test_installed_command_line_helps_serves_and_simulates_without_torch(wheel: Path, tmp_path: Path) -> None:
    programs = clean(tmp_path)
    run(programs / "python", "-m", "pip", "install", "-q", f"{wheel}[cli]")
    for command in ("train", "serve", "watch", "doctor", "verify", "report", "plan", "simulate", "whatif"):
        assert "Usage" in run(programs / "paceline", command, "--help")
    (tmp_path / "trace.csv").write_text(
        "round,worker,seconds_per_sample,overhead_seconds\n0,0,0.001,0\n0,1,0.004,0\n"
    )
    said = run(programs / "paceline", "simulate", "--trace", tmp_path / "trace.csv", "--rounds", "1")
    assert "equal" in said
    said = run(programs / "paceline", "train", status=2)
    assert "orch is not installed; in Paceline's folder, run: " in said


@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"cli"}))
def test_extra_can_be_installed(extra: str, wheel: Path, tmp_path: Path) -> None:
    programs = clean(tmp_path)
    run(programs / "python", "-m", "pip", "install", "-q", "--dry-run", f"{wheel}[{extra}]")
