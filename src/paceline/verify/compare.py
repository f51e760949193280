"""What differs between the runs of a program: functions of the records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

# The largest relative difference that rounding explains, by the coarsest floating type in the step: float64, float32,
# and what autocast uses.
ROUNDING = ((1e-15, 1e-9), (1e-6, 1e-4), (1.0, 0.05))
FLOOR = 1e-2  # a parameter's difference is relative to its gradient's norm, at least to this portion of all of them
SAME_OPTION = 1e-9  # relative difference of learning rates and other options that rounding explains
SAME_LOSS = 1e-3  # relative difference of losses, which are summed in other orders

Line = dict[str, Any]
Key = tuple[int, int]  # the number of an optimizer, and of its step


@dataclass(frozen=True)
class RunLog:
    """The records of one run. ranks: the lines of each rank, by rank."""

    name: str
    ranks: Mapping[int, list[Line]]
    steps: dict[Key, dict[int, Line]] = field(init=False)  # of each step, the line of each rank

    def __post_init__(self) -> None:
        found: dict[Key, dict[int, Line]] = {}
        for rank, lines in self.ranks.items():
            for line in lines:
                if line["kind"] == "step":
                    found.setdefault((line["number"], line["optimizer"]), {})[rank] = line
        object.__setattr__(self, "steps", dict(sorted(found.items())))

    @property
    def loads(self) -> list[int]:
        """The samples of each rank in this run's first Pace."""
        return next((line["loads"] for line in self.lines("pace")), [])

    def lines(self, kind: str) -> Iterator[Line]:
        """The lines of one kind, of all ranks."""
        for lines in self.ranks.values():
            yield from (line for line in lines if line["kind"] == kind)


class Distance(NamedTuple):
    """How far two runs are apart in one parameter's gradient at one step, relative."""

    size: float
    step: int  # from 0
    name: str


@dataclass
class Difference:
    """What differs between the first run and another one. All lists are in the order of the steps."""

    loads: list[int]
    steps: int  # steps that both took
    gradients: list[Distance]  # the worst parameter of each step
    absent: list[tuple[int, str]]  # (step, parameter) whose gradient is None in one run alone
    options: list[str]  # sentences on options and metrics that differ between the runs
    unlike: list[str]  # sentences on options that differ between the ranks of the other run
    states: list[Distance]  # the worst buffer or other module of each step
    apart: list[Distance]  # the worst difference between the ranks of the other run, in each step
    counts: list[str]  # sentences on numbers of steps
    loss: str  # "mean", "sum", "whole" or "other": how the loss of a rank follows from its samples; "" if unknown

    @property
    def worst(self) -> Distance:
        """The largest difference of a gradient."""
        return max(self.gradients, default=Distance(0.0, 0, ""))

    def same(self, tolerance: float) -> bool:
        """Whether nothing differs between the runs beyond rounding."""
        differs = any(each.size > tolerance for each in (*self.gradients, *self.states))
        return not (differs or self.absent or self.options or self.counts)

    def alike(self, tolerance: float) -> bool:
        """Whether nothing differs between the ranks of the other run beyond rounding."""
        return not (self.unlike or any(each.size > tolerance for each in self.apart))


def site(line: Line) -> str:
    """The name of a place where the program draws random numbers."""
    return f"{line['name']} {line['file']}:{line['line']}"


def settled(runs: list[RunLog]) -> dict[str, int]:
    """Of each place of the program that draws random numbers for samples, the dimension of the samples, if it is the
    same whenever a tensor's shape says it."""
    found: dict[str, set[int]] = {}
    for run in runs:
        for line in run.lines("rows"):
            found.setdefault(site(line), set()).add(line["elements"])
    return {place: min(at) for place, at in found.items() if len(at) == 1}


def unowned(runs: list[RunLog]) -> list[Line]:
    """A line of each place of the program whose random draws belong to no sample, and yet grow with the samples, such
    as dropout on the nodes of graphs: what is drawn for a sample then follows from the loads."""
    sizes: dict[str, set[int]] = {}
    lines: dict[str, Line] = {}
    for run in runs:
        for line in run.lines("draw"):
            sizes.setdefault(site(line), set()).add(line["elements"])
            lines.setdefault(site(line), line)
    return [lines[place] for place, found in sizes.items() if len(found) > 1]


def still(runs: list[RunLog]) -> bool:
    """Whether every gradient is zero or absent, at every step of every run."""
    return not any(
        any(sketch) for run in runs for line in run.lines("step") for sketch in line["gradients"].values()
    )


def tolerance(runs: list[RunLog]) -> float:
    """The largest relative difference that rounding explains, by the coarsest floating type in any step."""
    eps = max((line["eps"] for run in runs for line in run.lines("step")), default=0.0)
    return next(allowed for limit, allowed in ROUNDING if eps <= limit)


def difference(first: RunLog, other: RunLog) -> Difference:
    """What differs between the first run and another one."""
    both = [key for key in first.steps if key in other.steps]
    gradients, absent, states, apart = [], [], [], []
    for key in both:
        ours, theirs = first.steps[key], other.steps[key]
        ranks = sorted(ours.keys() & theirs.keys())
        step = key[0]
        pairs = {
            name: [(ours[rank]["gradients"][name], theirs[rank]["gradients"].get(name, [])) for rank in ranks]
            for name in ours[ranks[0]]["gradients"]
        }
        absent += [(step, name) for name, each in pairs.items() if any(bool(a) != bool(b) for a, b in each)]
        gradients.append(_worst(pairs, step))
        known = {
            name: [(ours[rank]["states"][name], theirs[rank]["states"][name])]
            for rank in ranks[:1]
            for name in ours[rank]["states"].keys() & theirs[rank]["states"].keys()
        }
        states.append(_worst(known, step, own=True))
        apart.append(_between_ranks(theirs, step))
    return Difference(
        loads=other.loads,
        steps=len({step for step, _ in both}),
        gradients=gradients,
        absent=absent,
        options=[*_options(first, other, both), *_metrics(first, other, both)],
        unlike=_unlike(other),
        states=states,
        apart=apart,
        counts=_counts(first, other),
        loss=loss_kind(first, other),
    )


def far(one: list[float], other: list[float]) -> float:
    """An estimate of the norm of the difference of two tensors, from their sketches; NaN agrees with NaN."""
    if not one or not other:
        return (one or other or [0.0])[0]
    if all(map(math.isfinite, (*one, *other))):
        projected = math.sqrt(sum((a - b) ** 2 for a, b in zip(one[1:], other[1:], strict=True)))
        return max(projected, abs(one[0] - other[0]))
    return 0.0 if all(_alike(a, b) for a, b in zip(one, other, strict=True)) else math.inf


def _alike(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _worst(
    pairs: Mapping[str, list[tuple[list[float], list[float]]]], step: int, own: bool = False
) -> Distance:
    """The largest relative difference. pairs: of each name, the sketches of both on each rank. own: relative to each
    tensor alone; by default at least to a portion of all."""
    norms = {
        name: math.sqrt(sum(max(_norm(a), _norm(b)) ** 2 for a, b in each)) for name, each in pairs.items()
    }
    whole = 0.0 if own else FLOOR * math.sqrt(sum(norm**2 for norm in norms.values()))
    found = Distance(0.0, step, "")
    for name, each in pairs.items():
        distance = math.sqrt(sum(far(a, b) ** 2 for a, b in each))
        size = distance / max(norms[name], whole) if distance else 0.0
        if size > found.size:
            found = Distance(size, step, name)
    return found


def _norm(sketch: list[float]) -> float:
    return sketch[0] if sketch and math.isfinite(sketch[0]) else 0.0


def _between_ranks(lines: Mapping[int, Line], step: int) -> Distance:
    """The worst difference between ranks in parameters, and in what is not the model's: averages and the like."""
    ranks = sorted(lines)
    pairs = {
        name: [(lines[ranks[0]][part][name], lines[rank][part][name])]
        for part in ("parameters", "states")
        for rank in ranks[1:]
        if not lines[rank]["apart"]  # else each rank has another part of each tensor
        for name in lines[ranks[0]][part].keys() & lines[rank][part].keys()
    }
    return _worst(pairs, step, own=True)


def schedule(first: RunLog, unported: RunLog) -> list[str]:
    """Sentences on what the ported program does with its optimizers' options, and the unported one does not."""
    both = [key for key in first.steps if key in unported.steps]
    found = _options(unported, first, both, "in the unported program")
    lengths = [epoch_steps(run) for run in (first, unported)]
    if None not in lengths and abs(lengths[0] - lengths[1]) > 1:  # type: ignore[operator] # a short last round
        found.append(f"an epoch has {lengths[0]} steps, and {lengths[1]} in the unported program")
    return found


def epoch_steps(run: RunLog) -> int | None:
    """Optimizer steps of an epoch of rank 0, as the length of its loader says; None if it says nothing."""
    lines = [line for line in run.ranks[min(run.ranks)] if line["kind"] == "epoch"]
    if not lines:
        return None
    return math.ceil(lines[-1]["batches"] / statistics.median_low(line["between"] for line in lines))


def _options(first: RunLog, other: RunLog, both: list[Key], where: str = "with equal loads") -> list[str]:
    """Sentences on options of parameter groups that differ from those of the first run, on rank 0."""
    found: dict[str, str] = {}
    for key in both:
        ours, theirs = first.steps[key], other.steps[key]
        rank = min(ours.keys() & theirs.keys())
        for name, (value, expected) in _unequal(theirs[rank], ours[rank]).items():
            found.setdefault(name, f"{name} at step {key[0] + 1} is {value:.6g}, and {expected:.6g} {where}")
    return list(found.values())


def _metrics(first: RunLog, other: RunLog, both: list[Key]) -> list[str]:
    """Sentences on metrics over all ranks that differ from those of the first run, on rank 0."""
    found: dict[str, str] = {}
    for key in both:
        ours, theirs = first.steps[key], other.steps[key]
        rank = min(ours.keys() & theirs.keys())
        for (name, expected), (_, value) in zip(ours[rank]["metrics"], theirs[rank]["metrics"], strict=False):
            if not (_near(value, expected) or _alike(value, expected)):
                words = f"{name} before step {key[0] + 1} is {value:.6g}, and {expected:.6g} with equal loads"
                found.setdefault(name, words)
    return list(found.values())


def _unlike(run: RunLog) -> list[str]:
    """Sentences on options of parameter groups that differ between ranks."""
    found: dict[str, str] = {}
    for (number, _), lines in run.steps.items():
        one = min(lines)
        for rank, line in lines.items():
            for name, (value, expected) in _unequal(line, lines[one]).items():
                found.setdefault(
                    name,
                    f"{name} at step {number + 1} is {value:.6g} on rank {rank}, and {expected:.6g} on rank {one}",
                )
    return list(found.values())


def _unequal(line: Line, expected: Line) -> dict[str, tuple[float, float]]:
    """Options of two steps that differ, with both values."""
    return {
        f"{name} of parameter group {group}": (value, wanted[name])
        for group, (given, wanted) in enumerate(zip(line["options"], expected["options"], strict=False))
        for name, value in given.items()
        if name in wanted and abs(value - wanted[name]) > SAME_OPTION * abs(wanted[name])
    }


def _counts(first: RunLog, other: RunLog) -> list[str]:
    """Sentences on optimizers that take other numbers of steps."""
    numbers = []
    for run in (first, other):
        last: dict[int, int] = {}
        for number, optimizer in run.steps:
            last[optimizer] = max(last.get(optimizer, 0), number + 1)
        numbers.append(last)
    return [  # they are counted up to the number that was asked for
        f"optimizer {at + 1} takes {numbers[0].get(at, 0)} steps with equal loads, now {numbers[1].get(at, 0)}"
        for at in sorted({*numbers[0], *numbers[1]})
        if numbers[0].get(at) != numbers[1].get(at)
    ]


def loss_kind(first: RunLog, other: RunLog) -> str:
    """How a rank's loss follows from its samples at the first step, where all parameters are the same: it is a "mean"
    or a "sum" over them, the same on all ranks ("whole"), or something else ("other"); "" if that is unknown."""
    if not first.steps or not other.steps:
        return ""
    kinds = {"mean", "sum", "whole"}
    known = []
    for run in (first, other):
        lines = next(iter(run.steps.values()))
        losses = [each for line in lines.values() for each in line["losses"] if each[0]]
        if not losses or not all(math.isfinite(loss) for _, loss, _, _ in losses):
            return ""
        known.append(losses)
    totals = [
        {
            "mean": sum(_weight(each) * each[1] for each in losses) / sum(map(_weight, losses)),
            "sum": sum(each[1] for each in losses),
            "whole": losses[0][1],
        }
        for losses in known
    ]
    alike = {kind for kind in kinds if _near(totals[0][kind], totals[1][kind])}
    if len(known[0]) == 1 or not all(
        _same_on_all(line) for run in (first, other) for line in run.steps.values()
    ):
        alike.discard("whole")
    if "whole" in alike or not alike:
        return "whole" if alike else "other"
    # By chance, the other total may be almost the same as well.
    return min(
        sorted(alike), key=lambda kind: abs(totals[0][kind] - totals[1][kind]) / abs(totals[0][kind] or 1.0)
    )


def _same_on_all(lines: Mapping[int, Line]) -> bool:
    """Whether all losses of a step are the same."""
    losses = [each[1] for line in lines.values() for each in line["losses"] if each[0]]
    return all(_near(each, losses[0]) for each in losses)


def _weight(loss: list[Any]) -> float:
    return loss[3] if loss[3] is not None else loss[0]


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= SAME_LOSS * max(abs(one), abs(other))
