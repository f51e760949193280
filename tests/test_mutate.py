"""Mutation testing: which mutants are made and drawn, and that its settings fit the code."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cosmic_ray")

import mutate

CODE = '''\
def least(a: int | None, b: int = 3) -> int | None:
    """The smaller one."""
    if a is None:
        return b
    return a if a < b else b
'''


def changes(code: str, **options: str | int | list[str]) -> set[tuple[str, str, str]]:
    _, drawn = mutate.mutants("least", code, **options)  # type: ignore[arg-type]
    return {(mutant.place, mutant.was, mutant.now) for mutant in drawn}


def test_mutants_change_operators_numbers_and_conditions_but_no_annotations() -> None:
    head, test, result = (CODE.splitlines()[at].strip() for at in (0, 2, 4))
    assert changes(CODE) == {
        ("least", head, head.replace("3", "4")),
        ("least", head, head.replace("3", "2")),
        ("least", test, test.replace("is", "is not")),
        ("least", test, test.replace("if a", "if not a")),
        ("least", result, result.replace("<", "<=")),
        ("least", result, result.replace("<", ">=")),
        ("least", result, result.replace("if a", "if not a")),
    }


def test_engines_have_no_mutants() -> None:
    code = CODE + "\n\nclass Acts:\n    def go(self):\n        return 1\n"
    assert changes(code, engines=["Acts"]) == changes(CODE)
    assert changes(code) > changes(CODE)


def test_mutants_leave_the_strictness_of_a_zip() -> None:
    assert changes("def pairs(a, b):\n    return list(zip(a, b, strict=True))\n") == set()


def test_sample_stays_the_same_if_another_function_is_written_above() -> None:
    drawn = changes(CODE, sample=3)
    assert len(drawn) == 3
    assert changes(CODE, sample=3, line="def") == {
        each for each in changes(CODE) if each[1].startswith("def")
    }
    assert changes(CODE.replace("def least", "X = ''\n\n\ndef least"), sample=3) == drawn


def test_equivalent_mutants_name_lines_of_the_code() -> None:
    gone = [
        (module, was)
        for module, _, was, _ in mutate.settings().equivalent
        if was not in {line.strip() for line in (mutate.SOURCE / f"{module}.py").read_text().splitlines()}
    ]
    assert not gone, "tests/mutate.toml has equivalent mutants of lines that are gone"


def test_modules_and_their_tests_exist() -> None:
    given = mutate.settings()
    for module in mutate.modules([*given.decisions, *given.tests, *given.engines]):
        assert all((mutate.ROOT / test).exists() for test in mutate.tests_of(module, given.tests)), module
    with pytest.raises(SystemExit, match="no_such is no module or folder"):
        mutate.modules(["no_such"])


def test_table_is_read_back_in_the_order_of_the_modules() -> None:
    rows = [mutate.Result("shares", 90, 9, 8, 1, 0, 1), mutate.Result("costs", 20, 3, 1, 0, 2, 0)]
    text = mutate.table(rows, order=["costs", "shares"])
    assert text.splitlines()[-1] == "| all | 110 | 12 | 9 | 1 | 2 | 1 |"
    assert mutate.read(text) == rows[::-1]
    assert mutate.table(mutate.read(text), order=["costs", "shares"]) == text


def test_modules_of_a_folder_are_summed() -> None:
    rows = [mutate.Result(name, 9, 4, 3, 1, 0, 1) for name in ("sync/asp", "costs", "sync/bsp")]
    assert mutate.by_folder(rows) == [
        mutate.Result("sync", 18, 8, 6, 2, 0, 2),
        mutate.Result("costs", 9, 4, 3, 1, 0, 1),
    ]


def test_mutant_that_never_ends_is_killed_by_its_processor_time(tmp_path: Path) -> None:
    endless = tmp_path / "test_endless.py"
    endless.write_text("def test_endless():\n    while True:\n        pass\n")
    began = time.monotonic()
    held = np.empty(mutate.MEMORY, np.uint8)  # what a process has by other tests is not what a mutant takes
    verdict, processor, printed = mutate.run("sync/asp", "", [str(endless)], seconds=120, processor=2)
    assert held.nbytes == mutate.MEMORY
    assert verdict == "timed out", printed
    assert time.monotonic() - began < 120
    assert processor < 10


@pytest.mark.nightly
def test_command_kills_mutants_and_writes_a_table(tmp_path: Path) -> None:
    file = tmp_path / "table.md"
    file.write_text(mutate.table([mutate.Result("shares", 90, 9, 8, 1, 0, 1)]))
    command = [sys.executable, "tests/mutate.py", "sync/asp", "--sample", "2", "--table", str(file)]
    done = subprocess.run(command, cwd=mutate.ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2].startswith("| sync/asp |")
    assert [row.module for row in mutate.read(file.read_text())] == ["shares", "sync/asp"]
