"""Writes docs/guarantees.md from the promises of the tests: ``python docs/guarantees.py``.

A promise is the text of a test's ``@guarantee("...")``, or of its file's ``GUARANTEES = ("...",)``. Promises that
begin with the same file share a row. What a command shows instead of a test is in ``SHOWN``.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 160  # characters of a promise
GROUPS = {  # headings, and the beginnings of the paths of their tests, of which the longest counts
    "Your own training loop": ("torch/", "cli/test_train_local"),
    "The doctor and `paceline verify`": ("doctor/", "verify/"),
    "Frameworks around your loop": ("hosts/", "ray/test_ray_train", "examples/test_ports"),
    "Ranks that freeze, fail, are lost or join": (
        *("torch/liveness/", "torch/test_peers", "cli/test_train_frozen"),
        *("torch/elastic/", "torch/test_launcher"),
        *("train/test_elastic", "cli/test_train_goes_on"),
    ),
    "`paceline train`: checkpoints, signals and input": (
        *("train/", "cli/test_train", "cli/test_interrupts", "cli/test_any_options", "torch/test_states"),
    ),
    "`paceline serve`": ("serve/",),
    "Policies, plans, costs of samples and the parameter server": (
        *("backup/", "balance/", "coded/", "contract/", "forecast/", "papers/", "paramserver/", "pieces/"),
        *("ray/", "sync/", "test_balancer", "test_costs", "test_policies", "test_rounds", "test_shares"),
        *("samples/", "torch/feed/test_costs", "simulate/test_claimed", "serve/test_costs"),
        "runs/test_causes",
    ),
    "Simulation, traces and records": (
        *("simulate/", "runs/", "data/", "live/", "test_clock", "test_hostile_files", "test_power"),
    ),
    "Commands, the library and the site": ("cli/", "docs/", "examples/", "learners/", "test_"),
}
SHOWN = (  # by commands: heading, promise, command
    (
        "Ranks that freeze, fail, are lost or join",
        "After kills, freezes, departures and joins at any instant, each sample of a round counts once, with the "
        "model of one process.",
        "`python benchmarks/faults.py`",
    ),
    (
        "Your own training loop",
        "Runs that are repeated under `deterministic=True` have the same bits.",
        "`python benchmarks/determinism.py`",
    ),
    (
        "Commands, the library and the site",
        "The installer refuses versions below the lowest in `pyproject.toml`, with which the tests pass.",
        "`uv pip compile --resolution lowest-direct --all-extras pyproject.toml`, then the tests",
    ),
    (
        "Commands, the library and the site",
        "A changed operator, number or condition of a decision fails a test.",
        "`make mutate`, each night",
    ),
    (
        "Commands, the library and the site",
        "An import that leads up, a circle, or a policy that imports an engine's framework fails the check.",
        "`make lint`",
    ),
)
HEAD = """\
# Guarantees

What Paceline promises for each fault and each kind of input, and what shows it: tests (files below `tests/`, which
have the promise in the same words) or a command. "The model of one process" means parameters within 1e-12 in float64.
[Limits](limits.md) lists what is not promised.

<!-- python docs/guarantees.py makes this page from the tests. -->
"""


class Guarantee(NamedTuple):
    """A promise. test: a test's path below tests/, with its function if the promise is not of all of the file."""

    promise: str
    test: str


def guarantees(folder: Path) -> Iterator[Guarantee]:
    """The promises of all test files below a folder, in the order of their lines."""
    for path in sorted(folder.rglob("test_*.py")):
        file = path.relative_to(folder).as_posix()
        yield from _of(ast.parse(path.read_text(encoding="utf-8")), file)


def _of(node: ast.Module | ast.ClassDef, owner: str) -> Iterator[Guarantee]:
    """Of a file or a class; promises that several tests show may be constants: ``NAME = guarantee("...")``."""
    constants: dict[str, ast.expr] = {}
    for child in node.body:
        if isinstance(child, ast.Assign) and ast.unparse(child.value).startswith("guarantee("):
            constants[ast.unparse(child.targets[0])] = child.value
        elif isinstance(child, ast.Assign) and ast.unparse(child.targets[0]) == "GUARANTEES":
            yield from (Guarantee(promise, owner) for promise in ast.literal_eval(child.value))
        elif isinstance(child, ast.ClassDef):
            yield from _of(child, f"{owner}::{child.name}")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            for named in child.decorator_list:
                mark = constants.get(ast.unparse(named), named)
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "guarantee":
                    yield Guarantee(ast.literal_eval(mark.args[0]), f"{owner}::{child.name}")


def heading(test: str) -> str:
    """The heading of a test, or "" if no group has it."""
    fits = [
        (len(start), group) for group, starts in GROUPS.items() for start in starts if test.startswith(start)
    ]
    return max(fits, default=(0, ""))[1]


def page(found: list[Guarantee]) -> tuple[str, list[str]]:
    """The page, and what is wrong with its promises: a line for each."""
    wrong: list[str] = []
    rows: dict[str, dict[str, list[str]]] = {group: {} for group in GROUPS}
    place: dict[str, str] = {}  # each promise's group: that of its first test
    for promise, test in found:
        if len(promise) > LONGEST:
            wrong.append(f"{test}: {len(promise)} characters, at most {LONGEST}: {promise}")
        group = place.setdefault(promise, heading(test))
        if group:
            rows[group].setdefault(promise, []).append(test)
        else:
            wrong.append(f"{test}: no group in docs/guarantees.py has it")
    for group, promise, command in SHOWN:
        rows[place.get(promise, group)].setdefault(promise, []).append(command)
    parts = [HEAD]
    for group, listed in rows.items():
        by_first: dict[str, list[str]] = {}
        for promise, tests in listed.items():
            first, *others = _files(tests)
            also = f" (also {', '.join(others)})" if others else ""
            by_first.setdefault(first, []).append(promise.replace("|", "\\|") + also)
        if by_first:
            lines = [f"| {'<br>'.join(promises)} | {first} |" for first, promises in by_first.items()]
            parts.append("\n".join([f"## {group}", "", "| promises | shown by |", "|---|---|", *lines, ""]))
    return "\n".join(parts), wrong


def _files(tests: list[str]) -> list[str]:
    """The files of a promise's tests, and its commands, as code."""
    files = dict.fromkeys(each if each[0] == "`" else each.split("::")[0] for each in tests)
    return [each if each[0] == "`" else f"`{each}`" for each in files]


def made() -> tuple[str, list[str]]:
    """The page as it should be, and what is wrong: see ``page``."""
    return page([*guarantees(ROOT / "tests")])


if __name__ == "__main__":
    text, errors = made()
    (ROOT / "docs" / "guarantees.md").write_text(text, encoding="utf-8")
    sys.exit("\n".join(errors) or 0)
