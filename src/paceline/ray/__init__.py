"""Paceline on Ray: the parameter server and the coded matrix product. Needs the extra ``ray``."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from paceline.commands import installation
from paceline.errors import PacelineError

if TYPE_CHECKING:
    from paceline.ray.api import torch_program, train
    from paceline.ray.matmul import CodedMatrix
    from paceline.ray.pool import WorkerPool, measure
    from paceline.ray.server import Server

if find_spec("ray") is None:  # without importing it
    raise PacelineError(f"the Ray engine needs ray; {installation('ray')}")

__all__ = ["CodedMatrix", "Server", "WorkerPool", "measure", "torch_program", "train"]

_HOMES = {
    "CodedMatrix": "matmul",
    "Server": "server",
    "WorkerPool": "pool",
    "measure": "pool",
}  # all others are in api


def __getattr__(name: str) -> Any:
    """Import a module that needs Ray only when one of its names is used."""
    if name in __all__:
        return getattr(import_module(f"paceline.ray.{_HOMES.get(name, 'api')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
