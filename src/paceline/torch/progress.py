"""The progress of a run: its epoch, the samples of it that are done, the rounds since the beginning.

The progress in a checkpoint is checked before it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from typing import Any, NamedTuple, NoReturn

import numpy as np

from paceline.errors import PacelineError, short

VERSION = 1  # version of the states of ``Pace.state_dict``
COUNTS = ("epoch", "samples_done", "rounds", "global_batch")
# Missing from states of older versions, and None if no loader was iterated; the last also if it is a stream's.
LATER = ("loader", "samples", "seed")


class Opened(NamedTuple):
    """A loader whose epoch was begun: its number among those of its Pace, and the samples of an epoch.

    seed, shuffle: what the order of an epoch depends on besides its number; None for a stream, or if unknown.
    """

    loader: int
    samples: int
    seed: int | None = None
    shuffle: bool | None = None

    def check(self, before: Opened) -> None:
        """Raises PacelineError if the epoch that was begun with loader ``before`` cannot go on with this one."""
        if (self.loader, self.samples) != (before.loader, before.samples):
            raise PacelineError(
                f"the loop continues with loader {self.loader} ({self.samples} samples); expected loader "
                f"{before.loader} ({before.samples} samples), in whose epoch the checkpoint was made: make loaders "
                "in the same order"
            )
        known = self.shuffle is not None and before.shuffle is not None
        if known and (self.shuffle, self.shuffle and self.seed) != (
            before.shuffle,
            before.shuffle and before.seed,
        ):
            raise PacelineError(
                f"the loop continues with seed={self.seed}, shuffle={self.shuffle}; expected seed={before.seed}, "
                f"shuffle={before.shuffle}, in whose order the samples of this epoch were begun: use the same"
            )


def rounds(samples: int, done: int, batch: int, min_samples: int = 1) -> int:
    """The rounds left of an epoch. Only the last may be short; fewer samples than ``min_samples`` cannot be a round
    of their own (batch norm needs 2) and join the round before."""
    left = max(samples - done, 0)
    full, rest = divmod(left, batch)
    return full + (rest > 0 if not full else rest >= min_samples)


class Progress:
    """Counts rounds and epochs; the same on every rank, and for any number of ranks.

    batch: B, samples of a step. min_samples: the least samples of a round. each: the samples of a round, or a
    function that gives them by its number.
    """

    def __init__(self, batch: int, min_samples: int, each: int | Callable[[int], int]) -> None:
        self._batch, self._min_samples, self._each = batch, min_samples, each
        self.epoch = 0  # of the next or running iteration of the loader
        self.samples_done = 0  # of this epoch, over all ranks
        self.rounds = 0  # finished since the beginning, over all epochs
        self.samples = 0  # samples of an epoch of the loader in use
        self._midway = False  # the next iteration continues within its epoch
        self.running = False  # an iteration is running
        self.counts = True  # the newest iteration is over a loader, whose samples are counted
        self._chosen: int | None = None  # epoch of the next iteration, chosen while one is running
        self._of: Opened | None = None  # the loader whose epoch it is

    def size(self, step: int) -> int:
        """Samples of round ``step``."""
        return self._each if isinstance(self._each, int) else self._each(step)

    def remaining(self) -> Iterator[tuple[int, int]]:
        """(first sample, size) of each round left in this epoch of the loader in use, as of the call."""
        first, step, samples = self.samples_done, self.rounds, self.samples
        if isinstance(size := self._each, int):
            many = rounds(samples, first, size, self._min_samples)
            last = first + (many - 1) * size
            return chain(
                zip(range(first, last, size), repeat(size)), [(last, samples - last)] if many else []
            )
        return self._varying(first, step)

    def _varying(self, first: int, step: int) -> Iterator[tuple[int, int]]:
        """``remaining``, if the size of a round depends on its number."""
        samples = self.samples
        while (left := samples - first) > 0:
            size = self.size(step)
            if (
                rest := left - size
            ) < size and rest < self._min_samples:  # too little for a round joins this one
                size = left
            yield first, size
            first, step = first + size, step + 1

    @property
    def left(self) -> int:
        """The number of rounds left in this epoch."""
        return rounds(self.samples, self.samples_done, self.size(self.rounds), self._min_samples)

    def begin(self, epoch: int) -> None:
        """The next iteration starts this epoch from its beginning."""
        self.epoch, self.samples_done, self._midway = epoch, 0, True

    def advance(self, samples: int) -> None:
        """A round of so many samples is over."""
        self.rounds += 1
        if self.counts:
            self.samples_done += samples

    def over_samples(self, samples: int) -> None:
        """A loader that uses this many samples in an epoch was made, and may be iterated next."""
        self.samples = samples

    def choose(self, epoch: int) -> None:
        """The next iteration takes this epoch: from its beginning, unless a checkpoint was made within it.

        An iteration that is running continues as it began."""
        if self.running:
            self._chosen = epoch
        elif epoch != self.epoch or (self.samples_done and not self._midway):
            self.begin(epoch)

    def ahead(self, samples: int) -> int:
        """Rounds of the next iteration over ``samples``."""
        done = self.samples_done if self._midway else 0
        return rounds(samples, done, self.size(self.rounds), self._min_samples)

    def open(self, loader: Opened) -> None:
        """An iteration over a loader's samples begins: within its epoch after ``load``, else with a whole one.

        Raises PacelineError if that epoch was begun with another loader, or in another order."""
        self.close()
        if self.samples_done and not self._midway:  # the last iteration was left early
            self.begin(self.epoch + 1)
        if self.samples_done and self._of is not None:
            loader.check(self._of)
        self.samples, self._midway, self._of = loader.samples, False, loader
        self.running = self.counts = True

    def draws(self) -> None:
        """An iteration begins in which the loop draws its own samples, which belong to no epoch."""
        self.close()
        self.running, self.counts = True, False

    def close(self) -> None:
        """The iteration is over, or was left."""
        self.running = False
        if self._chosen is not None:
            epoch, self._chosen = self._chosen, None
            self.choose(epoch)

    def state(self) -> dict[str, int | None]:
        """The state for ``load``."""
        of = (None,) * len(Opened._fields) if self._of is None else self._of
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "samples_done": self.samples_done,
            "rounds": self.rounds,
            "global_batch": self._batch,
            **dict(zip(Opened._fields, of, strict=True)),
        }

    def check(self, state: Any) -> int:
        """The rounds of a state. Raises PacelineError if it is not a state, or has another batch; changes nothing."""
        check_state(state)
        if state["global_batch"] != self._batch:
            raise PacelineError(
                f"the checkpoint was made with global_batch={state['global_batch']}, this run has "
                f"{self._batch}; samples done would not fall on a round: use the same batch"
            )
        return int(state["rounds"])

    def load(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises PacelineError as ``check`` does."""
        self.rounds = self.check(state)
        self.epoch, self.samples_done = int(state["epoch"]), int(state["samples_done"])
        number, samples, seed = (
            state.get(name) for name in LATER
        )  # not in the checkpoints of older versions
        self._of = None
        if number is not None and samples is not None:
            self._of = Opened(
                int(number), int(samples), None if seed is None else int(seed), state.get("shuffle")
            )
        self._midway = True


def check_state(state: Any) -> None:
    """Raises PacelineError if this is not a state of a ``Pace``, or one of another version."""
    if not isinstance(state, dict):
        raise PacelineError(
            f"the state of Pace is {short(state)}; expected a dict, as Pace.state_dict() gives it"
        )

    def refuse(name: str, expected: str) -> NoReturn:
        raise PacelineError(f"the state of Pace has {name}={short(state.get(name))}; expected {expected}")

    if not _whole(state.get("version")) or state["version"] != VERSION:
        refuse("version", f"{VERSION}, which this version of Paceline reads and writes")
    for name in (*COUNTS, *LATER):
        value: Any = state.get(name)
        least = int(name == "global_batch")
        if not (name in LATER and value is None) and not (_whole(value) and value >= least):
            refuse(name, f"a whole number of at least {least}")
    if not isinstance(state.get("shuffle"), bool | None):
        refuse("shuffle", "True, False or None")
    if not isinstance(state.get("policy"), str):
        refuse("policy", "the name of a policy")
    if not isinstance(state.get("balancer"), dict):
        refuse("balancer", "a dict, as Balancer.state_dict() gives it")


def _whole(value: Any) -> bool:
    """Whether this is a whole number, True and False excepted."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
