"""Every block of every page runs, in order, in a directory of its own."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.blocks import PAGES, ROOT, SHELL, complaints, document, name
from support.given import beside_a_service, own_script, paced, wrapped
from support.shell import free_port

# Around whose fragments a user's script is taken for granted, and which.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": wrapped,
    "docs/training.md": own_script,
    "docs/porting.md": wrapped,
    "docs/simulate.md": wrapped,
    "docs/tutorial.md": paced,
    "docs/service.md": beside_a_service,
}
TWO_RANKS = ("docs/doctor.md",)  # whose python takes two processes, as one script under torchrun
RAY = ("docs/coded.md", "docs/server.md")  # pages that start Ray


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


def under_torchrun(place: Path, source: str) -> None:
    """Run fragments in two ranks, with a model wrapped and a group joined before them."""
    script = place / "fragments.py"
    script.write_text(f"from support.given import wrapped\n\nglobals().update(wrapped())\n{source}\n")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)],
        capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def _ray_stands() -> bool:
    ray = pytest.importorskip("ray")
    return bool(ray.is_initialized())


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
    if name(page) in TWO_RANKS:
        python = [example.parsed for example in examples if example.region.lexemes["language"] == "python"]
        under_torchrun(place, "\n".join(python))
        examples = [example for example in examples if example.region.lexemes["language"] != "python"]
    given = GIVEN.get(name(page), dict)
    stands = name(page) in RAY and _ray_stands()
    with launched():
        examples[0].namespace.update({"__name__": page.stem} | given())
    try:
        for example in examples:
            with launched() if example.region.lexemes["language"] == "python" else contextlib.nullcontext():
                example.evaluate()
    finally:
        if (shell := examples[0].namespace.get(SHELL)) is not None:
            shell.close()
        if (service := examples[0].namespace.get("service")) is not None:
            service.end()
        elif given is not dict:
            from paceline.torch import leave

            leave(examples[0].namespace.get("ddp"))
        if name(page) in RAY:  # what a page leaves on would be in the way of the next tests
            examples[0].namespace.clear()
            gc.collect()
            if not stands:  # else it is that of other tests, which ran before
                import ray

                ray.shutdown()
