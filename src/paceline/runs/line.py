"""One line of the record: how it is sealed when it is written, and what may be wrong with one that is read.

    {"round":7,...,"loss":0.52,"sum":"1f0c9a3e"}

``sum`` is the CRC-32 of the line before it, begun with the sum of the line above: a changed byte, and a line that
was left out, doubled or moved, shows at the first line that no longer fits.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from typing import Any

from paceline import costs

SCALARS = ("round", "epoch", "time", "seconds", "batch", "loss")
PER_WORKER = ("loads", "compute", "overhead", "wait", "shares")
SECONDS = ("time", "seconds", "compute", "overhead", "wait")
COUNTS = ("round", "epoch", "batch")
MANY = 2**53  # whole numbers up to this are exact as floats
SEAL = re.compile(rb',"sum":"([0-9a-f]{8})"\}\s*')


def seal(text: str, before: str = "") -> tuple[bytes, str]:
    """A line, ready to be appended, and its sum; text: a JSON object; before: the sum of the line above."""
    body = text[:-1].encode()
    found = _sum(body, before)
    return body + f',"sum":"{found}"}}\n'.encode(), found


def sum_of(text: bytes) -> str:
    """The sum of a line as it stands in the file, "" if there is no line."""
    found = SEAL.search(text)
    return found[1].decode() if found is not None and found.end() == len(text) else ""


def read_all(texts: list[bytes], before: dict[str, Any] | None = None) -> tuple[list[dict[str, Any]], str]:
    """Lines as they were written, up to the first of which something is wrong, and what ("" if nothing is).

    before: the line above the first.
    """
    lines: list[dict[str, Any]] = []
    for text in texts:
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            return lines, "is no JSON"
        found = SEAL.search(text)
        if found is None or found.end() != len(text):
            return lines, "has no checksum at its end"
        if _sum(text[: found.start()], "" if before is None else before["sum"]) != found[1].decode():
            return lines, "does not match its checksum: it or a line above it was changed, left out or moved"
        if wrong := fault(line):
            return lines, wrong
        if before is not None and line["round"] <= before["round"]:
            return lines, f"is round {line['round']:.0f}, after round {before['round']:.0f}"
        lines.append(before := line)
    return lines, ""


def fault(line: Any) -> str:
    """What is wrong with a line by itself, empty when nothing is."""
    if not isinstance(line, dict):
        return "holds no JSON object"
    for name in SCALARS:
        value = line.get(name, "missing")
        if name == "loss" and value is None:
            continue
        if not is_number(value):
            return f"has no number for {name}"
        if name in SECONDS and costs.outside(value, 0.0):
            return f"has {value:g} for {name}; expected {costs.SPAN_0} seconds"
        if name in COUNTS and not (0 <= value < MANY and value == int(value)):
            return f"has {value:g} for {name}; expected a whole number, 0 or more"
    for name in PER_WORKER:
        value = line.get(name, "missing")
        if name == "shares" and value is None:
            continue
        if not isinstance(value, list) or len(value) != len(line["loads"]):
            return f"has no list for {name}, one number a worker"
        for item in value:
            if item is None:
                continue
            if not is_number(item):
                return f"has something that is no number in {name}"
            if item < 0 or (name in SECONDS and item > costs.MOST) or item > MANY:
                return f"has {item:g} in {name}; expected 0 or more, and seconds up to 1e9"
    for name, sound in EXTRAS.items():
        if line.get(name) is not None and not sound(line[name]):
            return f"has something odd for {name}"
    sizes, times = line.get("pieces"), line.get("piece_seconds")
    if sizes and times and [len(row) for row in sizes] != [len(row) for row in times]:
        return "has pieces without their seconds"
    return ""


def is_number(value: Any) -> bool:
    """Whether JSON held a number that is finite."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(each is None or is_number(each) for each in value)


def _rows(value: Any) -> bool:
    return isinstance(value, list) and all(map(_numbers, value))


def _parts(value: Any) -> bool:
    rows = value if isinstance(value, list) else [[]]
    return all(row is None or (_numbers(row) and len(row) == 3) for row in rows)


EXTRAS: dict[
    str, Callable[[Any], bool]
] = {  # what a parameter server and rounds in pieces add, and reports read
    **dict.fromkeys(("quorum", "present", "rate", "at_once", "piece_cost", "dropped_samples"), is_number),
    **dict.fromkeys(("pieces", "piece_seconds"), _rows),
    "staleness": _numbers,
    "ran_out": _numbers,
    "parts": _parts,
    "dropped": lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
    "events": lambda value: isinstance(value, list),
}


def _sum(body: bytes, before: str) -> str:
    return f"{zlib.crc32(body, int(before, 16) if before else 0):08x}"
