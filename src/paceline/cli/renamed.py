"""Options that earlier versions call otherwise: they are refused with a sentence that has the new name."""

from __future__ import annotations

from paceline.errors import PacelineError

RENAMED = {
    "train": {"--pace": "--slowdown", "--pace-ms": "--slowdown-ms", "--pace-trace": "--slowdown-trace"},
    "simulate": {"--balance": "--policy"},
}


def check(arguments: list[str]) -> None:
    """Raises PacelineError for the first option of a command that has another name now."""
    command, given = "".join(arguments[:1]), arguments[1:]
    for word in given[: given.index("--")] if "--" in given else given:
        old = word.partition("=")[0]
        if (new := RENAMED.get(command, {}).get(old)) is not None:
            raise PacelineError(f"{old} is called {new} now; write {new} instead")
