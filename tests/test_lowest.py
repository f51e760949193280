"""The lowest versions that pyproject.toml allows are those of constraints-lowest.txt, with which the tests run."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
# Extras that are no developer's own.
USERS = ("cli", "plot", "torch", "ray", "sca", "tensorboard", "hosts")


def bounds() -> dict[str, Version]:
    """Of what users install, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["optional-dependencies"]) == {*USERS, "docs", "dev"}
    lines = [
        *project["dependencies"],
        *(line for extra in USERS for line in project["optional-dependencies"][extra]),
    ]
    lines = [line for line in lines if not line.startswith("paceline[")]  # an extra that includes another
    found: dict[str, Version] = {}
    for each in map(Requirement, lines):
        (lowest,) = (Version(part.version) for part in each.specifier if part.operator == ">=")
        assert found.setdefault(each.name, lowest) == lowest, f"{each.name} has two lowest versions"
    return found


def test_the_lowest_versions_are_those_that_were_tried() -> None:
    text = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8")
    tried = {name: Version(version) for name, version in re.findall(r"^([\w-]+)==(\S+)", text, re.MULTILINE)}
    assert tried == bounds()
