"""Runs of ``paceline verify`` whose ranks are forked from a server that has PyTorch loaded."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.verify.command import plans, recorded
from paceline.verify.compare import Run
from paceline.verify.inside import PLAN
from paceline.verify.verdict import Verdict, judged
from support.launched import as_torchrun, run_forked


def verified(
    program: Path,
    *arguments: str,
    loaded: tuple[str, ...] = (),
    ranks: int = 3,
    steps: int = 5,
    loads: list[list[int]] | None = None,
    batch_norm: bool = False,
) -> Verdict:
    """The verdict on a program. loaded: modules to have loaded before."""
    runs: list[Run] = []
    with tempfile.TemporaryDirectory() as place:
        for plan in plans(Path(place), steps, loads, batch_norm):
            told = [each | {PLAN: json.dumps(plan)} for each in as_torchrun(ranks)]
            run_forked(told, Path(__file__), ["paceline.verify.inside", *loaded], [str(program), *arguments])
            runs.append(recorded(plan))
    return judged(runs)


def _enter() -> None:
    """As attach/site/sitecustomize.py does, in a process that has imported Paceline before."""
    from paceline.torch.pace import Pace
    from paceline.verify import inside

    make = Pace.__init__

    def first(*given: Any, **named: Any) -> None:
        Pace.__init__ = make  # type: ignore[method-assign]
        inside.enter(make, *given, **named)

    Pace.__init__ = first  # type: ignore[method-assign]


if __name__ == "__main__":
    _enter()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
