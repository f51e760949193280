"""The adapters reach into a micro-step by its documented hook alone: what they override of Pace is what its users
call."""

from __future__ import annotations

from importlib import import_module

import pytest

from paceline.torch import Pace

HANDLES = {"__init__", "backward", "close", "state_dict", "weighted"}  # of whom a host's user has one in hand


@pytest.mark.parametrize(
    ("host", "name"),
    [("accelerate", "AcceleratePace"), ("fabric", "FabricPace"), ("ray_train", "RayTrainPace")],
)
def test_an_adapter_overrides_only_what_the_user_calls(host: str, name: str) -> None:
    adapter: type[Pace] = getattr(import_module(f"paceline.hosts.{host}"), name)
    kinds = adapter.__mro__[: adapter.__mro__.index(Pace)]
    own = {name for kind in kinds for name in vars(kind) if name in dir(Pace)}
    overridden = {name for name in own if getattr(adapter, name) is not getattr(object, name, None)}
    assert overridden - {"__module__", "__doc__", "__annotations__"} <= HANDLES
