"""The change to a training script that balances it.

It is a unified diff of the script if its form is recognized (``paceline.doctor.patch``). Otherwise it is a list of
lines for the form of loop that the doctor saw, in which names such as ``ddp`` and ``dataset`` stand for the script's
own names, and a sentence says what was not found.
"""

from __future__ import annotations

from typing import NamedTuple

from paceline import policies
from paceline.doctor.patch import ADAPTERS, UnknownForm, patched
from paceline.doctor.phases import LoopForm
from paceline.rounds import Cluster

# auto is the default, and plans as level does if a micro-step is a whole round.
DEFAULTS = ("level", "auto")
WIDTH = 76  # characters of a line
LINES = {  # by framework: an adapter's lines in a script; docs/hosts.md says more
    "lightning": (
        "+ balanced = BalancedCallback({options})",
        "- trainer = Trainer(...)",
        "+ trainer = Trainer(..., callbacks=[balanced])",
        "- trainer.fit(module, loader)",
        "+ trainer.fit(module, balanced.loader(dataset, seed=0))",
    ),
    "fabric": (
        "  model, optimizer = fabric.setup(model, optimizer)",
        "+ pace = FabricPace(fabric, model, {options})",
        "- loader = fabric.setup_dataloaders(loader)",
        "+ loader = pace.loader(dataset, seed=0)",
        "- fabric.backward(loss)",
        "+ pace.backward(loss)",
        "- optimizer.step()",
        "+ pace.step(optimizer)",
    ),
    "accelerate": (
        "- model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
        "+ model, optimizer = accelerator.prepare(model, optimizer)",
        "+ pace = AcceleratePace(accelerator, model, {options})",
        "+ loader = pace.loader(dataset, seed=0)",
        "- accelerator.backward(loss)",
        "+ pace.backward(loss)",
    ),
    "transformers": (
        "- trainer = Trainer(model=model, args=args, ...)",
        "+ trainer = BalancedTrainer(model=model, args=args, ...)",
    ),
    "ray_train": (
        "+ pace = RayTrainPace(model, {options})",
        "- loader = ray.train.torch.prepare_data_loader(loader)",
        "+ loader = pace.loader(dataset, seed=0)",
        "- loss.backward()",
        "+ pace.backward(loss)",
        "- optimizer.step()",
        "+ pace.step(optimizer)",
    ),
}
STEPS = (
    "      loss = criterion(ddp(x), y)",
    "-     loss.backward()",
    "+     pace.backward(loss)",
    "-     optimizer.step()",
    "+     pace.step(optimizer)",
)


class Change(NamedTuple):
    """The change to a script. lines: a unified diff, which begins with "---", or lines that begin with "+ ", "- " or
    two blanks. missing: what a diff of the script needs and was not found, "" for a diff, or where none is tried."""

    lines: list[str]
    missing: str = ""


def diff(loop: LoopForm, ranks: int, policy: str) -> Change:
    """The change that balances the script by this policy."""
    passes = f" * {loop.backwards}" if loop.backwards > 1 else ""
    options = [f"global_batch={loop.batch}" if loop.sure else f"global_batch={ranks}{passes} * batch_size"]
    if policy not in DEFAULTS:
        options.append(f'policy="{policy}"')
    micro = loop.micro_batch(ranks)
    plan, _ = policies.create(policy, Cluster(2, 64)).init()
    rounds = micro is not None or plan.piece_plan is not None  # the policy moves work within the round
    own = loop.loader is None or loop.loader["stream"]
    missing = ""
    if loop.sure and not (own or micro or loop.others):
        try:
            return Change(patched(loop, options))
        except UnknownForm as error:
            missing = str(error)
    if loop.host:
        kind = ADAPTERS[loop.host]
        lines = [f"+ from paceline.hosts.{loop.host} import {kind}"]
        for line in LINES[loop.host]:
            filled = line.format(options=", ".join(options))
            lines += _broken(filled[2:]) if "{" in line else [filled]
        return Change(lines, missing)
    if rounds:
        options.append('loop="round"')
    if micro is not None:
        options.append(f"micro_batch={micro if loop.sure else 'batch_size'}")
    lines = _broken(f"pace = paceline.torch.Pace(ddp, {', '.join(options)})")
    return Change(["+ import paceline.torch", *lines, *(_own if own else _loader)(loop, rounds)], missing)


def _broken(call: str) -> list[str]:
    """The line that makes a Pace, broken into several lines if it is long."""
    if len(call) <= WIDTH - 2:
        return [f"+ {call}"]
    first, rest = call.split("(", 1)
    return [f"+ {first}(", *(f"+     {each}," for each in rest.removesuffix(")").split(", ")), "+ )"]


def _loader(loop: LoopForm, rounds: bool) -> list[str]:
    made = [
        "- loader = DataLoader(dataset, sampler=DistributedSampler(dataset), ...)",
        "+ loader = pace.loader(dataset, seed=0)",
    ]
    if not rounds:
        return [*made, "  for x, y in loader:", *STEPS]
    return [
        *made,
        f"- for x, y in loader:{_passes(loop)}",
        "+ for batch in loader:  # a whole step, run in pieces",
        "+     loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))",
        *STEPS[-2:],
    ]


def _own(loop: LoopForm, rounds: bool) -> list[str]:
    drawn = "next(stream)" if loop.loader else "get_batch()"
    sized = "take(stream, size)" if loop.loader else "get_batch(size)"
    if not rounds:
        return [
            "- for step in range(steps):",
            f"-     x, y = {drawn}",
            "+ for size in pace.sizes(steps):",
            f"+     x, y = {sized}  # this rank's samples",
            *STEPS,
        ]
    return [
        "+ def loss_of(size):  # of one piece",
        f"+     x, y = {sized}",
        "+     return criterion(ddp(x), y)",
        f"- for step in range(steps):{_passes(loop)}",
        "+ for micro_step in pace.sizes(steps):  # a whole step, run in pieces",
        "+     loss = pace.round(micro_step, loss_of)",
        *STEPS[-2:],
    ]


def _passes(loop: LoopForm) -> str:
    return f"  # {loop.backwards} backward passes a step" if loop.backwards > 1 else ""
