"""The page on the layout of the code tells of what is there: files, the symbols of each walk, rooms, the contract."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from itertools import groupby
from pathlib import Path

import pytest

from support.blocks import ROOT

PACKAGE = ROOT / "src" / "paceline"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
WALKS = dict(re.findall(r"^### (.+?)\n(.+?)(?=^### |\Z)", PAGE, re.MULTILINE | re.DOTALL))
STEP = re.compile(r"^\d+\. `([\w/]+\.py)`, `([\w.]+)`", re.MULTILINE)


def test_every_file_and_folder_that_the_page_names_is_there() -> None:
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGE))
    assert len(named) > 60
    missing = {name for name in named if not (PACKAGE / name).exists() and not (ROOT / name).is_dir()}
    assert not missing


def test_every_room_has_its_line() -> None:
    table = PAGE.split("## The rooms")[1].split("\n## ")[0]
    told = set(re.findall(r"`(\w+)(?:\.py|/)`", table))
    rooms = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__", "__main__"} == told


@cache
def _names(path: Path) -> frozenset[str]:
    """What a file defines: functions, classes with their methods, and constants."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
            inner = node.body if isinstance(node, ast.ClassDef) else []
            methods = [each for each in inner if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            found |= {f"{node.name}.{method.name}" for method in methods}
    return frozenset(found)


def test_there_are_four_walks() -> None:
    assert len(WALKS) == 4


@pytest.mark.parametrize("walk", WALKS)
def test_a_walk_leads_through_what_is_there_without_turning_back(walk: str) -> None:
    steps = STEP.findall(WALKS[walk])
    assert 8 <= len(steps) <= 12
    assert len(steps) == len(re.findall(r"^\d+\. ", WALKS[walk], re.MULTILINE))
    gone = [f"{file}: {symbol}" for file, symbol in steps if symbol not in _names(PACKAGE / file)]
    assert not gone
    files = [file for file, _ in groupby(file for file, _ in steps)]
    assert len(files) == len(set(files)), "a walk comes back to a file"


def test_what_a_change_is_named_in_is_there() -> None:
    table = PAGE.split("## Where a change goes")[1].split("\n## ")[0]
    named = re.findall(r"`([A-Z]+)` in `([\w/]+\.py)`", table)
    assert len(named) >= 5
    assert not [(name, file) for name, file in named if name not in _names(PACKAGE / file)]


def test_the_map_has_all_rooms_and_is_drawn_from_the_imports() -> None:
    code = (
        "import architecture; print(*sorted({*architecture.ACROSS, *architecture.GROUND})); "
        "print(*(f'{a}>{b}' for a, b in architecture.imports()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "docs" / "pictures",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rooms, arrows = (line.split() for line in done.stdout.splitlines())
    there = {
        path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert set(rooms) == there - {"__init__", "__main__"}
    assert {"hosts>torch", "policies>balance", "balance>shares"} <= set(arrows)
    assert not {"torch>hosts", "balance>policies"} & set(arrows)
