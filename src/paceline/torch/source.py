"""Reads the program's own source for a statistic that is summed over the ranks and divided by this rank's samples."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any

from paceline.torch.plan import Piece


def divides_by_own(frame: Any, line: int, piece: Piece) -> bool:
    """Whether the tensor that is summed in this line is later divided, in the same function, by the length of
    something that has this rank's samples."""
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    scopes: list[Any] = [tree, *(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))]
    scope = max((one for one in scopes if _holds(one, line)), key=lambda one: getattr(one, "lineno", 0))
    calls = [one for one in ast.walk(scope) if isinstance(one, ast.Call) and _holds(one, line) and one.args]
    names = {one.args[0].id for one in calls if isinstance(one.args[0], ast.Name)}
    for node in ast.walk(scope):
        target, by = _division(node)
        parts = [] if target is None else ast.walk(target)
        divides = any(isinstance(one, ast.Name) and one.id in names for one in parts) and by.lineno >= line
        if divides and any(_own(length, frame, piece) for length in _lengths(by)):
            return True
    return False


def _division(node: ast.AST) -> tuple[ast.AST | None, Any]:
    """What is divided, and by what."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return node.left, node.right
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return node.target, node.value
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args
    if called and node.func.attr in ("div", "div_", "true_divide"):  # type: ignore[attr-defined]
        return node.func.value, node.args[0]  # type: ignore[attr-defined]
    return None, None


def _holds(node: Any, line: int) -> bool:
    return isinstance(node, ast.Module) or node.lineno <= line <= (node.end_lineno or node.lineno)


def _lengths(by: ast.AST) -> Iterator[str]:
    """The names whose length or first dimension is a part of this expression."""
    for node in ast.walk(by):
        if (
            isinstance(node, ast.Call)
            and node.args
            and isinstance(node.func, ast.Name)
            and node.func.id == "len"
        ):
            value: Any = node.args[0]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
            value = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            value = node.value.value if node.value.attr == "shape" else None
        else:
            continue
        if isinstance(value, ast.Name):
            yield value.id


def _own(name: str, frame: Any, piece: Piece) -> bool:
    """Whether the variable has a row for each of this rank's samples, or several."""
    value = frame.f_locals.get(name, frame.f_globals.get(name))
    try:
        rows = len(value)
    except TypeError:
        return False
    return bool(rows) and bool(piece.samples) and rows % piece.samples == 0 and rows % piece.plan.batch != 0
