"""The help of a command whose packages are not installed says what to install."""

from __future__ import annotations

import re

import pytest

from support.commands import installs, python


@pytest.mark.parametrize(
    ("command", "package", "extra"), [("verify", "torch", "torch"), ("serve", "fastapi", "cli")]
)
def test_help_without_its_packages_names_the_installation(command: str, package: str, extra: str) -> None:
    start = f"from paceline.cli import main; main([{command!r}, '--help'])"
    code = f"import sys; sys.modules[{package!r}] = None; {start}"
    done = python(code)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "Usage" in said
    assert re.search(rf"Its options need {package}.*, which is not installed; {installs(extra)}", said), said
