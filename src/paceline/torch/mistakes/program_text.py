"""Reads the program's own text for a statistic that is summed over the ranks and divided by this rank's samples."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from typing import Any

from paceline.torch.plan import Piece


def divides_by_own(frame: Any, line: int, piece: Piece) -> bool:
    """Whether the tensor that is summed in this line is later divided, in the same function, by the length of
    something that has this rank's samples; or what was divided by that sum is, there or in the function that has
    called it, by such a length times the number of ranks."""
    around = frame.f_back
    if _divides(frame, line, piece, summed=True):
        return True
    return around is not None and _divides(around, around.f_lineno, piece, summed=False)


def _divides(frame: Any, line: int, piece: Piece, summed: bool) -> bool:
    source = "".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False
    scopes: list[Any] = [tree, *(one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef))]
    scope = max((one for one in scopes if _holds(one, line)), key=lambda one: getattr(one, "lineno", 0))
    calls = [one for one in ast.walk(scope) if isinstance(one, ast.Call) and _holds(one, line) and one.args]
    names = {one.args[0].id for one in calls if isinstance(one.args[0], ast.Name)}
    given = {
        one.targets[0].id: one.value
        for one in ast.walk(scope)
        if isinstance(one, ast.Assign) and isinstance(one.targets[0], ast.Name)
    }
    divisions = [
        (target, by) for node in ast.walk(scope) for target, by in [_division(node)] if target is not None
    ]
    related = names | {
        target.id for target, by in divisions if isinstance(target, ast.Name) and names & _names(by)
    }
    for target, by in divisions:
        if by.lineno < line:
            continue
        its, concerned = summed and names & _names(target), related & _names(target)
        behind = [given[name] for name in _names(by) if name in given]
        for part in [by, *behind]:  # the divisor itself, or what its variables are
            concerns = (its and part is by) or (
                concerned and _times_ranks(part, frame, len(piece.plan.loads))
            )
            if concerns and any(_own(name, dim, frame, piece) for name, dim in _lengths(part)):
                return True
    return False


def _names(expression: ast.AST) -> set[str]:
    """The variables of an expression."""
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


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


def _lengths(by: ast.AST) -> Iterator[tuple[str, int]]:
    """The names of which the length, or another dimension, is a part of this expression; and which dimension."""
    for node in ast.walk(by):
        at: Any = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "len":
            value: Any = node.args[0] if node.args else None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "size":
            value, at = node.func.value, node.args[0] if node.args else None
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute):
            value, at = (node.value.value if node.value.attr == "shape" else None), node.slice
        else:
            continue
        if isinstance(value, ast.Name):
            yield value.id, at.value if isinstance(at, ast.Constant) and isinstance(at.value, int) else 0


def _times_ranks(by: ast.AST, frame: Any, ranks: int) -> bool:
    """Whether an expression multiplies by the number of ranks."""
    return any(
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Mult)
        and any(_is_ranks(one, frame, ranks) for one in (node.left, node.right))
        for node in ast.walk(by)
    )


def _is_ranks(node: ast.AST, frame: Any, ranks: int) -> bool:
    calls = [one.func for one in ast.walk(node) if isinstance(one, ast.Call)]
    if any("get_world_size" in (getattr(one, "attr", ""), getattr(one, "id", "")) for one in calls):
        return True
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return "world" in node.attr and getattr(_value(node.value.id, frame), node.attr, None) == ranks
    return isinstance(node, ast.Name) and "world" in node.id and _value(node.id, frame) == ranks


def _value(name: str, frame: Any) -> Any:
    return frame.f_locals.get(name, frame.f_globals.get(name))


def _own(name: str, dim: int, frame: Any, piece: Piece) -> bool:
    """Whether the variable has this rank's samples, or several times as many, in this dimension."""
    value = _value(name, frame)
    try:
        rows = value.shape[dim] if dim else len(value)
    except (TypeError, AttributeError, IndexError):
        return False
    return bool(rows) and bool(piece.samples) and rows % piece.samples == 0 and rows % piece.batch != 0
