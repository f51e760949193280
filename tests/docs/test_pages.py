"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from support import forks, ray_forks
from support.blocks import PAGES, ROOT, SHELL, complaints, document, name
from support.given import beside_a_service, own_script, paced, wrapped
from support.ports import free_port


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_block_can_be_run(page: Path) -> None:
    assert complaints(page) == []


def cells(row: str) -> int:
    """How many a row of a table has."""
    return len(re.findall(r"(?<!\\)\|", re.sub(r"`[^`]*`", "", row.strip()))) - 1


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_the_rows_of_a_table_have_the_cells_of_its_head(page: Path) -> None:
    """One that has not was perhaps written into another table."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for is_table, rows in groupby(text.splitlines(), lambda line: line.startswith("|")):
        if is_table:
            head, *rest = rows
            assert not [row for row in rest if cells(row) != cells(head)]


# Around whose fragments a user's script is taken for granted, and which.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": wrapped,
    "docs/training.md": own_script,
    "docs/local.md": own_script,
    "docs/porting.md": wrapped,
    "docs/tutorial.md": paced,
    "docs/service.md": beside_a_service,
}
ONE_RAY = ("docs/server.md", "docs/coded.md")  # whose blocks share a Ray: each would start one of its own
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
    forks.all_well(forks.as_torchrun(2), [script.absolute()])


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


@pytest.mark.parametrize("page", [page for page in PAGES if [*document(page)]], ids=name)
def test_page(page: Path, tmp_path: Path) -> None:
    """In a process of its own: a Ray or a process group of other pages or tests has no influence."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    with contextlib.chdir(tmp_path):
        forks.all_well([{"PYTHONPATH": path}], [__file__, name(page)])


if __name__ == "__main__":
    warnings.filterwarnings("error", category=RuntimeWarning, module=r"paceline\Z")
    run(ROOT / sys.argv[1])
