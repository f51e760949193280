"""Every form of loop keeps its meaning: the model of one process, or a sentence, never a wrong step in silence."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.torch import Pace
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.often import THOROUGH
from support.ranks import gathered, run_cases, run_ranks
from support.small_net import UNEVEN, Net, Samples, difference, fresh

pytestmark = pytest.mark.processes

LOOSE = ((1, None),) * 3
FORMS = ("whole", "round", "pieces", "own whole", "own round", "own pieces")
EXTRAS: dict[str, dict[str, Any]] = {
    "zeroed at the top": {"zero": "top"},
    "zeroed in place at the top": {"zero": "top, in place"},
    "zeroed at the bottom": {"zero": "bottom"},
    "clipped": {"clip": True, "zero": "top"},
    "scaled": {"scaled": True},
    "scaled and clipped": {"scaled": True, "clip": True},
    "scheduled": {"schedule": True},
    "two optimizers": {"two": True, "zero": "top"},
    "two optimizers, scaled": {"two": True, "scaled": True},
    "bucket views": {"views": True, "zero": "top"},
    "hook": {"weigh": "hook", "zero": "top"},
    "hook, bucket views": {"weigh": "hook", "views": True, "zero": "bottom"},
}
POLICIES = {"equal": "equal", "level": "level", "auto": "auto", "dolbie": "dolbie", "uneven": UNEVEN}


def _cases() -> dict[str, dict[str, Any]]:
    """Each form with each extra; the policies, and accumulation where the form takes it, take turns.

    Where ``THOROUGH``, each extra with and without accumulation."""
    cases, micro_step = {}, itertools.cycle(POLICIES.items())
    for (at, form), (number, (extra, options)) in itertools.product(
        enumerate(FORMS), enumerate(EXTRAS.items())
    ):
        if "hook" in extra and form.endswith("round"):
            continue  # pace.round runs the backward pass itself
        either = (False, True) if THOROUGH else ((at + number) % 2 == 1,)
        for accumulates in either if not form.endswith("whole") else (False,):
            policy, chosen = next(micro_step)
            if "hook" in extra and form == "own pieces":
                policy, chosen = "level", "level"
            case = {"form": form, "policy": chosen, "limits": LOOSE, **options}
            if accumulates:
                case["micro_batch"] = 7
            cases[f"{form}, {extra}, {policy}, {'accumulates' if accumulates else 'whole'}"] = case
    return cases


COUNT, BATCH, DRAWS = 115, 48, 6


class Program:
    """What a user's script has beside Paceline: a model, optimizers, schedulers, a loss."""

    def __init__(self, model: Net, two: bool) -> None:
        self.model = model
        groups = [model.first.parameters(), model.second.parameters()] if two else [model.parameters()]
        self.optimizers = [torch.optim.SGD(group, lr=0.1, momentum=0.9) for group in groups]
        self.schedulers = [
            torch.optim.lr_scheduler.LambdaLR(one, lambda step: 0.9**step) for one in self.optimizers
        ]
        self.loss_of = nn.CrossEntropyLoss()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)

    def zero(self, to_none: bool) -> None:
        for one in self.optimizers:
            one.zero_grad(set_to_none=to_none)


def one_process(rounds: list[list[int]], two: bool, clip: bool, schedule: bool) -> list[torch.Tensor]:
    """The parameters after these batches of sample indices."""
    program, data = Program(fresh(torch.float64), two), Samples(COUNT)
    for indices in rounds:
        chosen = torch.tensor(indices)
        program.zero(True)
        program.loss_of(program.model(data.x[chosen]), data.y[chosen]).backward()
        if clip:
            program.clip()
        for one in program.optimizers:
            one.step()
        if schedule:
            for each in program.schedulers:
                each.step()
    return [p.detach() for p in program.model.parameters()]


def trained(
    rank: int,
    ranks: int,
    form: str = "whole",
    zero: str = "",
    clip: bool = False,
    scaled: bool = False,
    schedule: bool = False,
    two: bool = False,
    leave_after: int = 0,
    views: bool = False,
    **options: Any,
) -> tuple[float, int, int]:
    """The largest relative difference from one process, the micro-steps, and the rounds."""
    own, loop = form.startswith("own "), form.removeprefix("own ")
    program, data = Program(fresh(torch.float64), two), Samples(COUNT)
    ddp = DistributedDataParallel(program.model, gradient_as_bucket_view=views)
    pace = Pace(ddp, BATCH, loop=loop, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if scaled else None
    stalls, draws = random.Random(rank), random.Random(100 + rank)
    used: list[list[int]] = []
    micro_steps = 0

    def loss_of(x: torch.Tensor, y: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        time.sleep(4e-4 * stalls.expovariate(1.0))
        if pace.host.first:
            used.append([])
        if pace.counts:
            used[-1] += index.tolist()
        return program.loss_of(ddp(x), y)

    def drawn(size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        index = torch.tensor([draws.randrange(COUNT) for _ in range(size)])
        return data.x[index], data.y[index], index

    source = _draws(pace) if own else _epochs(pace, data)
    for batch in source:
        micro_steps += 1
        if zero == "top":
            program.zero(True)
        if zero == "top, in place":
            program.zero(False)
        if loop == "round":
            pace.round(batch, lambda *parts: loss_of(*(drawn(*parts) if own else parts)), scaler=scaler)
        else:
            loss = loss_of(*(drawn(batch) if own else batch))
            if pace.host.terms.weigh == "hook":
                loss.backward()
            else:
                pace.backward(loss, scaler=scaler)
        if clip:
            if scaler is not None and pace.complete:
                for one in program.optimizers:
                    scaler.unscale_(one)
            program.clip()
        if two and scaler is None:
            stepped = all(pace.step(one) for one in program.optimizers)
        else:
            stepped = pace.step(program.optimizers if two else program.optimizers[0], scaler)
        if schedule and (stepped or loop != "pieces"):
            for each in program.schedulers:
                each.step()
        if zero == "bottom":
            program.zero(True)
        if leave_after and micro_steps == leave_after:
            source.close()
            source = _epochs(pace, data)
            for again in source:
                pace.backward(loss_of(*again))
                pace.step(program.optimizers[0])
            break
    rounds = pace.rounds
    pace.host.detach()
    whole = [list(chain.from_iterable(parts)) for parts in zip(*gathered(used), strict=True)]
    expected = one_process(whole, two, clip, schedule)
    return difference(program.model.parameters(), expected), micro_steps, rounds


def _epochs(pace: Pace, data: Samples) -> Any:
    loader = pace.loader(data, seed=5)
    for _ in range(2):
        yield from loader


def _draws(pace: Pace) -> Any:
    if pace.host.terms.loop == "pieces":  # a round's micro-steps, then a step behind them
        for _ in range(DRAWS):
            yield from pace.sizes(1)
    else:
        yield from pace.sizes(DRAWS)


@guarantee(
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop."
)
def test_every_form_of_loop_trains_the_model_of_one_process() -> None:
    cases = _cases()
    found = run_cases(3, trained, cases)
    for name, case in cases.items():
        for far, micro_steps, rounds in found[name]:
            assert far < 1e-12, f"{name}: relative difference {far:.1e}"
            assert rounds == (DRAWS if case["form"].startswith("own") else 6), name
            assert micro_steps == rounds or case["form"].endswith("pieces"), name
    assert any(micro_steps > rounds for each in found.values() for _, micro_steps, rounds in each), (
        "no round took several micro-steps"
    )


MUTABLE = {
    "whole": [
        "optimizer.zero_grad()",
        "loss = loss_of(ddp(x), y)",
        "pace.backward(loss)",
        "clip()",
        "pace.step(optimizer)",
        "scheduler.step()",
    ],
    "round": [
        "optimizer.zero_grad()",
        "loss = pace.round(batch, lambda x, y: loss_of(ddp(x), y))",
        "clip()",
        "pace.step(optimizer)",
        "scheduler.step()",
    ],
    "pieces": [
        "optimizer.zero_grad()",
        "loss = loss_of(ddp(x), y)",
        "pace.backward(loss)",
        "clip()",
        "stepped = pace.step(optimizer)",
        "scheduler.step() if stepped else None",
    ],
}
INSTEAD = {
    "pace.backward(loss)": ["loss.backward()", "(2 * loss).backward()", "pace.host.weight(loss)",
                            "pace.host.backward_done()"],
    "pace.step(optimizer)": ["optimizer.step()", "optimizer.step(); pace.step(optimizer)",
                             "pace.step(optimizer); optimizer.step()"],
    "stepped = pace.step(optimizer)": ["optimizer.step()", "stepped = None; optimizer.step(); pace.step(optimizer)"],
    "optimizer.zero_grad()": ["optimizer.zero_grad(set_to_none=False)", "ddp.zero_grad()",
                              "ddp.module.zero_grad(set_to_none=False)"],
    "loss = pace.round(batch, lambda x, y: loss_of(ddp(x), y))": [
        "loss = [pace.backward(loss_of(ddp(x), y)) for x, y in [batch]]",
        "loss = pace.round(batch, lambda x, y: loss_of(ddp(x), y).backward())",
    ],
}  # fmt: skip


def mutilations(form: str) -> dict[str, list[str]]:
    """Right loop bodies with a line left out, doubled, swapped with another or replaced, by what was done."""
    lines = MUTABLE[form]
    found: dict[str, list[str]] = {}
    for at, line in enumerate(lines):
        found[f"without {line}"] = lines[:at] + lines[at + 1 :]
        found[f"twice {line}"] = [*lines[: at + 1], *lines[at:]]
        for other in range(at + 1, len(lines)):
            swapped = list(lines)
            swapped[at], swapped[other] = lines[other], line
            found[f"{line} changed with {lines[other]}"] = swapped
        for instead in INSTEAD.get(line, []):
            found[f"{instead} instead of {line}"] = [*lines[:at], instead, *lines[at + 1 :]]
    return found


def mutilated(rank: int, ranks: int, form: str, policy: str, whole: bool) -> dict[str, Any]:
    """For each mutilation: the parameters after an epoch, or the words of an error.

    whole: run by one process without Paceline, which stands for what the loop means.
    """
    return {name: _mutilated(form, policy, body, whole) for name, body in mutilations(form).items()}


class Plain:
    """What Paceline's calls mean in one process that takes whole batches."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def round(self, batch: Any, function: Callable[..., torch.Tensor]) -> torch.Tensor:
        loss = function(*batch)
        loss.backward()
        return loss.detach()

    def step(self, optimizer: torch.optim.Optimizer) -> bool:
        optimizer.step()
        optimizer.zero_grad()
        return True


class Pairs(Samples):
    """Without the index."""

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def _mutilated(form: str, policy: str, body: list[str], whole: bool) -> Any:
    data, model = Pairs(100), fresh(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    names: dict[str, Any] = {
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
        "loss_of": nn.CrossEntropyLoss(),
        "clip": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
        "stepped": True,
    }
    pace: Any
    if whole:
        order = torch.from_numpy(Order(100, 5).epoch(0))
        pace, ddp = Plain(), nn.ModuleDict({"module": model})
        ddp.forward = model.forward
        loader: Any = [(data.x[c], data.y[c]) for c in order.split(24)]
    else:
        ddp = DistributedDataParallel(model)
        pace = Pace(ddp, 24, policy, loop=form, micro_batch=None if form == "whole" else 5)
        loader = pace.loader(data, seed=5)
    names |= {"pace": pace, "ddp": ddp}
    code = compile("\n".join(body), "body", "exec")
    try:
        for batch in loader:
            names["batch"] = batch
            if form != "round":
                names["x"], names["y"] = batch
            exec(code, names)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if not whole:
            pace.host.abandon()
            pace.host.detach()
    return [p.detach().tolist() for p in model.parameters()]


@guarantee(
    "A loop with a line left out, doubled, swapped or replaced (101 cases) trains the same model or raises "
    "before the step."
)
@pytest.mark.parametrize(
    ("policy", "form"),
    [
        ("equal", "round"),
        ("auto", "whole"),
        ("auto", "pieces"),
        pytest.param("equal", "whole", marks=pytest.mark.nightly),
        pytest.param("equal", "pieces", marks=pytest.mark.nightly),
        pytest.param("auto", "round", marks=pytest.mark.nightly),
    ],
)
def test_mutilated_loop_trains_what_it_says_or_raises(form: str, policy: str) -> None:
    (meant,) = run_ranks(1, mutilated, form, policy, True)
    found = run_ranks(2, mutilated, form, policy, False)
    assert len(mutilations(form)) > 20
    refused = 0
    for name, right in meant.items():
        for rank in found:
            if isinstance(rank[name], str):
                refused += 1
                continue
            assert not isinstance(right, str), f"{name}: went on, where one process says {right}"
            for ours, theirs in zip(rank[name], right, strict=True):
                torch.testing.assert_close(
                    torch.tensor(ours),
                    torch.tensor(theirs),
                    rtol=1e-10,
                    atol=1e-12,
                    msg=lambda m, name=name: f"{name}: {m}",
                )
    assert 0 < refused < 2 * len(meant)


def test_loop_left_between_rounds_continues_with_the_next_epoch() -> None:
    cases = {str(rounds): {"leave_after": rounds, "policy": UNEVEN} for rounds in range(1, 4)}
    for left, ranks in run_cases(3, trained, cases).items():
        for far, _, rounds in ranks:
            assert far < 1e-12
            assert rounds == int(left) + 2 * -(-COUNT // 48)
