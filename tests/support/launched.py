"""Runs a script on n ranks as torchrun does, but in processes forked from a server that has its libraries loaded."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import traceback
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

import torch

from support import ranks as forks


def run_script(ranks: int, script: Path, *loaded: str, arguments: Sequence[str] = ()) -> tuple[str, str]:
    """What all ranks wrote to standard output and to standard error.

    loaded: modules to have loaded before. arguments: of the script.

    Raises AssertionError with what it wrote where a rank does not end with status 0.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return run_forked(as_torchrun(ranks), script, loaded, arguments)


def as_torchrun(ranks: int) -> list[dict[str, str]]:
    """What torchrun tells each of so many ranks on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {
        "GROUP_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "test",
    }  # fmt: skip
    return [shared | dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank)) for rank in range(ranks)]


def run_forked(
    environments: list[dict[str, str]], program: Path | str, loaded: Sequence[str], arguments: Sequence[str]
) -> tuple[str, str]:
    """As ``run_script``, of a script or a module; a process for each of these sets of additional variables."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    forks.load(*loaded)
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as place:
        started = [
            context.Process(target=_life, args=(each, program, arguments, place)) for each in environments
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(forks.SECONDS)
            process.kill()
            process.join()
        wrote = [Path(place, name).read_text() for name in ("out", "err")]
    assert [process.exitcode for process in started] == [0] * len(started), wrote[0] + wrote[1]
    return wrote[0], wrote[1]


def share_the_server() -> None:
    """What this process forks comes from the server that it was forked from itself, which has PyTorch loaded."""
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]


def _life(environment: dict[str, str], program: Path | str, arguments: Sequence[str], place: str) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(environment)
    share_the_server()
    torch.set_num_threads(1)  # torch was loaded before
    multiprocessing.set_start_method("fork", force=True)  # of loaders' processes, as in a program of its own
    sys.argv = [str(program), *arguments]
    try:
        if isinstance(program, Path):
            sys.path[0] = str(program.parent)
            runpy.run_path(str(program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
