"""Where a run stands: its epoch, the samples of it that are done, the rounds since the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.errors import PacelineError
from paceline.torch import saved
from paceline.torch.feed.batches import batches


class Progress:
    """Counts rounds and epochs; the same on every rank, and whatever their number.

    batch: B, samples of a round; floor: samples that a round needs at least.
    """

    def __init__(self, batch: int, floor: int) -> None:
        self._batch, self._floor = batch, floor
        self.epoch = 0  # of the next or running iteration of the loader
        self.samples_done = 0  # of this epoch, over all ranks
        self.rounds = 0  # finished since the beginning, over all epochs
        self._midway = False  # the next iteration goes on within its epoch
        self._of: tuple[int, int] | None = None  # number and samples of the loader whose epoch it is

    def remaining(self, samples: int) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round left in this epoch of so many samples."""
        return batches(samples, self.samples_done, self._batch, self._floor)

    def begin(self, epoch: int) -> None:
        """The next iteration starts this epoch from its beginning."""
        self.epoch, self.samples_done, self._midway = epoch, 0, True

    def ahead(self, samples: int) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round of the next iteration over so many samples."""
        return batches(samples, self.samples_done if self._midway else 0, self._batch, self._floor)

    def open(self, loader: int, samples: int) -> None:
        """An iteration over a loader's samples begins: within its epoch after ``load``, else with a whole one.

        Raises PacelineError where that epoch was begun with another loader."""
        if self.samples_done and not self._midway:  # the last iteration was left early
            self.begin(self.epoch + 1)
        if self.samples_done and self._of not in (None, (loader, samples)):
            assert self._of is not None
            raise PacelineError(
                f"the checkpoint was made within an epoch of loader {self._of[0]}, which has {self._of[1]} samples; "
                f"the loop goes on with loader {loader}, which has {samples}: make the loaders in the same order as "
                "before, and go on with the one that was left"
            )
        self._midway, self._of = False, (loader, samples)

    def finish(self, samples: int) -> None:
        """A round of so many samples is done."""
        self.samples_done += samples
        self.rounds += 1

    def state(self) -> dict[str, int | None]:
        """What ``load`` needs."""
        return {
            "version": saved.VERSION,
            "epoch": self.epoch,
            "samples_done": self.samples_done,
            "rounds": self.rounds,
            "global_batch": self._batch,
            "loader": None if self._of is None else self._of[0],
            "samples": None if self._of is None else self._of[1],
        }

    def check(self, state: Any) -> int:
        """The rounds that a state has behind it. Raises PacelineError where it is none, or its rounds were of another
        size; changes nothing."""
        saved.check(state)
        if state["global_batch"] != self._batch:
            raise PacelineError(
                f"the checkpoint was made with global_batch={state['global_batch']}, this run has "
                f"{self._batch}; samples done would not fall on a round: use the same batch"
            )
        return int(state["rounds"])

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` left off. Raises PacelineError as ``check`` does."""
        self.rounds = self.check(state)
        self.epoch, self.samples_done = int(state["epoch"]), int(state["samples_done"])
        of = state.get("loader"), state.get("samples")  # not in the checkpoints of older versions
        self._of = None if None in of else (int(of[0]), int(of[1]))  # type: ignore[arg-type]
        self._midway = True
