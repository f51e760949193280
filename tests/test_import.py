"""What importing Paceline costs and needs, and what its wheel says and holds."""

from __future__ import annotations

import os
import re
import sys
import zipfile
from pathlib import Path

import pytest

from support.commands import python
from support.guarantees import guarantee

GUARANTEES = (
    "`import paceline` loads at most twenty modules beyond numpy's, and numpy only where a name needs it.",
)

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"


@guarantee("`paceline.client` works with the standard library alone.")
def test_the_client_needs_the_standard_library_alone() -> None:
    # Without "site" no installed package is found, numpy neither.
    code = "import paceline.client, paceline; print(paceline.client.Worker.__name__, paceline.__version__)"
    done = python(code, "-S", PYTHONPATH=str(SRC))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "Worker"
    without = python("import numpy", "-S")
    assert "ModuleNotFoundError" in without.stderr


def test_names_that_need_numpy_are_there_when_asked_for() -> None:
    code = (
        "import sys, paceline; before = 'numpy' in sys.modules; from paceline import Cluster, Machines, Plan, Round; "
        "print(before, Cluster.__module__, 'Cluster' in dir(paceline), hasattr(paceline, 'nothing'))"
    )
    assert python(code).stdout.split() == ["False", "paceline.rounds", "True", "False"]


def test_importing_loads_at_most_twenty_modules_beyond_numpy_and_none_of_other_packages() -> None:
    code = (
        "import sys, numpy; before = set(sys.modules); import paceline; paceline.Cluster; "
        "print(*set(sys.modules) - before)"
    )
    loaded = python(code).stdout.split()
    assert {"paceline", "paceline.rounds"} <= set(loaded)
    assert len(loaded) <= 20
    assert {name.partition(".")[0] for name in loaded} - sys.stdlib_module_names <= {"paceline", "numpy"}


def test_the_doctor_starts_the_training_without_having_loaded_pytorch() -> None:
    done = python("import sys, paceline.cli.doctor; print('torch' in sys.modules)")
    assert done.stdout.split() == ["False"], done.stderr


@guarantee("The wheel says that it is typed, and has the version of the package.")
def test_wheel_is_typed_and_has_the_package_version(tmp_path: Path) -> None:
    hatchling = pytest.importorskip("hatchling.build")
    here = Path.cwd()
    os.chdir(ROOT)
    try:
        wheel = tmp_path / hatchling.build_wheel(str(tmp_path))
    finally:
        os.chdir(here)
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        told = content.read(metadata).decode()
        version = re.search(r'__version__ = "(.+)"', content.read("paceline/__init__.py").decode())
    assert version is not None
    assert f"\nVersion: {version[1]}\n" in told
    assert "\nClassifier: Typing :: Typed\n" in told
    assert "paceline/py.typed" in names
    assert "paceline/data/digits.npz" in names
    assert version[1] not in (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[tool.")[0].split()
