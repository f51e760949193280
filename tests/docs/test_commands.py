"""Every command that a sentence or a table of a page, the help or the head of a program names can be given as it is
printed: the command, its options, its files, targets and extras exist. The commands of blocks are also run
(test_pages.py), and so are those that outputs print (tests/test_printed.py); ``NOT_RUN`` of support/shell.py is the
table of the exceptions.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
import typer

from paceline import cli
from support.blocks import PAGES, ROOT, name
from support.shell import NOT_RUN, check, commands, parser_of, reason

TEXTS = [*PAGES, *(ROOT / each for each in ("CONTRIBUTING.md", "PACKAGE.md", "RELEASE.md"))]
TEXTS += sorted((ROOT / "examples").rglob("*.md"))
PROGRAMS = sorted(
    [*(ROOT / "examples").glob("*.py"), *(ROOT / "benchmarks").glob("*.py"), *(ROOT / "docs").rglob("*.py")]
)
HELP = sorted((ROOT / "src" / "paceline" / "cli").glob("*.py"))
STARTS = "paceline|python|torchrun|make|pip"
INLINE = re.compile(rf"`((?:{STARTS}) [^`]+)`")
BLOCK = re.compile(r"^```(\w*).*?\n(.*?)^```", re.DOTALL | re.MULTILINE)
HEAD = re.compile(rf"^    ((?:{STARTS}) .*)$", re.MULTILINE)
EXAMPLE = re.compile(r"For example: (paceline .*)$", re.MULTILINE)
# Words that stand for the reader's own: with one, or without an option's value, only the names are looked up.
READERS = re.compile(r"\.\.\.|\b[A-Z]{3,}\b| \| --")
QUICK = ("paceline simulate", "paceline --")  # are run; the pages' blocks have commands of all other kinds

pytestmark = pytest.mark.xdist_group("torch")


def document(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def found() -> Iterator[tuple[str, str]]:
    """Where a command is named, and the command."""
    for page in TEXTS:
        text = page.read_text(encoding="utf-8")
        for command in INLINE.findall(BLOCK.sub("", text)):
            yield name(page), " ".join(command.split())
    for program in PROGRAMS:
        for command in HEAD.findall(document(program)):
            yield name(program), command
    for source in HELP:
        for command in EXAMPLE.findall(source.read_text(encoding="utf-8")):
            yield name(source), command


def words_of(command: str) -> list[str]:
    """The words of a command, without its comment, the brackets of what may be left out, and what is piped on."""
    plain = re.sub(r"\[([^\]']*)\]", r"\1", re.sub(r"  #.*", "", command).replace(",...", ""))
    return next(commands(plain))


def check_names(words: list[str]) -> None:
    """The command and its options exist; AssertionError says which does not."""
    if words[0] == "paceline":
        known = typer.main.get_command(cli._app(words[1])).commands
        assert words[1] in known, f"paceline {words[1]}: expected one of {', '.join(known)}"
        options = {name for each in known[words[1]].params for name in (*each.opts, *each.secondary_opts)}
        own = list(takewhile(lambda word: word != "--", words))
        assert {word for word in own if word.startswith("--")} <= options, shlex.join(words)
    elif words[0] == "python":
        known = parser_of(ROOT / words[1])._option_string_actions
        assert {word for word in words if word.startswith("--")} <= set(known), shlex.join(words)


NAMED = sorted(set(found()))


@pytest.mark.parametrize(("where", "command"), NAMED, ids=[f"{where}: {command}" for where, command in NAMED])
def test_named_command_can_be_given(
    where: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    words = words_of(command)
    name_alone = words[0] == "paceline" and len(words) == 2 and not words[1].startswith("--")
    if name_alone or READERS.search(command) or (len(words) > 2 and words[-1].startswith("--")):
        check_names(words)
    else:
        check(words, run=command.startswith(QUICK))


def test_each_exception_is_of_a_command_that_is_named() -> None:
    blocks = [BLOCK.findall(page.read_text(encoding="utf-8")) for page in TEXTS]
    lines = [text for each in blocks for language, text in each if language == "bash"]
    given = [words for text in lines for words in commands(text)]
    given += [words_of(command) for _, command in NAMED]
    assert {reason(words) for words in given if words} >= set(NOT_RUN)
