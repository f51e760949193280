"""Numbers and lists in words for people."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float | None) -> str:
    """1234.5 as 1,234 or 0.01234 as 0.0123: three significant digits, thousands separated; "–" if unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0"
    places = 2 - math.floor(math.log10(abs(value)))
    text = f"{round(value, places):,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if places > 0 else text


def seconds(value: float | None) -> str:
    """A duration in a suitable unit: 64 ms, 1.25 s, 3 min 20 s, 2 h 5 min; "–" if unknown."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0 s"
    if value < 0.9995e-3:
        return f"{number(value * 1e6)} µs"
    if value < 0.9995:
        return f"{number(value * 1e3)} ms"
    if value < 119.5:
        return f"{number(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(round(value / 60), 60)
    return f"{hours:,} h {minutes} min" if minutes else f"{hours:,} h"


def about(value: float) -> str:
    """An estimated duration, rounded as coarsely as the estimate is exact: 8 s, 40 s, 3 min, 2 h 5 min."""
    if value < 9.5:
        return f"{max(1, round(value))} s"
    if value < 57.5:
        return f"{5 * round(value / 5)} s"
    return seconds(60.0 * round(value / 60)) if value >= 119.5 else "1 min" if value < 90 else "2 min"


def percent(share: float | None, places: int = 0) -> str:
    """0.563 as 56 %; a small share is not rounded to 0 %, and a large one not to 100 %."""
    if share is None or not math.isfinite(share):
        return "–"
    text = f"{100 * share:.{places}f}"
    if share > 0 and float(text) == 0:
        return "under 1 %" if places == 0 else f"under {10**-places:g} %"
    if share < 1 and float(text) == 100:
        return f"{100 * share:.1f} %" if share < 0.9995 else "almost 100 %"
    return f"{text} %"


def times(ratio: float) -> str:
    """A ratio, such as 4.0x, 1.25x or 12x."""
    return f"{ratio:.2f}x" if ratio < 1.995 else f"{ratio:.1f}x" if ratio < 9.95 else f"{ratio:,.0f}x"


def listing(items: Sequence[object]) -> str:
    """Items as a list in words, such as "1, 2 and 3"; "none" for no item."""
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}" if texts else "none"


def plural(count: int, thing: str) -> str:
    """A count with its noun, such as "1 round" or "1,200 rounds"."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"
