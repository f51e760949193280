"""How much of a round fits into a rank's memory at once, learned from the peaks of its memory during training.

A rank begins with small passes and lets them grow. The peak memory of passes against the amounts that they ran gives
a line. The next pass is as large as the line allows, but at most twice the largest pass that has succeeded. If other
processes take more memory, the next look at it lowers the limit.

An amount is a number of samples, or the sum of their lengths, with any padding, if they cost differently.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from paceline.errors import PacelineError
from paceline.rounds import Array
from paceline.torch import peers
from paceline.torch.passes import Passes
from paceline.torch.plan import Piece
from paceline.torch.round import LeftWithin, RoundState
from paceline.torch.terms import Terms

MARGIN = 0.06  # portion left free of the memory that a rank may take in addition to its use at the beginning
GROWTH = 2.0  # limit of the next amount, as a multiple of the largest that has succeeded
AFTER = 7 / 8  # limit after a failure, as a portion of the amount that did not fit
PASSES = 64  # passes for which that limit holds; each further failure doubles them
LOOK_SECONDS = 0.1  # seconds between two looks at the memory, while amounts do not grow
STATUS = "/proc/self/status"
# Parts of the error messages of allocators that had no memory left.
OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "could not create a memory object")

T = TypeVar("T")


def ran_out(error: BaseException) -> bool:
    """Whether the error means that an allocator, of a device or of the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


class Gauge(NamedTuple):
    """One kind of memory, in bytes. begin: resets the peak; False if an older peak stays. now: what this process
    holds. peak: the most that it held since ``begin``. room: the most that it may hold beside other processes."""

    begin: Callable[[], bool]
    now: Callable[[], float]
    peak: Callable[[], float]
    room: Callable[[], float]


def gauges(device: torch.device) -> list[Gauge]:
    """The kinds of memory that may run out for a model on this device. (Not yet run on a GPU.)"""
    if device.type == "cuda":
        cuda = torch.cuda

        def begin() -> bool:
            cuda.reset_peak_memory_stats(device)
            return True

        def free() -> float:
            return float(cuda.mem_get_info(device)[0] + cuda.memory_reserved(device))

        held, most = partial(cuda.memory_allocated, device), partial(cuda.max_memory_allocated, device)
        return [Gauge(begin, held, most, free)]
    resident = Resident(_cgroups())
    found = [Gauge(resident.begin, resident.now, resident.peak, resident.room)]
    addresses = float(resource.getrlimit(resource.RLIMIT_AS)[0])
    if addresses != resource.RLIM_INFINITY:
        sizes = partial(_number, STATUS, "VmSize"), partial(_number, STATUS, "VmPeak")
        found.append(Gauge(lambda: False, *sizes, lambda: addresses))
    return found


def _cgroups() -> list[tuple[Path, Path, Path]]:
    """The limit, use and statistics files of this process's memory cgroups (version 2 or 1) and all their parents; a
    container sees its own cgroup at the top."""
    found = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, kinds, path = line.split(":", 2)
            place, limit, used = "/sys/fs/cgroup", "max", "current"
            if kinds:
                place, limit, used = "/sys/fs/cgroup/memory", "limit_in_bytes", "usage_in_bytes"
            if not kinds or "memory" in kinds.split(","):
                for above in (Path(path), *Path(path).parents):
                    files = [Path(f"{place}{above}/memory.{name}") for name in (limit, used, "stat")]
                    found += [(files[0], files[1], files[2])] if files[0].exists() else []
    return found


class Resident:
    """What this process holds of the machine's memory, without the pages of mapped files, such as those of libraries:
    the kernel drops them if memory runs short, and maps them again when they are used.

    cgroups: see ``_cgroups``.
    """

    def __init__(self, cgroups: list[tuple[Path, Path, Path]]) -> None:
        self._cgroups, self._files = cgroups, self._mapped()

    def begin(self) -> bool:
        """Reset the peak, where the kernel supports it."""
        self._files = self._mapped()
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            return True
        return False

    def now(self) -> float:
        """Bytes that this process holds."""
        return _number(STATUS, "VmRSS") - self._mapped()

    def peak(self) -> float:
        """The most bytes since ``begin``. The kernel's peak has the files' pages of an unknown moment, so this
        subtracts the fewer of those at both ends."""
        return _number(STATUS, "VmHWM") - min(self._files, self._mapped())

    def room(self) -> float:
        """Bytes that this process may hold in its machine or cgroup: its own, and an equal part of the free ones."""
        free = _number("/proc/meminfo", "MemAvailable")
        for limit, used, stat in self._cgroups:
            with suppress(OSError, ValueError):  # "max" is no number
                reclaimable = _number(stat, "inactive_file") / 1024
                free = min(free, int(limit.read_text()) - int(used.read_text()) + reclaimable)
        sharing = int(os.environ.get("LOCAL_WORLD_SIZE") or peers.ranks())  # by torchrun; all ranks at most
        return self.now() + max(free, 0.0) / max(sharing, 1)

    def _mapped(self) -> float:
        pages = _number(STATUS, "RssFile")
        return pages if pages < math.inf else 0.0  # not every kernel reports them


def _number(path: str | Path, name: str) -> float:
    """The bytes of the entry with this name in a file of names and kilobytes; infinity if there is none."""
    with suppress(OSError), open(path, encoding="ascii") as lines:
        for line in lines:
            if line.startswith(name):
                return 1024 * float(line.removeprefix(name).lstrip(":").split()[0])
    return math.inf


class _Line:
    """The peak bytes of a gauge as a line over the amount that ran: through the largest amount and a smaller one.

    The line is lifted by what all amounts take more than before, for instance by an optimizer's new state. The newest
    amount of more than half of the largest says how much that is; a smaller one only if it says more, since the line
    may be wrong far from the largest amount.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        gauge.begin()
        self._start, self._seen, self._spoilt, self._lift = gauge.now(), 0.0, 0.0, 0.0
        self._small = self._large = 0.0, self._start  # without the lift

    @property
    def left(self) -> float:
        """Bytes that may still be taken."""
        return self._start + (self._gauge.room() - self._start) * (1 - MARGIN) - self._large[1] - self._lift

    def ran(self, amount: float, through: bool = True) -> None:
        """Record the largest amount that ran since the last call, or failed if not ``through``."""
        peak = self._gauge.peak()
        self._seen = 0.0 if self._gauge.begin() else peak
        self._spoilt = self._spoilt if through else self._seen
        if peak <= self._spoilt or not through:  # the peak of a failed pass hides later ones
            return
        largest, most = self._large
        beyond = peak - (most + (amount - largest) * self._slope)
        if amount >= largest:
            self._large, self._lift = (amount, peak), 0.0
        elif self._seen:  # the peak may be that of a larger amount
            return
        elif amount > largest / 2:
            self._lift = max(beyond, 0.0)
        elif beyond > 0:
            self._lift = max(self._lift, beyond)
        else:
            self._small = amount, peak

    def most(self) -> float:
        """The largest amount that the gauge's room allows."""
        left = self.left
        if self._slope <= 0:
            return math.inf if left > 0 else self._large[0] / 2
        more = left / self._slope
        if left > 0 and self._seen:  # an earlier peak may hide that amounts take less
            more = max(more, 1.0)
        return self._large[0] + more

    @property
    def _slope(self) -> float:
        amount = self._large[0] - self._small[0]
        return (self._large[1] - self._small[1]) / amount if amount > 0 else 0.0


class Amounts:
    """The amounts of a batch's samples in the order in which their passes run: from its beginning to its end, or the
    other way round if the samples at the beginning are fewer in amount than those at the end. So the last pass, which
    may be small, never has the batch's longest sample unless another pass has had one as long.

    lengths: of the samples, (samples,), if they cost differently. padded: a pass takes its size times the longest.
    """

    def __init__(self, samples: int, lengths: Array | None, padded: bool) -> None:
        self.samples, self._lengths, self._padded = samples, lengths, padded
        self._reversed = lengths is not None and samples > 1 and bool(lengths[0] < lengths[-1])
        if lengths is not None:
            self._lengths = lengths[::-1] if self._reversed else lengths
            self._before = np.concatenate(([0.0], np.cumsum(self._lengths)))

    @classmethod
    def of(cls, piece: Piece) -> Amounts:
        """The amounts of a piece's samples."""
        deal = piece.plan.deal
        return cls(piece.samples, piece.lengths, deal is not None and deal.model.padded)

    def between(self, first: int, end: int) -> float:
        """The amount of a pass with the samples from ``first`` to ``end`` in their order of running."""
        if self._lengths is None or first == end:
            return float(end - first)
        if self._padded:
            return float((end - first) * self._lengths[first:end].max())
        return float(self._before[end] - self._before[first])

    def most(self, first: int, room: float) -> int:
        """The most samples from ``first`` on whose amount is at most ``room``."""
        if self._lengths is None:
            return int(min(room, self.samples - first))
        if self._padded:
            amounts = np.maximum.accumulate(self._lengths[first:]) * np.arange(1, self.samples - first + 1)
        else:
            amounts = self._before[first + 1 :] - self._before[first]
        return int(np.searchsorted(amounts, room, side="right"))

    def span(self, first: int, end: int) -> tuple[int, int]:
        """The place in the batch of the samples from ``first`` to ``end`` in their order of running."""
        return (self.samples - end, self.samples - first) if self._reversed else (first, end)


class MemoryLimit:
    """This rank's limit, in amounts. Constructing it is collective.

    round, passes: those of this rank's loop, whose micro-steps ``run`` cuts if the loop takes a round in pieces. cut:
    returns the samples of a batch from one index to another.
    """

    def __init__(
        self, round: RoundState, passes: Passes, terms: Terms, cut: Callable[[Any, int, int], Any]
    ) -> None:
        self._rank, self._passes, self._terms, self._cut = peers.rank(), passes, terms, cut
        self._round = round
        # One part would have too few samples for batch norm, or no whole quantum.
        self._unit, self._fewest = terms.quantum, max(terms.min_samples, terms.quantum)
        self._device = passes.device
        self._lines = [_Line(gauge) for gauge in gauges(self._device)]
        self._uncut = terms.fixed_micro_steps is not None  # no micro-step may be cut
        if self._uncut:  # the memory of a sample is still unknown: divide the batch by the ranks' room
            left = np.array(peers.gather(max(min(line.left for line in self._lines), 1.0)))
            terms.balancer.limit(0, np.ceil(terms.global_batch * left / left.sum()))
        self._proven = self._largest = 0.0  # the largest amount that succeeded: ever; since the last look
        self._most = 0.0
        self._looked = -math.inf
        # The amount that did not fit, how many more passes it limits, and how many the next failure will limit.
        self._out, self._out_for, self._patience = math.inf, 0, PASSES
        self._lengths = 0.0  # the mean amount of a sample, in the round where it was largest
        self._failed = 0  # passes that did not fit

    def report(self) -> tuple[float, float]:
        """Samples that fit into a round of this rank after its newest part, NaN if unlimited or unknown; and the
        number of passes that have not fitted so far."""
        piece, steps = self._round.piece, self._terms.fixed_micro_steps
        if self._uncut and piece is not None and piece.samples:
            self._lengths = max(self._lengths, _each(piece))
            self._ran(piece.samples * _each(piece))
        if steps is None or not self._proven:
            return math.nan, self._failed
        return max(self._find() / self._lengths * steps, self._fewest), self._failed

    def run(self, batch: Any, one: Callable[[Any], T]) -> Iterator[T]:
        """The results of ``one``, which runs the forward and backward pass of a batch: of a micro-step's whole batch,
        or of parts that fit, one after the other. A part that does not fit is dropped, and half of it is tried."""
        piece = self._round.running
        amounts, done, again, rows = Amounts.of(piece), 0, piece.samples, piece.samples
        cuts = rows > self._fewest and not self._uncut and self._passes.cuts(batch)
        sums = piece.last and self._passes.gradients.sums
        while done < rows or not rows:
            left = size = rows - done
            if cuts:
                size = self._size(amounts, done, sums, again)
            if size < rows:
                self._passes.part(size, first=not done, more=size < left)
            amount = amounts.between(done, done + size)
            try:
                result = one(batch if size == rows else self._cut(batch, *amounts.span(done, done + size)))
            except Exception as error:
                if not ran_out(error):
                    raise
                # Fewer samples than two floors cannot be cut: one part would be too small for batch norm.
                if not (cuts and size > self._fewest and left >= 2 * self._fewest and self._passes.droppable):
                    raise PacelineError(self._too_little(piece, size, cuts)) from error
            else:
                self._ran(amount)
                yield result
                done += size
                if not rows:
                    return
                continue
            again = max(size // 2, self._fewest)
            self._drop(amount)

    def _size(self, amounts: Amounts, done: int, sums: bool, again: int) -> int:
        """How many samples run next after ``done``: at most ``again``, unless too few would be left over. sums: the
        pass of the last of them also sums the gradients; the other ranks wait for it, so it must not fail."""
        rows = amounts.samples
        left = rows - done
        most = max(amounts.most(done, self._find()), self._fewest)
        if left <= most:
            size = left
            if sums and amounts.between(done, rows) > self._proven:
                # What is left over must be no more than what has gone through by then.
                size = next(
                    (
                        size
                        for size in range(self._unit, left, self._unit)
                        if amounts.between(done + size, rows)
                        <= max(self._proven, amounts.between(done, done + size))
                    ),
                    left,
                )
        else:
            proven = max(min(amounts.most(done, self._proven), most), self._fewest)
            size = most if most > proven else -(-left // -(-left // most))
        if (size := min(size, again)) < left:
            size = max(min(size, left - self._fewest) // self._unit * self._unit, self._fewest)
        return size if left - size >= self._fewest else left

    def _drop(self, amount: float) -> None:
        """Drop a pass of this amount, which did not fit."""
        self._failed += 1
        for line in self._lines:
            line.ran(amount, through=False)
        self._passes.take_back()
        self._out, self._out_for = amount, self._patience
        self._patience *= 2
        self._proven = min(self._proven, amount / 2)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _too_little(self, piece: Piece, samples: int, cuts: bool) -> str:
        what = (
            "expected room for as many: take a smaller model, checkpoint its activations, or leave this rank out"
            if samples < 2 * self._fewest
            else "its batch cannot be cut: parts of it have no row for each sample; set micro_batch="
            if not cuts
            else "other ranks wait for its gradients, so the pass could not be dropped; set micro_batch="
        )
        return f"{shortage(self._rank, piece, self._device, samples)}; {what}"

    def _ran(self, amount: float) -> None:
        """Record that a pass of this amount has succeeded."""
        self._largest = max(self._largest, amount)
        if self._out_for:
            self._out_for -= 1
            self._out = self._out if self._out_for else math.inf
        if amount > self._proven or time.monotonic() >= self._looked + LOOK_SECONDS:
            for line in self._lines:
                line.ran(self._largest)
            self._proven, self._largest = max(self._proven, self._largest), 0.0
            self._looked = -math.inf

    def _find(self) -> float:
        """The largest amount that may run at once now."""
        now = time.monotonic()
        if now >= self._looked + LOOK_SECONDS:
            self._looked = now
            allowed = min(line.most() for line in self._lines) if self._proven else 0.0
            self._most = max(min(allowed, GROWTH * self._proven, AFTER * self._out), 0.0)
        return self._most


def _each(piece: Piece) -> float:
    """The mean amount of a sample in a piece."""
    return 1.0 if piece.parts is None or not piece.samples else float(piece.parts[0]) / piece.samples


def shortage(rank: int, piece: Piece, device: torch.device, samples: int | None = None) -> str:
    """The beginning of an error message: the rank that ran out of memory, its round, samples at once and bytes."""
    pairs = [(gauge.peak(), gauge.room()) for gauge in gauges(device)]
    peak, room = min(pairs, key=lambda pair: pair[1] - pair[0])
    many = piece.samples if samples is None else samples
    return (
        f"rank {rank} ran out of memory in round {piece.step} with {many} sample{'s' * (many != 1)} at once, "
        f"and held up to {_bytes(peak)} of the {_bytes(room)} that it may hold"
    )


def _bytes(number: float) -> str:
    return f"{number / 2**30:.1f} GiB" if number >= 2**30 else f"{number / 2**20:.0f} MiB"


def explain(error: BaseException, device: torch.device, left: LeftWithin | None, fits: Array | None) -> str:
    """Add a note to an error that ends the loop, if a lack of memory or a batch of one sample may be its cause.
    Returns the error message for the other ranks instead of the error's own text; "" for none.

    device: of the model. left: the micro-step in whose middle the loop was left. fits: samples that fit into each
    rank's memory, (n,)."""
    if left is None:
        return ""
    rank, piece = peers.rank(), left.piece
    if ran_out(error):
        known = "" if fits is None else f" (of {np.nansum(fits):.0f} samples, as far as is known)"
        words = (
            f"{shortage(rank, piece, device)}; use loop='round' and pace.round(batch, function) "
            f"with limits='memory', which accumulates what does not fit, or a smaller global_batch{known}"
        )
        error.add_note(f"paceline: {words}")
        return words
    if not left.done and piece.samples <= 1 and not isinstance(error, PacelineError):
        error.add_note(
            f"paceline: rank {rank} was given a single sample in round {piece.step}; if the model or the loss "
            "needs two, as after squeeze(), give each rank at least as many: "
            f"Pace(..., limits=[(2, None)] * {peers.ranks()}), and drop_last=True if the last round has fewer"
        )
    return ""
