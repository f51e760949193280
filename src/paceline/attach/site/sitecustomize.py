"""Python runs this file when it starts, if a command of Paceline has put this folder on its path.

The file does nothing until the script makes its first object of one class, which it then hands over. Its parameter is
an environment variable, see ``paceline.attach.command.entering``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Imports one module as usual, then passes its class to ``_hand_over``."""

    def __init__(self, module: str, kind: str, function: str) -> None:
        self._module, self._kind, self._function = module, kind, function

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _hand_over(getattr(module, self._kind), self._function)

        loader.exec_module = exec_module
        return spec


def _hand_over(kind: Any, function: str) -> None:
    """Replace the class's constructor once: ``function`` (``module:name``) is called with the constructor, the first
    object, and its arguments, and has to call the constructor."""
    make, (module, name) = kind.__init__, function.split(":")

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        kind.__init__ = make
        try:
            called = getattr(importlib.import_module(module), name)
        except ImportError:
            print(
                f"paceline: it is not installed for {sys.executable}, which runs the script", file=sys.stderr
            )
            make(self, *arguments, **named)
        else:
            called(make, self, *arguments, **named)

    kind.__init__ = __init__


def _next_sitecustomize() -> None:
    """Run the next sitecustomize module on the path, which this file hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if (_entry := os.environ.get("PACELINE_ATTACH")) is not None:
    sys.meta_path.insert(0, _Finder(*_entry.split(" ")))
_next_sitecustomize()
