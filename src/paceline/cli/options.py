"""Lists as people write them on the command line."""

from __future__ import annotations

from paceline.errors import PacelineError


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
            pairs.append((int(low) if low else None, int(high) if high else None))
        except ValueError:
            raise PacelineError(
                f"--limits has the entry {part!r}; expected least:most in samples, as in 1:64"
            ) from None
    return pairs
