"""Python runs this file when it starts, if ``paceline doctor`` has put this folder on its path.

The file does nothing until the script makes its first DistributedDataParallel module, which it then watches. Its
parameters are two environment variables that ``paceline doctor`` sets for the command it starts.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TARGET = "torch.nn.parallel.distributed"


class _Finder(MetaPathFinder):
    """Imports TARGET as usual, then passes its DistributedDataParallel class to ``_hand_over``."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader: Any = spec.loader if spec is not None else None
        if loader is None:
            return None
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _hand_over(module.DistributedDataParallel)

        loader.exec_module = exec_module
        return spec


def _hand_over(kind: Any) -> None:
    """Replace the class's constructor once, so that the first module it makes is watched."""
    make = kind.__init__

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        kind.__init__ = make
        make(self, *arguments, **named)
        try:
            from paceline.doctor.command import attach
        except ImportError:
            print(
                f"paceline: it is not installed for {sys.executable}, which runs the script", file=sys.stderr
            )
        else:
            attach(self)

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


if "PACELINE_DOCTOR_DIR" in os.environ:
    sys.meta_path.insert(0, _Finder())
_next_sitecustomize()
