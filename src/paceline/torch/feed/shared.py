"""A stream that every rank reads whole: of each round, a rank keeps the slice that the plan gives it.

So a faster rank gets more samples of the stream. All ranks read and prepare all samples, which is work that balancing
does not divide.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from paceline.errors import PacelineError
from paceline.rounds import Indices
from paceline.torch import peers
from paceline.torch.feed.streams import StreamLoader


class SharedStreamLoader(StreamLoader):
    """Iterates over one stream, which gives every rank the same samples in the same order."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._first_seed: int = peers.gather(self._seeds()[0])[0]
        self._whole: Any = None  # samples of the running round, of all ranks

    def _seeds(self) -> tuple[int, ...]:
        return (getattr(self, "_first_seed", super()._seeds()[0]),)

    def _take(self, loads: Indices) -> Any:
        end = int(loads[: self._loop.rank + 1].sum())
        self._whole = self._buffer.take(int(loads.sum()))
        return self._buffer.cut(self._whole, end - int(loads[self._loop.rank]), end)

    def _put_back(self) -> None:
        self._buffer.back(self._whole)

    def _aim(self, load: int) -> int:
        return self._loop.terms.global_batch

    def _plan(self) -> Indices | None:
        loop, terms = self._loop, self._loop.terms
        loop.settle()  # the plan depends on the round before
        self._receive()
        held = self._supply["held"].astype(np.int64)
        if (held != held[0]).any():
            raise PacelineError(
                f"the ranks read {', '.join(map(str, held))} samples of a stream that they share; expected the same "
                "samples in the same order on every rank"
            )
        batch = int(min(held[0], terms.global_batch))
        if batch < (terms.global_batch if self._drop_last else terms.floor):
            self._finish(batch)
            return None
        self._empty = False
        return terms.balancer.loads(loop.progress.rounds, batch)
