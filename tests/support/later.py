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
    if find_spec(needs) is None:
        pytest.skip(f"needs {needs}", allow_module_level=True)
    return _Later(module)
