"""A host that is not installed is named, with what to install."""

from __future__ import annotations

import importlib
import sys

import pytest

from paceline.errors import PacelineError
from support.commands import installs


@pytest.mark.parametrize(
    ("host", "needs"), [("lightning", "lightning.pytorch"), ("fabric", "lightning.fabric")]
)
def test_error_names_what_to_install(host: str, needs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, needs, None)  # as if it were not there
    monkeypatch.delitem(sys.modules, f"paceline.hosts.{host}", raising=False)
    with pytest.raises(PacelineError, match=f"not installed; {installs('hosts')}"):
        importlib.import_module(f"paceline.hosts.{host}")
