"""The table of ``tests/mutations.py`` fits the code: each mutation applies in one place, and its tests are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import mutations

TESTS = Path(mutations.__file__).parent


def test_every_mutation_has_its_line() -> None:
    files, wrong = mutations.sources(), []
    for mutation in mutations.MUTATIONS:
        try:
            path, content = mutations.mutated(mutation, files)
        except LookupError as error:
            wrong.append(str(error))
            continue
        assert content != files[path], mutation.name
        ast.parse(content)
    assert not wrong, "\n".join(wrong)
    assert len({mutation.name for mutation in mutations.MUTATIONS}) == len(mutations.MUTATIONS) >= 60


def test_the_tests_that_must_fail_are_there() -> None:
    for test in {test for each in mutations.MUTATIONS for test in each.tests}:
        file, _, name = test.partition("::")
        assert f"def {name}" in (TESTS / file).read_text(), test


def test_a_line_that_is_gone_is_told_in_a_sentence() -> None:
    gone = mutations.MUTATIONS[0]._replace(text="no such line")
    with pytest.raises(
        LookupError, match=r"^mutation 'weights: .*stands in 0 places .*expected one: give it the line"
    ):
        mutations.place(gone, mutations.sources())
