"""Mutation testing of the decisions: cosmic-ray changes the syntax tree, and a module's quick tests must fail then.

    python tests/mutate.py                        # the decisions, SAMPLE mutants of each file
    python tests/mutate.py shares samples/pool    # these files or folders of src/paceline
    python tests/mutate.py shares --sample 0      # every mutant
    python tests/mutate.py shares --line 'left > 1'   # the mutants of one line
    python tests/mutate.py shares --list          # print the mutants, and run nothing
    python tests/mutate.py shares --table FILE    # write the result to FILE, beside its rows of other modules

``mutate.toml`` names the tests of a module where they are not those of its own folder, the engines in a module of
decisions, which stay as they are, and the equivalent mutants: those that no test can tell from the original, each
with the reason. The status is 1 if a module has less
than GOAL of its other mutants killed.

Each mutant runs in a fork of one process that has imported numpy, scipy and pytest, and sees the changed source by
an import hook: the files of src stay as they are.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.abc
import importlib.util
import math
import os
import re
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import psutil
from cosmic_ray import plugins
from cosmic_ray.ast import Visitor, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from parso.tree import NodeOrLeaf as Node

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "paceline"
SETTINGS = ROOT / "tests" / "mutate.toml"
GOAL = 0.95  # part of a module's non-equivalent mutants that tests kill
SAMPLE = 40  # mutants of a file, drawn by their text, so that a change elsewhere draws no others
LONGEST = 1800  # seconds that a module's tests may take without a mutant
# A mutant may take this many times as long as no mutant. On a busy machine only processor time stays the same, so
# the limit of elapsed time is generous: it ends those that wait, of which there are few.
PROCESSOR, ELAPSED = 5, 30
MEMORY = 2 << 30  # bytes that a mutant may allocate beyond what this process has
QUICK = "not processes and not ray and not nightly"
HEAD = "| Module | Possible | Drawn | Killed | By time | Survived | Equivalent |"
# One replacement for each operator, and two for an order: the boundary, and the negation. cosmic-ray has all pairs.
OPERATORS = re.compile(
    "core/(?:"
    "ReplaceBinaryOperator_(?:Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Div|Mod_Div|Pow_Mul|LShift_RShift"
    "|RShift_LShift|BitOr_BitAnd|BitAnd_BitOr|BitXor_BitOr)"
    "|ReplaceComparisonOperator_(?:Lt_LtE|Lt_GtE|LtE_Lt|LtE_Gt|Gt_GtE|Gt_LtE|GtE_Gt|GtE_Lt|Eq_NotEq|NotEq_Eq"
    "|Is_IsNot|IsNot_Is)"
    "|ReplaceUnaryOperator_(?:USub_UAdd|Delete_Not|Delete_Invert)"
    "|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd"
    "|ReplaceBreakWithContinue|ReplaceContinueWithBreak"
    "|AddNot|ExceptionReplacer|NumberReplacer|ZeroIterationForLoop)"
)


class Mutant(NamedTuple):
    """module: path below src/paceline, without suffix. place: function or class. was, now: the changed line."""

    module: str
    place: str
    was: str
    now: str
    code: str

    def __str__(self) -> str:
        return f"{self.module} {self.place}\n    - {self.was}\n    + {self.now}"


class Result(NamedTuple):
    """The mutants of a module: possible changes, drawn ones, and what became of these. timed: part of killed."""

    module: str
    possible: int
    drawn: int
    killed: int
    timed: int
    survived: int
    equivalent: int


class Settings(NamedTuple):
    decisions: list[str]
    tests: dict[str, list[str]]
    engines: dict[str, list[str]]
    equivalent: dict[tuple[str, ...], str]


def settings(path: Path = SETTINGS) -> Settings:
    """What ``mutate.toml`` says. equivalent: the reason, by a mutant's module, place, was and now."""
    given = tomllib.loads(path.read_text(encoding="utf-8"))
    reasons = {
        (each["module"], each["place"], each["was"], now): each["reason"]
        for each in given.get("equivalent", ())
        for now in each["now"]
    }
    return Settings(given["decisions"], given["tests"], given["engines"], reasons)


def modules(names: Sequence[str]) -> list[str]:
    """The modules of these files and folders. Raises SystemExit, a message, for a name that is neither."""
    found: list[str] = []
    for name in names:
        folder, file = SOURCE / name, SOURCE / f"{name.removesuffix('.py')}.py"
        paths = [file] if file.exists() else sorted(folder.rglob("*.py"))
        if not paths:
            raise SystemExit(f"mutate: {name} is no module or folder of src/paceline")
        found += [str(path.relative_to(SOURCE).with_suffix("")) for path in paths]
    return list(dict.fromkeys(found))


def tests_of(module: str, chosen: dict[str, list[str]]) -> list[str]:
    """The tests that the settings name for a module or its folder, or its own file or folder of tests."""
    name = module
    while name:
        if name in chosen:
            return chosen[name]
        name = name.rpartition("/")[0]
    folder, _, own = module.rpartition("/")
    file = f"tests/{folder}/test_{own}.py" if folder else f"tests/test_{own}.py"
    return [file] if (ROOT / file).exists() else [f"tests/{folder}"]


def plain(code: str) -> str | None:
    """The syntax tree as text, without what decides nothing; None if it is none.

    Annotations decide nothing, and neither does ``strict`` of a zip, which is an assertion."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.keyword) and node.arg == "strict":
            node.value = ast.Constant(None)
    return ast.dump(tree)


def places(code: str) -> list[str]:
    """The function or class of each line."""
    lines = ["module"] * (code.count("\n") + 2)

    def name(node: ast.AST, outer: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{outer}.{child.name}" if outer else child.name
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                lines[first - 1 : child.end_lineno] = [inner] * ((child.end_lineno or first) - first + 1)
                name(child, inner)
            else:
                name(child, outer)

    name(ast.parse(code), "")
    return lines


def mutants(
    module: str, code: str, sample: int = 0, seed: str = "", line: str = "", engines: Sequence[str] = ()
) -> tuple[int, list[Mutant]]:
    """(number of possible mutations of the lines that have the text ``line``, the mutants drawn of them).

    The mutants differ from the module and from each other in what Python runs. ``sample`` 0 draws all. engines: the
    functions and classes that stay as they are."""
    tree, where, lines = get_ast(code), places(code), code.splitlines()
    found: list[tuple[str, Operator, int]] = []
    for name in sorted(filter(OPERATORS.match, plugins.operator_names())):
        kind = plugins.get_operator(name)
        visitor = Positions(kind())
        visitor.walk(tree)
        seen: Counter[tuple[str, str]] = Counter()
        for at, number in enumerate(visitor.lines):
            text = where[number - 1], lines[number - 1].strip()
            seen[text] += 1
            lot = "\n".join([seed, module, name, *text, str(seen[text])])
            # A decorator's arguments, such as frozen, decide nothing.
            if line in text[1] and text[1][0] != "@" and text[0].partition(".")[0] not in engines:
                found.append((hashlib.sha256(lot.encode()).hexdigest(), visitor.operator, at))
    had, drawn = {plain(code)}, list[Mutant]()
    for _, operator, at in sorted(found, key=lambda each: each[0]):
        mutated = mutate_code(code, operator, at)
        after = plain(mutated or "")
        if after is None or after in had:
            continue
        had.add(after)
        changed = mutated.splitlines()
        at = next(at for at, pair in enumerate(zip(lines, changed, strict=False)) if pair[0] != pair[1])
        drawn.append(
            Mutant(module, where[at], lines[at].strip(), re.sub(" +", " ", changed[at].strip()), mutated)
        )
        if len(drawn) == sample:
            break
    return len(found), drawn


class Positions(Visitor):
    """Lists the line of each place that an operator can change, in the order of its occurrences."""

    def __init__(self, operator: Operator) -> None:
        self.operator, self.lines = operator, list[int]()

    def visit(self, node: Node) -> Node:
        self.lines += [start[0] for start, _ in self.operator.mutation_positions(node)]
        return node


class Changed(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """Finds one module in the mutant's text instead of its file."""

    def __init__(self, module: str, code: str) -> None:
        self._path = SOURCE / f"{module}.py"
        self._name = ".".join(["paceline", *module.split("/")]).removesuffix(".__init__")
        self._code = code

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        inside = [str(self._path.parent)] if self._path.stem == "__init__" else None
        spec = importlib.util.spec_from_file_location(
            fullname, self._path, loader=self, submodule_search_locations=inside
        )
        assert spec is not None
        return spec

    def get_source(self, fullname: str) -> str:
        return self._code

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._code, str(self._path), "exec", dont_inherit=True)


def run(
    module: str, code: str, tests: Sequence[str], seconds: float, processor: float
) -> tuple[str, float, str]:
    """Runs a module's text under its tests, for at most so many seconds and seconds of processor time.

    Returns (killed, survived or timed out; its processor time; the end of what pytest printed)."""
    with tempfile.TemporaryFile() as printed:
        child = os.fork()
        if not child:
            status = 3
            try:
                os.setsid()
                os.dup2(printed.fileno(), 1)
                os.dup2(printed.fileno(), 2)
                most = psutil.Process().memory_info().data + MEMORY
                resource.setrlimit(resource.RLIMIT_DATA, (most, most))
                resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(processor),) * 2)
                status = tested(module, code, tests)
            finally:
                os._exit(int(status))
        until, done = time.monotonic() + seconds, 0
        while not done:
            if time.monotonic() > until:
                os.killpg(child, signal.SIGKILL)
            done, status, used = os.wait4(child, os.WNOHANG)
            time.sleep(0.01)
        with suppress(ProcessLookupError):  # what the tests have started and left
            os.killpg(child, signal.SIGKILL)
        ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
        verdict = "survived" if not status else "killed"
        printed.seek(0)
        return (
            "timed out" if ended in (signal.SIGKILL, signal.SIGXCPU) else verdict,
            used.ru_utime + used.ru_stime,
            printed.read().decode(errors="replace")[-3000:],
        )


def tested(module: str, code: str, tests: Sequence[str]) -> int:
    """pytest's exit status. No example is made smaller, and all are the same in each run."""
    import hypothesis
    import pytest

    sys.meta_path.insert(0, Changed(module, code))
    quick = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile(
        "mutants", phases=quick, derandomize=True, database=None, deadline=None, print_blob=False
    )
    options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "--hypothesis-profile=mutants", "-m", QUICK]
    return int(pytest.main([*options, *tests], plugins=[FewFirst()]))


class FewFirst:
    """Lets tests of one case run before those that draw many: most mutants fail in one of them."""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from hypothesis import is_hypothesis_test

        items.sort(key=lambda item: is_hypothesis_test(getattr(item, "obj", None)))


def counted(module: str, possible: int, code: str, drawn: Sequence[Mutant], given: Settings) -> Result:
    """Runs the mutants and prints those that survive.

    Raises SystemExit, a message, if the tests fail without a mutant."""
    tests = tests_of(module, given.tests)
    warm(tests)
    began = time.monotonic()
    verdict, processor, printed = run(module, code, tests, LONGEST, LONGEST)
    seconds = time.monotonic() - began
    if verdict != "survived":
        raise SystemExit(f"{printed}\nmutate: {' '.join(tests)} fails without a mutant of {module}")
    count: Counter[str] = Counter()
    for mutant in drawn:
        if mutant[:4] in given.equivalent:
            count["equivalent"] += 1
            continue
        verdict, _, _ = run(module, mutant.code, tests, 60 + ELAPSED * seconds, 5 + PROCESSOR * processor)
        count[verdict] += 1
        if verdict == "survived":
            print(f"survived: {mutant}", flush=True)
    killed = count["killed"] + count["timed out"]
    by = f"{count['timed out']} by time"
    rest = f"{count['survived']} survived, {count['equivalent']} equivalent"
    took = time.monotonic() - began
    print(
        f"{module}: {len(drawn)} mutants, {killed} killed ({by}), {rest}; {took:.0f} s, of which {seconds:.0f} s "
        "without a mutant",
        flush=True,
    )
    return Result(
        module, possible, len(drawn), killed, count["timed out"], count["survived"], count["equivalent"]
    )


def table(results: Sequence[Result], order: Sequence[str] = ()) -> str:
    """The results as a table in Markdown, with their sum. order: modules in the order of their rows."""
    known = {module: number for number, module in enumerate(order)}
    rows = sorted(results, key=lambda row: (known.get(row.module, len(known)), row.module))
    whole = [sum(column) for column in zip(*(row[1:] for row in rows), strict=True)]
    lines = [HEAD, "|---" + "|--:" * len(Result._fields[1:]) + "|"]
    lines += ["| " + " | ".join(map(str, row)) + " |" for row in [*rows, ("all", *whole)]]
    return "\n".join(lines) + "\n"


def by_folder(results: Sequence[Result]) -> list[Result]:
    """The sums over the modules of each folder."""
    sums: dict[str, Result] = {}
    for row in results:
        folder = row.module.rpartition("/")[0] or row.module
        before = sums.get(folder, Result(folder, *[0] * 6))
        sums[folder] = Result(folder, *(a + b for a, b in zip(before[1:], row[1:], strict=True)))
    return list(sums.values())


def read(text: str) -> list[Result]:
    """The results of a ``table``."""
    cells = [line.strip("| ").split(" | ") for line in text.splitlines()]
    rows = [row for row in cells if len(row) == len(Result._fields) and row[1].isdigit() and row[0] != "all"]
    return [Result(row[0], *map(int, row[1:])) for row in rows]


def warm(tests: Sequence[str]) -> None:
    """Import once what the forks need of others' packages."""
    for name in ("hypothesis.extra.numpy", "numpy.testing", "pytest", "scipy.optimize", "scipy.stats"):
        importlib.import_module(name)
    if any("torch" in test for test in tests):
        importlib.import_module("torch")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "modules", nargs="*", help="files or folders of src/paceline (default: the decisions)"
    )
    parser.add_argument("--sample", type=int, default=SAMPLE, help="mutants of each file, 0 for all")
    parser.add_argument("--seed", default="", help="draws another sample")
    parser.add_argument("--line", default="", help="only mutants of lines that have this text")
    parser.add_argument("--list", action="store_true", help="print the mutants, and run nothing")
    parser.add_argument(
        "--table", type=Path, help="a file in which the modules' rows are written or replaced"
    )
    options = parser.parse_args()
    if options.sample < 0:
        parser.error(f"--sample {options.sample}: expected 0 for all, or a number of mutants")
    given = settings()
    os.environ["OMP_NUM_THREADS"] = "1"
    file = options.table and options.table.resolve()
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT / "src"))
    results = []
    for module in modules(options.modules or given.decisions):
        code = (SOURCE / f"{module}.py").read_text(encoding="utf-8")
        left = given.engines.get(module, [])
        possible, drawn = mutants(module, code, options.sample, options.seed, options.line, left)
        if options.list:
            print("\n".join(map(str, drawn)))
        elif drawn:
            results.append(counted(module, possible, code, drawn, given))
    if options.list:
        return 0
    order = modules(given.decisions)
    folders = [row.module for row in by_folder([Result(module, *[0] * 6) for module in order])]
    print("\n" + table(results, order), end="")
    if len(results) > 1:
        print("\n" + table(by_folder(results), folders), end="")
    if file:
        ran = {row.module for row in results}
        before = read(file.read_text(encoding="utf-8")) if file.exists() else []
        rows = [row for row in before if row.module not in ran] + results
        file.write_text(table(rows, order), encoding="utf-8")
    low = [row.module for row in results if row.killed < GOAL * (row.drawn - row.equivalent)]
    if low:
        print(f"mutate: below {GOAL:.0%}: {', '.join(low)}", file=sys.stderr)
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main())
