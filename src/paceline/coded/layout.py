"""A plan in blocks: which coded blocks of a master's matrix each worker holds, and what moves if the plan changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from paceline.coded.coded_plan import CodedPlan
from paceline.coded.codes import MDS, split
from paceline.errors import PacelineError, whole

BLOCKS = 64  # coded blocks up to which decoding is accurate to 1e-10 whatever arrives


class Layout(NamedTuple):
    """Coded blocks by worker.

    code: over k blocks; rows: L; owned: for each of the plan's workers, its blocks in the order of computing.
    """

    code: MDS
    rows: int
    owned: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Rows of a block."""
        return split(self.rows, self.code.k)

    def enough(self, workers: Iterable[int]) -> bool:
        """Whether all blocks of these workers together give A x."""
        return sum(len(self.owned[n]) for n in workers) >= self.code.k


def layout(plan: CodedPlan, master: int | str, blocks: int | None = None) -> Layout:
    """Cut a master's rows into blocks and give every worker as many coded ones as its load comes to.

    blocks: k, the number of blocks of A; None for as many as make 64 coded ones, or four for each worker if that is
    more.

    Raises PacelineError if the workers' loads do not cover the rows.
    """
    m = plan.master(master)
    rows, loads = int(plan.problem.rows[m]), plan.loads[m]
    if loads.sum() < rows * (1 - 1e-9):
        raise PacelineError(
            f"the plan's loads for master {plan.problem.masters[m]!r} come to {loads.sum():.6g} of {rows} rows: "
            "they cannot cover them; plan again"
        )
    if blocks is None:
        wanted = max(BLOCKS, 4 * int((loads > 0).sum()))
        blocks = int(wanted / max(float(loads.sum()) / rows, 1.0))
    whole("blocks", blocks)
    k = -(-rows // split(rows, min(blocks, rows)))  # so that no block is all filling
    counts = block_counts(loads, rows, k)
    ends = np.cumsum(counts).tolist()
    owned = tuple(tuple(range(end - count, end)) for end, count in zip(ends, counts.tolist(), strict=True))
    return Layout(MDS(k, int(counts.sum())), rows, owned)


def block_counts(loads: np.ndarray, rows: int, k: int) -> np.ndarray:
    """Whole blocks of each worker near its load, k in all or more: largest remainders, ties to the lowest worker."""
    total = max(k, int(np.ceil(max(float(loads.sum()) / rows, 1.0) * k - 1e-9)))
    shares = loads * (total / loads.sum())
    counts = np.floor(shares + 1e-9).astype(int)
    order = np.argsort(counts - shares, kind="stable")
    counts[order[: total - int(counts.sum())]] += 1
    return counts


class Moves(NamedTuple):
    """What a change of layout asks of each worker: blocks to drop and blocks to place."""

    drop: tuple[tuple[int, ...], ...]
    place: tuple[tuple[int, ...], ...]


def relayout(old: Layout, loads: np.ndarray) -> tuple[Layout, Moves]:
    """The layout for new loads, shape (N,), that moves the fewest blocks: workers keep what they still need.

    Blocks given up are handed on before new ones are made; k stays, and where more coded blocks are needed
    the code grows without changing the old ones.
    """
    counts = block_counts(loads, old.rows, old.code.k)
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
