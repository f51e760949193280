"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.blocks import PAGES, ROOT, SHELL, complaints, document, name
from support.shell import free_port


def own_script() -> dict[str, Any]:
    """What fragments of a user's script take for granted: a model, data, an optimizer."""
    import torch
    from torch import nn

    import paceline.torch
    from paceline.data import load

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


GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": wrapped,
    "docs/training.md": own_script,
    "docs/simulate.md": wrapped,
    "docs/tutorial.md": paced,
}
RAY = ("docs/coded.md", "docs/server.md", "docs/backup.md", "docs/gates.md")  # pages that start Ray


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory like the repository's root, where a page leaves its files."""
    from paceline import policies

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(policies, "POLICIES", dict(policies.POLICIES))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    return tmp_path


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The variables of a launcher that started one rank; what joined a group leaves it at the end."""
    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        for key, value in {
            "RANK": 0,
            "WORLD_SIZE": 1,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }.items():
            patch.setenv(key, str(value))
        yield


def _marks(page: Path) -> list[pytest.MarkDecorator]:
    kind = "ray" if name(page) in RAY else "processes"
    return [getattr(pytest.mark, kind), pytest.mark.xdist_group(kind if kind == "ray" else name(page))]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_can_be_run(page: Path) -> None:
    assert complaints(page) == []


@pytest.mark.parametrize("page", [pytest.param(p, id=name(p), marks=_marks(p)) for p in PAGES])
def test_page(page: Path, place: Path) -> None:
    examples = list(document(page))
    if not examples:
        pytest.skip("no code")
    given = GIVEN.get(name(page), dict)
    with launched():
        examples[0].namespace.update({"__name__": page.stem} | given())
    try:
        for example in examples:
            with launched() if example.region.lexemes["language"] == "python" else contextlib.nullcontext():
                example.evaluate()
    finally:
        if (shell := examples[0].namespace.get(SHELL)) is not None:
            shell.close()
        if given is not dict:
            from paceline.torch import leave

            leave(examples[0].namespace.get("ddp"))
