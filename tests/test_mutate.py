"""Mutation testing: which mutants are made and drawn, and that its settings fit the code."""

from __future__ import annotations

import subprocess
import sys

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


def changes(code: str, **options: str | int) -> set[tuple[str, str, str]]:
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
    for module in mutate.modules([*given.decisions, *given.tests]):
        assert all((mutate.ROOT / test).exists() for test in mutate.tests_of(module, given.tests)), module
    with pytest.raises(SystemExit, match="no_such is no module or folder"):
        mutate.modules(["no_such"])


@pytest.mark.nightly
def test_command_kills_mutants_and_prints_a_table() -> None:
    command = [sys.executable, "tests/mutate.py", "sync/asp", "--sample", "2"]
    done = subprocess.run(command, cwd=mutate.ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("| sync/asp |")
