"""Runs every block of a page, in order: ``python -m support.pages PAGE``, in a directory of the page's own.

A page has a process of its own, so that nothing which other pages or tests have left behind, such as a Ray or a
process group, has a say in what its blocks do. The tests fork it from a server that has PyTorch loaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from support import forks, ray_forks
from support.blocks import ROOT, SHELL, document, name
from support.forks import free_port
from support.given import beside_a_service, own_script, paced, wrapped

# Around whose fragments a user's script is taken for granted, and which.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": wrapped,
    "docs/training.md": own_script,
    "docs/local.md": own_script,
    "docs/porting.md": wrapped,
    "docs/tutorial.md": paced,
    "docs/service.md": beside_a_service,
}
ONE_RAY = ("docs/server.md",)  # whose blocks share a Ray: each would start one of its own
TWO_RANKS = ("docs/doctor.md",)  # whose python takes two processes, as one script


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """The variables of a launcher that started one rank."""
    variables = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key in variables:
            os.environ.pop(key, None)


def in_two_ranks(source: str) -> None:
    """Run fragments in two ranks, with a model wrapped and a group joined before them."""
    script = Path("fragments.py")
    script.write_text(f"from support.given import wrapped\n\nglobals().update(wrapped())\n{source}\n")
    forks.run_script(2, script.absolute())


def run(page: Path) -> None:
    """Run the blocks of the page; raises what they raise."""
    with ray_forks.server() if name(page) in ONE_RAY else contextlib.nullcontext():
        if name(page) in ONE_RAY:
            ray_forks.load("torch.distributed")
        _run(page)


def _run(page: Path) -> None:
    examples = list(document(page))
    if name(page) in TWO_RANKS:
        python = [each.parsed for each in examples if each.region.lexemes["language"] == "python"]
        in_two_ranks("\n".join(python))
        examples = [each for each in examples if each.region.lexemes["language"] != "python"]
    names = examples[0].namespace
    if name(page) in ONE_RAY:
        from paceline.ray.start import connect

        ray_forks.use()
        connect(None, 4)
    with launched():
        names.update({"__name__": page.stem} | GIVEN.get(name(page), dict)())
    try:
        for example in examples:
            with launched() if example.region.lexemes["language"] == "python" else contextlib.nullcontext():
                example.evaluate()
        if (shell := names.get(SHELL)) is not None:
            shell.close()
    finally:
        if (service := names.get("service")) is not None:
            service.end()
        if "torch" in sys.modules:
            from paceline.torch import leave

            leave(names.get("ddp"))


if __name__ == "__main__":
    warnings.filterwarnings("error", category=RuntimeWarning, module=r"paceline\Z")
    run(ROOT / sys.argv[1])
