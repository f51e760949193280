"""A host that is not installed: one error message that names the extra."""

from __future__ import annotations

import re

import pytest

from support.commands import installs, python


@pytest.mark.parametrize(
    ("module", "needs"),
    [
        ("accelerate", "accelerate"),
        ("lightning", "lightning.pytorch"),
        ("fabric", "lightning.fabric"),
        ("transformers", "transformers"),
        ("ray_train", "ray"),
    ],
)
def test_missing_host_is_named_with_the_extra(module: str, needs: str, warm: None) -> None:
    done = python(f"import sys; sys.modules[{needs!r}] = None; import paceline.hosts.{module}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert re.match(f"paceline.errors.PacelineError: .* not installed; {installs('hosts')}", last)
