"""Commands that outputs print as the next step, as they work in the shell where they are printed."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "paceline"  # the command, and the package for ``python -m``
FOLDER = Path(__file__).resolve().parents[2]  # of the copy of the repository, if this file lies in one


def line(*words: object) -> str:
    """The command ``paceline WORDS...`` for a shell: started as this process was, if PATH has another or none."""
    return f"{program()} {shlex.join(map(str, words))}"


def program() -> str:
    """What starts this installation's command line: ``paceline`` if that is on the PATH, else its path, else
    ``python -m paceline``."""
    given = Path(sys.argv[0] if sys.argv else "")
    if given.name == "__main__.py" and given.parent.name == NAME:
        return f"{_python()} -m {NAME}"
    script = given if given.name == NAME and given.is_file() else Path(sys.executable).with_name(NAME)
    return _found(script) if script.is_file() else f"{_python()} -m {NAME}"


def installation(extra: str) -> str:
    """What to do to add an optional part of Paceline; from the copy of the repository where that is known."""
    if (FOLDER / "pyproject.toml").is_file():
        return f"run: {pip()} install {shlex.quote(f'{_near(FOLDER)}[{extra}]')}"
    return f"in Paceline's folder, run: {pip()} install '.[{extra}]'"


def tool(name: str) -> str:
    """A program of this Python's environment, such as torchrun: its name if the PATH leads to it, else its path."""
    own = Path(sys.executable).with_name(name)
    return _found(own) if own.is_file() else name


def pip() -> str:
    """What starts pip for this Python: ``pip`` if the PATH leads to that."""
    return "pip" if tool("pip") == "pip" else f"{_python()} -m pip"


def example(name: str, ranks: int) -> list[str]:
    """The command that trains a script of the examples; where these are not at hand, that of a ``train.py``."""
    script = FOLDER / "examples" / name
    return [
        *(tool("torchrun"), "--standalone", "--nproc-per-node", str(ranks)),
        _near(script) if script.is_file() else "train.py",
    ]


def training() -> list[str]:
    """The command that started this rank; with dots for what only the user knows."""
    ranks, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in os.environ and ranks is not None and ranks == here:
        return [tool("torchrun"), "--standalone", "--nproc-per-node", ranks, *sys.argv]
    return [tool("torchrun"), "...", *sys.argv]


def _python() -> str:
    return _found(Path(sys.executable))


def _found(path: Path) -> str:
    """The name of a program that the PATH leads to, else its path, quoted."""
    onpath = shutil.which(path.name)
    if onpath is not None and os.path.abspath(onpath) == os.path.abspath(path):
        return path.name
    return shlex.quote(_near(path))


def _near(path: Path) -> str:
    """A path from the working directory if it lies in it, else the whole."""
    here = Path.cwd()
    whole = Path(os.path.abspath(path))
    if not whole.is_relative_to(here) or here == here.parent:
        return str(whole)
    near = os.path.relpath(whole, here)
    return near if os.sep in near or whole.is_dir() else f".{os.sep}{near}"
