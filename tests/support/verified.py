"""Runs of ``paceline verify`` whose ranks are forked from a server that has PyTorch loaded."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline.verify.command import in_turn, plans, recorded
from paceline.verify.compare import RunLog
from paceline.verify.record import PLAN
from paceline.verify.verdict import Verdict, judged
from support import forks


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
    forks.load("paceline.verify.inside", *loaded)
    with tempfile.TemporaryDirectory() as place:
        every = plans(Path(place), steps, loads, batch_norm)

        def run(number: int) -> RunLog:
            told = [each | {PLAN: json.dumps(every[number])} for each in forks.as_torchrun(ranks)]
            forks.all_well(told, [__file__, program, *arguments])
            return recorded(every[number])

        return judged(in_turn(every, run))


def _enter() -> None:
    """As attach/site/sitecustomize.py does, in a process that has imported Paceline before."""
    from paceline.torch.balanced import Balanced
    from paceline.verify import inside

    make = Balanced.__init__

    def first(*given: Any, **named: Any) -> None:
        Balanced.__init__ = make  # type: ignore[method-assign]
        inside.enter(make, *given, **named)

    Balanced.__init__ = first  # type: ignore[method-assign]


if __name__ == "__main__":
    _enter()
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
