"""What is said of a command line that cannot be read: what was given, and what was perhaps meant."""

from __future__ import annotations

from typing import Any

from paceline.errors import meant


def sentence(error: Any) -> str:
    """Of an exception of typer's, whose classes for single mistakes are not public."""
    context = getattr(error, "ctx", None)
    path = "paceline"
    if context is not None and context.parent is not None:
        path = f"paceline {context.info_name}"
    see = f"see {path} --help"
    option = getattr(error, "option_name", None)
    if option is not None and hasattr(error, "possibilities"):
        known = [name for param in context.command.params for name in param.opts] if context else []
        dashed = [name for name in known if name.startswith("--")]
        near = meant(option, dashed)
        return (
            f"{path} has no option {option}{near} S{see[1:]}"
            if near
            else f"{path} has no option {option}; {see}"
        )
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    message = message.rstrip(".").replace(". Did you mean", "; did you mean")
    return f"{message} S{see[1:]}" if message.endswith("?") else f"{message}; {see}"
