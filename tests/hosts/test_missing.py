"""A host that is not installed: one sentence that names the extra."""

from __future__ import annotations

import re

import pytest

from support.commands import installs, python

HOSTS = [
    ("accelerate", "accelerate", "hosts"),
    ("transformers", "transformers", "hosts"),
    ("ray_train", "ray", "hosts"),
]


@pytest.mark.parametrize(("module", "needs", "extra"), HOSTS)
def test_error_names_what_to_install(module: str, needs: str, extra: str, warm: None) -> None:
    code = f"import sys; sys.modules[{needs!r}] = None; import paceline.hosts.{module}"
    done = python(code)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("paceline.errors.PacelineError: ")
    assert re.search(installs(extra), last)
