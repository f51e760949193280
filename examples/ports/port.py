"""Applies a port to a checkout of somebody's training program: ``python examples/ports/port.py nanogpt ~/nanoGPT``

prints the change as a diff; with --write it is made. A port (the .toml files beside this one) names the lines that it
changes by regular expressions, each of which has to match one line, and says what to write instead, before or behind
it. Nothing of the programs themselves is kept here.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


class PortError(Exception):
    """The program is not the one that the port was written for."""


def ported(text: str, edits: list[dict[str, Any]], name: str) -> str:
    """``text`` with each edit made: ``line``, a regular expression, and one of ``replace``, ``before``, ``after``
    (lines, which are indented as that one) or ``delete``. Raises PortError unless it matches exactly one line."""
    lines = text.splitlines()
    found: dict[int, dict[str, Any]] = {}
    for edit in edits:
        numbers = [number for number, line in enumerate(lines) if re.search(edit["line"], line)]
        if len(numbers) != 1:
            raise PortError(
                f"{name}: {len(numbers)} lines match {edit['line']!r}; expected one: the port was written for "
                "another version of this program, so make the change by hand"
            )
        found[numbers[0]] = edit
    result: list[str] = []
    for number, line in enumerate(lines):
        edit = found.get(number, {})
        indent = line[: len(line) - len(line.lstrip())]
        result += [indent + new for new in edit.get("before", [])]
        if "replace" in edit:
            result += [indent + new for new in edit["replace"]]
        elif not edit.get("delete"):
            result.append(line)
        result += [indent + new for new in edit.get("after", [])]
    return "\n".join(result) + "\n"


def read(port: str) -> dict[str, Any]:
    """The port of this name, or in this file."""
    path = Path(port) if port.endswith(".toml") else HERE / f"{port}.toml"
    if not path.is_file():
        names = ", ".join(sorted(p.stem for p in HERE.glob("*.toml")))
        raise PortError(f"there is no port {port!r}; expected one of {names}, or a .toml file")
    return tomllib.loads(path.read_text())


def counts(before: str, after: str) -> tuple[int, int]:
    """Lines added or changed, and lines left out."""
    added = removed = 0
    matcher = difflib.SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    for _, old, to_old, new, to_new in matcher.get_opcodes():
        if before.splitlines()[old:to_old] != after.splitlines()[new:to_new]:
            added += to_new - new
            removed += max(0, (to_old - old) - (to_new - new))
    return added, removed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", help="the name of a .toml file beside this one, without .toml, or a file")
    parser.add_argument("checkout", type=Path, help="the folder that holds the program")
    parser.add_argument("--write", action="store_true", help="make the change; otherwise it is only shown")
    args = parser.parse_args()
    try:
        results = []
        for part in read(args.port)["file"]:
            path = args.checkout / part["path"]
            if not path.is_file():
                raise PortError(f"{path} is not there; expected the program of which {args.port} is a port")
            text = path.read_text()
            results.append((path, text, ported(text, part["edit"], part["path"])))
    except PortError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path, text, new in results:
        added, removed = counts(text, new)
        if args.write:
            path.write_text(new)
        else:
            sys.stdout.writelines(
                difflib.unified_diff(text.splitlines(True), new.splitlines(True), str(path), str(path), n=1)
            )
        print(f"{path}: {added} lines added or changed, {removed} left out", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
