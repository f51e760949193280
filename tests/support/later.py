"""Modules that take a second and more to import, for the one process of several that runs their tests."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest


class _Later(ModuleType):
    """Is imported when something of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what pytest asks of all that a module of tests holds
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


def later(module: str, needs: str) -> Any:
    """The module; the tests of the calling one are skipped where ``needs`` is not installed."""
    skip_without(needs)
    return _Later(module)


def skip_without(package: str) -> None:
    """As ``pytest.importorskip`` for the tests of the calling module, but nothing is imported."""
    if find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
