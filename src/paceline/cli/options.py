"""Lists as people write them on the command line."""

from __future__ import annotations

from paceline.errors import PacelineError

MANY = 2**31 - 1  # samples


def fields(text: str) -> list[str]:
    """Policies separated by commas; a policy's own options, key=value, stay with it."""
    parts: list[str] = []
    for part in text.split(","):
        if parts and "=" in part and ":" not in part:
            parts[-1] += "," + part.strip()
        elif part.strip():
            parts.append(part.strip())
    if not parts:
        raise PacelineError(f"{text!r} names no policy; expected names separated by commas")
    return parts


def numbers(text: str | None, option: str) -> list[float] | None:
    """``1,1,4`` as numbers."""
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise PacelineError(f"{option} {text}: expected numbers separated by commas, as in 1,1,4") from None


def limits(text: str | None) -> list[tuple[int | None, int | None]] | None:
    """``least:most,least:most,...``; an empty side means no limit of one's own."""
    if text is None:
        return None
    pairs = []
    for part in text.split(","):
        low, colon, high = part.strip().partition(":")
        try:
            if not colon:
                raise ValueError
            pairs.append((_samples(low), _samples(high)))
        except ValueError:
            raise PacelineError(
                f"--limits has the entry {part!r}; expected least:most in samples, as in 1:64"
            ) from None
    return pairs


def check_port(port: int) -> None:
    """Raises PacelineError for what is no port."""
    if not 0 <= port <= 65535:
        raise PacelineError(f"--port {port}: expected 0 to 65535")


def _samples(text: str) -> int | None:
    """A number of samples, None for no text."""
    if text and int(text) > MANY:
        raise ValueError
    return int(text) if text else None
