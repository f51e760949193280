"""What a rank writes down in one run: a line of JSON for each optimizer step, and one for all else that it noticed.

Of a tensor only its norm and a few seeded projections are kept. They are enough to estimate how far two tensors are
apart (a count sketch: entries get random signs and are summed in ``PROJECTIONS`` blocks; the squared difference of
two sketches is on average that of the tensors).
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import torch

PLAN = "PACELINE_VERIFY"  # variable of the environment: what to do in this run, as JSON
DONE = "done"  # kind of a rank's last line
OTHERS_SECONDS = 60.0  # for the other ranks' last steps
PROJECTIONS = 16
"""Numbers that are kept of each tensor, besides its norm."""

Sketch = list[float]
"""The norm of a tensor, followed by its projections; an empty list for None."""


def sketch(name: str, tensor: torch.Tensor | None) -> Sketch:
    """The norm and the projections of a tensor in float64. name: seeds the random signs."""
    if tensor is None:
        return []
    values = local(tensor).detach()
    values = (values.to_dense() if values.is_sparse else values).flatten()
    generator = torch.Generator(values.device).manual_seed(zlib.crc32(f"{name} {values.numel()}".encode()))
    signs = torch.randint(2, (values.numel(),), generator=generator, dtype=torch.int8, device=values.device)
    values = torch.nn.functional.pad(values.double(), (0, -values.numel() % PROJECTIONS))
    signs = torch.nn.functional.pad(signs, (0, -signs.numel() % PROJECTIONS)) * 2 - 1
    projected = (values * signs).view(PROJECTIONS, -1).sum(1)
    return [float(values.norm()), *projected.tolist()]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that ``fully_shard`` has divided, else the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def options(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """The numbers among the options of each parameter group, such as lr, momentum and weight_decay."""
    return [
        {
            f"{key}{number}": float(one)
            for key, value in group.items()
            if key != "params"
            for number, one in _numbers(value)
        }
        for group in optimizer.param_groups
    ]


def _numbers(value: Any) -> Iterable[tuple[str, float]]:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        yield "", float(value)
    elif isinstance(value, (int, float)) and math.isfinite(value):
        yield "", value
    elif isinstance(value, (tuple, list)):
        yield from ((f"[{at}]", each) for at, each in enumerate(value) if isinstance(each, (int, float)))


class Writer:
    """The record of one rank in one run. Each line is written at once, since the program may end in any way."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._noted: set[str] = set()

    def line(self, kind: str, **facts: Any) -> None:
        """Write one line."""
        self._file.write(json.dumps({"kind": kind, **facts}) + "\n")
        self._file.flush()

    def note(self, kind: str, **facts: Any) -> None:
        """Write a line unless the same one is there."""
        if (text := json.dumps([kind, facts])) not in self._noted:
            self._noted.add(text)
            self.line(kind, **facts)


def leave(writer: Writer, folder: Path, rank: int, ranks: int) -> NoReturn:
    """All steps are recorded: end when the other ranks have recorded theirs."""
    writer.line(DONE)
    (folder / f"{rank}.{DONE}").touch()
    until = time.monotonic() + OTHERS_SECONDS
    while time.monotonic() < until and len(list(folder.glob(f"*.{DONE}"))) < ranks:
        time.sleep(0.01)
    os._exit(0)


def read(path: Path) -> list[dict[str, Any]]:
    """The lines of a record; the last one may have been cut when the program ended."""
    found = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(text))
        except ValueError:
            break
    return found
