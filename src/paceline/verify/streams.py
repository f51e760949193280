"""A rank's stream, from which every run gets the same samples: the first run writes down what all streams give, and
in the others a rank draws those samples that its loads make its own."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

AHEAD = 3  # rounds that are recorded beyond those that are run, since ranks draw ahead


class Replayed:
    """Iterates over a stream. In the first run (``loads`` None) its samples are also written to ``place``.

    loads: of every rank in this run; equal: in the first run. steps: rounds that are run.
    """

    def __init__(
        self, stream: Any, place: Path, rank: int, equal: list[int], loads: list[int] | None, steps: int
    ) -> None:
        self._stream, self._place, self._rank = stream, place, rank
        self._equal, self._loads, self._rounds = equal, loads, steps + AHEAD
        self._epoch = -1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._stream, name)

    def __iter__(self) -> Iterator[Any]:
        self._epoch += 1
        return self._recorded() if self._loads is None else self._drawn(self._loads)

    def _recorded(self) -> Iterator[Any]:
        most = self._equal[self._rank] * self._rounds
        with self._file(self._rank).open("wb") as file:
            for number, sample in enumerate(self._stream):
                if number < most:
                    pickle.dump(sample, file)
                    file.flush()
                yield sample

    def _drawn(self, loads: list[int]) -> Iterator[Any]:
        streams = [self._samples(rank) for rank in range(len(loads))]
        first = sum(loads[: self._rank])
        while True:
            whole = [
                sample
                for samples, many in zip(streams, self._equal, strict=True)
                for sample in islice(samples, many)
            ]
            if not whole:
                return
            # An idle rank holds a sample, too, which fills its micro-steps and counts for nothing.
            yield from whole[first : first + loads[self._rank]] or whole[:1]

    def _samples(self, rank: int) -> Iterator[Any]:
        if self._file(rank).exists():
            with self._file(rank).open("rb") as file:
                while True:
                    try:
                        yield pickle.load(file)
                    except EOFError:
                        return

    def _file(self, rank: int) -> Path:
        return self._place / f"stream-{self._epoch}-{rank}"
