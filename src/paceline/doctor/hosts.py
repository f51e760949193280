"""Whose loop it is: the script's own, or a framework's that Paceline has an adapter for."""

from __future__ import annotations

from types import FrameType

HOSTS = {  # the module whose code wraps the model: the adapter of paceline.hosts
    "transformers.trainer": "transformers",
    "lightning.pytorch.strategies": "lightning",
    "pytorch_lightning.strategies": "lightning",
    "lightning.fabric": "fabric",
    "lightning_fabric": "fabric",
    "ray.train.torch": "ray_train",
    "accelerate.accelerator": "accelerate",
}


def host(frame: FrameType | None) -> str:
    """The outermost framework in whose code ``frame`` is running; "" for a script's own."""
    found = ""
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        for name, adapter in HOSTS.items():
            if module == name or module.startswith(f"{name}."):
                found = adapter
        frame = frame.f_back
    return found
