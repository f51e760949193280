"""Programs that the server of forks starts end, print and find what they do when an interpreter starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import forks

pytest.importorskip("torch")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("forks")]

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, __name__)",
    "parent": "import os; print(os.getppid(), os.getcwd(), os.environ.get('GIVEN'))",
    "input": "import sys; print(sys.stdin.read())",
    "status": "import sys; sys.exit(7)",
    "words": "import sys; sys.exit('what went wrong')",
    "error": "def f():\n    1 / 0\n\nf()",
    "signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "registered": "import atexit; atexit.register(print, 'end'); print('begin')",
    "thread": "import threading, time; threading.Timer(0.1, print, ['late']).start()",
    "files": "import os; print(sorted(os.listdir('/proc/self/fd'))[:3])",
    "children": "import subprocess, sys, os\n"
    "code = 'import os; print(os.getppid(), flush=True)'\n"
    "told = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout\n"
    "print(int(told) == os.getpid())",
}


def run(code: str, how: str, place: Path) -> tuple[int, str, str]:
    script = place / "program.py"
    script.write_text(code)
    words = {"-c": ["-c", code], "file": ["program.py"], "-m": ["-u", "-m", "program"]}[how]
    done = subprocess.run(
        [sys.executable, *words, "a", "b"], input="some words", capture_output=True, text=True, cwd=place,
        env=os.environ | {"GIVEN": "yes"},
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if "runpy" not in line]  # which starts a module
    return done.returncode, done.stdout, "\n".join(errors)


@pytest.mark.parametrize("how", ["-c", "file", "-m"])
def test_forked_program_is_like_one_that_an_interpreter_starts(how: str, tmp_path: Path) -> None:
    expected = {name: run(code, how, tmp_path) for name, code in PROGRAMS.items()}
    with forks.warm():
        assert {name: run(code, how, tmp_path) for name, code in PROGRAMS.items()} == expected


@pytest.mark.nightly  # the tests of hosts/ have the server load more
def test_server_that_loads_more_ends_the_one_before() -> None:
    with forks.warm("colorsys"):
        code = "import sys; print('colorsys' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "True\n"
