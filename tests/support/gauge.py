"""A gauge of a device's memory that a test plays."""

from __future__ import annotations

import torch


class Fake:
    """A gauge whose memory is a line of what was run: ``base`` and ``each`` of a sample, of ``holds`` bytes."""

    def __init__(self, base: float, each: float, holds: float, forgets: bool = True) -> None:
        self.base, self.each, self.holds, self.forgets, self.ran = base, each, holds, forgets, 0.0
        self.highest = base

    def now(self) -> float:
        return self.base

    def begin(self) -> bool:
        self.highest = self.base if self.forgets else self.highest
        return self.forgets

    def run(self, samples: float) -> None:
        """Raises what a device's allocator raises if there is not enough."""
        if self.base + self.each * samples > self.holds:
            raise torch.OutOfMemoryError("CUDA out of memory. (as a stand-in says it)")
        self.highest = max(self.highest, self.base + self.each * samples)

    def peak(self) -> float:
        return self.highest

    def room(self) -> float:
        return self.holds
