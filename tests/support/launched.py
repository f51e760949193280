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
from pathlib import Path

import torch

from support import ranks as forks


def run_script(ranks: int, script: Path, *loaded: str, arguments: Sequence[str] = ()) -> tuple[str, str]:
    """What all ranks wrote to standard output and to standard error.

    loaded: modules to have loaded before. arguments: of the script.

    Raises AssertionError with what it wrote where a rank does not end with status 0.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    forks.load(*loaded)
    context = multiprocessing.get_context("forkserver")
    with socket.socket() as free, tempfile.TemporaryDirectory() as place:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        started = [
            context.Process(target=_rank, args=(rank, ranks, port, script, place, arguments))
            for rank in range(ranks)
        ]
        for process in started:
            process.start()
        for process in started:
            process.join(forks.SECONDS)
            process.kill()
            process.join()
        wrote = [Path(place, name).read_text() for name in ("out", "err")]
    assert [process.exitcode for process in started] == [0] * ranks, wrote[1]
    return wrote[0], wrote[1]


def _rank(rank: int, ranks: int, port: int, script: Path, place: str, arguments: Sequence[str]) -> None:
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{place}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", ROLE_RANK=str(rank),
        WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="test",
    )  # fmt: skip
    torch.set_num_threads(1)  # torch was loaded before
    multiprocessing.set_start_method("fork", force=True)  # of loaders' processes, as in a program of its own
    sys.argv = [str(script), *arguments]
    sys.path[0] = str(script.parent)
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.stdout.flush()
