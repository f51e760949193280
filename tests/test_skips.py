"""A run lists each skip with its reason and how to run it."""

from __future__ import annotations

import pytest

from support.skips import listed


def report(test: str, reason: str) -> pytest.TestReport:
    return pytest.TestReport(
        f"tests/{test}", ("tests/a.py", 1, ""), {}, "skipped", ("tests/a.py", 1, f"Skipped: {reason}"), "call"
    )


def test_skips_are_grouped_by_reason_the_most_frequent_first() -> None:
    reports = [
        report("runs/test_sinks.py::test_a", "could not import 'wandb': No module named 'wandb'"),
        report("data/test_b.py::test_b", "no mnist/ in x; set PACELINE_DATA to a folder that has it"),
        report("papers/test_c.py::test_c", "no mnist/ in x; set PACELINE_DATA to a folder that has it"),
    ]
    assert listed(reports) == [
        "  2  no mnist/ in x; set PACELINE_DATA to a folder that has it  (data/test_b.py, papers/test_c.py)",
        "  1  no wandb: pip install wandb  (runs/test_sinks.py)",
    ]


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("could not import 'PIL.Image': No module named 'PIL'", "no PIL: pip install pillow"),
        ("needs sentence_transformers", "no sentence_transformers: pip install sentence-transformers"),
    ],
)
def test_absent_module_is_listed_with_the_name_of_its_package(reason: str, command: str) -> None:
    assert listed([report("test_a.py", reason)]) == [f"  1  {command}  (test_a.py)"]
