"""What a watched run shows in figures: each rank's typical step, who is slow and since when, and what loop it is."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from paceline.doctor.phases import Phase
from paceline.rounds import Array
from paceline.runs import Run
from paceline.runs.run import waits
from paceline.runs.summary import changes, median, seconds_per_sample

SLOWER = 1.15  # times the fastest rank's seconds per sample: ranks below that are called equally fast
ENOUGH = 10  # steps to judge by


class Spent(NamedTuple):
    """Where a typical step goes, in seconds: medians over the steps since the last change of a rank's speed.

    steps: how many those are. step: of the whole step. phases: of each ``Phase``, shape (8, n). waiting: for the
    slowest rank (``paceline.runs.run``), shape (n,). exchanging: from the slowest rank's last gradient to the end
    of the all-reduce. slowness: seconds per sample over the fastest rank's, shape (n,).
    """

    steps: int
    step: float
    phases: Array
    waiting: Array
    exchanging: float
    slowness: Array

    @property
    def computing(self) -> Array:
        """The forward and the backward pass and what lies between them, shape (n,)."""
        total: Array = self.phases[[Phase.FORWARD, Phase.BETWEEN, Phase.BACKWARD]].sum(axis=0)
        return total

    @property
    def own(self) -> Array:
        """All but the all-reduce, shape (n,)."""
        total: Array = np.delete(self.phases, Phase.REDUCE, axis=0).sum(axis=0)
        return total


class Slow(NamedTuple):
    """A rank whose samples take ``ratio`` times the fastest rank's time, since round ``since`` of the record."""

    rank: int
    ratio: float
    since: int


class Loop(NamedTuple):
    """What the hooks saw of the training loop.

    batch: samples of an optimizer step, all ranks together; ``sure``: whether they could be counted. backwards,
    exchanges: a rank's backward passes in an optimizer step, and those that exchange gradients. loader: of the
    DataLoader in use, None where there is none: ``processes`` and ``stream``. host: the framework whose loop it is,
    "" for the script's own. lines: of each rank, the line that a phase mostly went into, by the phase's name.
    places: file and line of the script at which rank 0 "made" the model, did "fetch", "backward" and "step". others:
    whether it steps several optimizers. compares: whether its loss compares samples with each other.
    """

    batch: int
    backwards: int
    exchanges: int
    loader: dict[str, Any] | None
    host: str
    lines: list[dict[str, str]]
    sure: bool = True
    places: Mapping[str, tuple[str, int]] = MappingProxyType({})
    others: bool = False
    compares: bool = False

    def micro_batch(self, ranks: int) -> int | None:
        """Samples of a backward pass where gradients are accumulated, else None."""
        return -(-self.batch // (ranks * self.backwards)) if self.backwards > 1 else None


def spent(run: Run) -> Spent:
    """The typical step. Raises KeyError for a record that no doctor made."""
    since = _calm(run)
    whole = slice(since, None)
    phases = np.stack([_matrix(run, "phases", phase.name)[whole] for phase in Phase])
    last = np.nanmax(run.compute[whole], axis=1)
    own = median(seconds_per_sample(run)[whole])
    return Spent(
        len(run.round) - since,
        float(np.median(run.seconds[whole])),
        np.stack([median(each) for each in phases]),
        median(waits(run.seconds[whole], run.compute[whole])),
        float(np.median(np.maximum(run.seconds[whole] - last, 0.0))),
        own / np.nanmin(own),
    )


def slow(run: Run) -> list[Slow]:
    """Ranks that are slow until the end of the record, the slowest first."""
    start = _calm(run)
    own = seconds_per_sample(run)[start:]
    middle = max(len(own) // 2, 1)
    halves = [median(part) for part in (own[:middle], own[-middle:])]
    with np.errstate(invalid="ignore"):
        steady = np.logical_and.reduce([half >= SLOWER * np.nanmin(half) for half in halves])
        ratios = median(own) / np.nanmin(median(own))
    since = {change.worker: change.round for change in changes(run) if change.ratio > 1}
    lasting = np.flatnonzero(steady & (ratios >= SLOWER))
    found = [Slow(int(i), float(ratios[i]), since.get(int(i), 0)) for i in lasting]
    return sorted(found, key=lambda each: -each.ratio)


def loop(run: Run) -> Loop:
    """What loop it is, from what the ranks told last."""
    told = [each for each in run.extras["loop"] if each is not None][-1]
    backwards, exchanges = (
        max(round(float(np.median(_matrix(run, "counts", name)))), 1) for name in ("backwards", "exchanges")
    )
    fetches = float(np.median(_matrix(run, "counts", "fetches")))
    return Loop(
        int(np.median(run.batch)),
        backwards,
        exchanges,
        told[0]["loader"] if fetches > 0 else None,
        told[0]["host"],
        [each["lines"] for each in told],
        all(each.get("sure", True) for each in told),
        told[0].get("places", {}),
        told[0].get("others", False),
        any(each.get("compares") for each in told),
    )


def _calm(run: Run) -> int:
    """Since which round no rank changed its speed; 0 where that is too short to judge by."""
    since = max((change.round for change in changes(run)), default=0)
    return since if len(run.round) - since >= ENOUGH else 0


def _matrix(run: Run, group: str, name: str) -> Array:
    return np.array([row[name] for row in run.extras[group]], float)
