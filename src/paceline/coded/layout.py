"""A plan in blocks: the coded blocks of a master's matrix at each worker, and their moves if the plan changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paceline.coded.coded_plan import CodedPlan
from paceline.coded.codes import MDS, split
from paceline.errors import PacelineError, whole

BLOCKS = 64  # up to this many coded blocks, decoding is accurate to 1e-10 for any k that arrive


class Layout(NamedTuple):
    """The coded blocks of each worker.

    Attributes:
        code: Over k blocks.
        rows: L.
        owned: The blocks of each of the plan's workers, in the order of computing.
    """

    code: MDS
    rows: int
    owned: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Rows of a block."""
        return split(self.rows, self.code.k)

    def enough(self, workers: Iterable[int]) -> bool:
        """Whether all blocks of some workers together give A x.

        Args:
            workers: Positions of workers.

        Returns:
            True if they hold at least k coded blocks.
        """
        return sum(len(self.owned[n]) for n in workers) >= self.code.k


def layout(plan: CodedPlan, master: int | str, blocks: int | None = None) -> Layout:
    """Cut a master's rows into blocks and give every worker the number of coded blocks nearest to its load.

    Args:
        plan: A plan with this master.
        master: Its position from 0, or its name.
        blocks: K, the number of blocks of A; None chooses k so that there are 64 coded blocks, or four for each
            worker if that is more.

    Returns:
        The code, and the coded blocks of each worker.

    Raises:
        PacelineError: If the workers' loads do not cover the rows.
    """
    m = plan.master(master)
    rows, loads = int(plan.problem.rows[m]), plan.loads[m]
    if loads.sum() < rows * (1 - 1e-9):
        raise PacelineError(
            f"the plan's loads for master {plan.problem.masters[m]!r} sum to {loads.sum():.6g} of {rows} rows: "
            "they cannot cover them; plan again"
        )
    if blocks is None:
        wanted = max(BLOCKS, 4 * int((loads > 0).sum()))
        blocks = int(wanted / max(float(loads.sum()) / rows, 1.0))
    whole("blocks", blocks)
    k = -(-rows // split(rows, min(blocks, rows)))  # so that no block consists of padding alone
    counts = block_counts(loads, rows, k, plan.survive)
    ends = np.cumsum(counts).tolist()
    owned = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts.tolist(), strict=True))
    return Layout(MDS(k, int(counts.sum())), rows, owned)


def block_counts(loads: np.ndarray, rows: int, k: int, survive: int = 0) -> np.ndarray:
    """Whole blocks of each worker near its load, k in all or more: largest remainders, ties to the lowest worker.

    survive: workers, whichever they are, without which the others still have k blocks, if there are that many."""
    total = max(k, int(np.ceil(max(float(loads.sum()) / rows, 1.0) * k - 1e-9)))
    shares = loads * (total / loads.sum())
    counts = np.floor(shares + 1e-9).astype(int)
    order = np.argsort(counts - shares, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    while survive < (counts > 0).sum() and np.sort(counts)[: len(counts) - survive].sum() < k:
        # The largest may be lost: one of the others, which was rounded down most, gets a block.
        others = np.argsort(-counts, kind="stable")[survive:]
        counts[others[np.argmax((shares - counts)[others] - np.where(loads[others] > 0, 0.0, np.inf))]] += 1
    return counts


class Moves(NamedTuple):
    """The changes of each worker's blocks in a new layout: blocks to drop and blocks to place."""

    drop: tuple[tuple[int, ...], ...]
    place: tuple[tuple[int, ...], ...]


def relayout(old: Layout, loads: np.ndarray, survive: int = 0) -> tuple[Layout, Moves]:
    """Change the layout to new loads and move the fewest blocks: workers keep those that they still need.

    Dropped blocks are placed again before new ones are made; k stays, and if more coded blocks are needed, the code
    grows without changing the old ones.

    Args:
        old: The layout in use.
        loads: Rows of each worker, shape (N,).
        survive: Number of workers that may be lost.

    Returns:
        The new layout, and the blocks that each worker drops and gets.
    """
    counts = block_counts(loads, old.rows, old.code.k, survive)
    keep = [owned[:count] for owned, count in zip(old.owned, counts, strict=True)]
    drop = [owned[count:] for owned, count in zip(old.owned, counts, strict=True)]
    kept = {block for owned in keep for block in owned}
    total = max(int(counts.sum()), old.code.n)
    free = iter([block for block in range(total + len(kept)) if block not in kept])
    place = [
        tuple(next(free) for _ in range(count - len(own))) for own, count in zip(keep, counts, strict=True)
    ]
    owned = tuple(own + new for own, new in zip(keep, place, strict=True))
    largest = max((block for blocks in owned for block in blocks), default=0) + 1
    code = dataclasses.replace(old.code, n=max(largest, old.code.k))
    return Layout(code, old.rows, owned), Moves(tuple(drop), tuple(place))
