"""What the fragments of a page take for granted: a user's script around them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def own_script() -> dict[str, Any]:
    """What fragments of a user's script take for granted: a model, data, an optimizer."""
    import torch
    from torch import nn

    import paceline.torch
    from paceline.data.datasets import load

    digits = load("digits")
    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(digits.x_train[:512]), torch.from_numpy(digits.y_train[:512])
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    return {
        "model": model,
        "dataset": dataset,
        "criterion": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "epochs": 2,
        "paceline": paceline,
        "torch": torch,
    }


def wrapped() -> dict[str, Any]:
    """The same, with the group joined and the model wrapped."""
    from torch.nn.parallel import DistributedDataParallel

    import paceline.torch

    names = own_script()
    paceline.torch.join()
    ddp = DistributedDataParallel(names["model"])
    loader = torch_loader(names["dataset"])
    return names | {"ddp": ddp, "DistributedDataParallel": DistributedDataParallel, "loader": loader}


def paced() -> dict[str, Any]:
    """The same, with Paceline's handle and loader."""
    names = wrapped()
    pace = names["paceline"].torch.Pace(names["ddp"], global_batch=256)
    return names | {"pace": pace, "loader": pace.loader(names["dataset"], seed=0), "os": os}


def torch_loader(dataset: Any) -> Any:
    import torch

    return torch.utils.data.DataLoader(dataset, batch_size=64)


def beside_a_service() -> dict[str, Any]:
    """A service for one worker, and what that worker's framework would do; ``service`` is to be ended."""
    from support import served

    service = served.Process(Path("service").absolute(), "--batch", "256", "--workers", "1")
    return {
        "service": service,
        "url": service.url,
        "token": served.TOKEN,
        "compute": lambda number, *which: 1.0,
        "all_reduce_sum": lambda value: value,
        "step": lambda value: None,
    }
