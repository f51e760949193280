"""Names with options: what is built, and what is said when it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest

from paceline.errors import PacelineError
from paceline.options import build

GUARANTEES = (
    "Wrong, mistyped or huge options give one message with what was perhaps meant and exit status 2; "
    "never a traceback.",
)


@dataclass(frozen=True)
class Thing:
    size: int
    rate: float = 0.5
    fast: bool = False
    of: Literal["a", "b"] = "a"
    path: str | None = None


KINDS: dict[str, type[Thing]] = {"thing": Thing, "other": Thing}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("thing", Thing(3)),
        ("thing:rate=1e-3", Thing(3, rate=0.001)),
        ("thing: fast=yes, of=b ,rate=2", Thing(3, rate=2.0, fast=True, of="b")),
        ("thing:path=x=y:z", Thing(3, path="x=y:z")),
        ("thing:path=none", Thing(3)),
    ],
)
def test_builds_what_is_asked_for(text: str, expected: Thing) -> None:
    assert build(KINDS, text, "kind", size=3) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quick", "kind 'quick' is unknown; expected one of other, thing"),
        ("thong", "kind 'thong' is unknown; did you mean thing? Expected one of other, thing"),
        (
            "thing:rats=1",
            "kind 'thing' has no option 'rats=1'; did you mean rate? Expected key=value with rate",
        ),
        (
            "thing:colour=red",
            "kind 'thing' has no option 'colour=red'; expected key=value with rate, fast, of, path",
        ),
        ("thing:rate", "has no option 'rate'"),
        ("thing:size=4", "has no option 'size=4'"),  # the caller sets it
        ("thing:rate=quick", "rate=quick: expected a number"),
        ("thing:fast=perhaps", "fast=perhaps: expected true or false"),
        ("thing:of=c", "of=c: expected one of a, b"),
    ],
)
def test_error_names_what_was_expected(text: str, message: str) -> None:
    with pytest.raises(PacelineError) as caught:
        build(KINDS, text, "kind", size=3)
    assert message in str(caught.value)


def test_whole_numbers_are_whole() -> None:
    with pytest.raises(PacelineError, match=r"size=2\.5: expected a whole number"):
        build(KINDS, "thing:size=2.5", "kind")
