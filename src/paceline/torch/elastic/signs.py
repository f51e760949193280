"""Signs of life: since when each of several has given no other one, as whoever looks at them knows it."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.torch.elastic.news import BEAT_SECONDS

LOOKS = 4  # without another sign, at least, until somebody counts as silent
EVERY = BEAT_SECONDS / 2  # seconds between two looks
UNBORN = b"0"  # the sign of who has not begun, which may take any time


class Signs:
    """dead: seconds without another sign after which somebody counts as silent."""

    def __init__(self, dead: float) -> None:
        self._dead, self._looked = dead, 0.0
        self._seen: dict[int, tuple[bytes, float, int]] = {}  # sign, seconds and looks without another one

    def due(self, now: float) -> bool:
        """Whether to look again. now: as ``time.monotonic`` tells it."""
        return now - self._looked >= EVERY

    def silent(self, now: float, signs: Mapping[int, bytes], least: float = 0.0) -> dict[int, float]:
        """Those who have been silent for too long, and for how many seconds. signs: the newest of each, by number.
        least: seconds that are not too long."""
        # A launcher that stood still itself blames nobody for it: a look counts for little, and several are needed.
        seconds, self._looked = min(now - self._looked, 3 * EVERY), now
        found, seen = {}, {}
        for number, sign in signs.items():
            before, since, looks = self._seen.get(number, (UNBORN, 0.0, 0))
            still = sign == before != UNBORN
            since, looks = (since + seconds, looks + 1) if still else (0.0, 0)
            seen[number] = (sign, since, looks)
            if since >= max(self._dead, least) and looks >= LOOKS:
                found[number] = since
        self._seen = seen
        return found

    def quiet(self, least: float) -> list[int]:
        """Those that were silent for ``least`` seconds at the last look."""
        return [number for number, (_, since, _) in self._seen.items() if since >= least]
