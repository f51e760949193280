"""Where a run stands: its epoch, the samples of it that are done, the rounds since the beginning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from paceline.errors import PacelineError
from paceline.torch.batches import batches


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

    def remaining(self, samples: int) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round left in this epoch of so many samples."""
        return batches(samples, self.samples_done, self._batch, self._floor)

    def begin(self, epoch: int) -> None:
        """The next iteration starts this epoch from its beginning."""
        self.epoch, self.samples_done, self._midway = epoch, 0, True

    def open(self) -> None:
        """An iteration begins: within its epoch after ``load``, else with a whole one."""
        if self.samples_done and not self._midway:  # the last iteration was left early
            self.begin(self.epoch + 1)
        self._midway = False

    def finish(self, samples: int) -> None:
        """A round of so many samples is done."""
        self.samples_done += samples
        self.rounds += 1

    def state(self) -> dict[str, int]:
        """What ``load`` needs."""
        return {
            "epoch": self.epoch,
            "samples_done": self.samples_done,
            "rounds": self.rounds,
            "global_batch": self._batch,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on where ``state`` left off. Raises PacelineError where its rounds were of another size."""
        if state["global_batch"] != self._batch:
            raise PacelineError(
                f"the checkpoint was made with global_batch={state['global_batch']}, this run has "
                f"{self._batch}; samples done would not fall on a round: use the same batch"
            )
        self.epoch, self.samples_done = int(state["epoch"]), int(state["samples_done"])
        self.rounds = int(state["rounds"])
        self._midway = True
