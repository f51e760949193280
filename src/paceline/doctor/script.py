"""The change to the script that balances it, as a diff: for the form of loop that the doctor saw."""

from __future__ import annotations

from paceline import policies
from paceline.doctor.spent import Loop
from paceline.rounds import Cluster

DEFAULTS = (
    "level",
    "auto",
)  # the default is auto; where a micro-step is a whole round it plans as level does
WIDTH = 76  # of a line
LOADER = "+ loader = pace.loader(dataset, seed=0)"
STEP = ("- optimizer.step()", "+ pace.step(optimizer)")
ADAPTERS = {
    "lightning": (
        "+ from paceline.hosts.lightning import LightningBalancer",
        "+ balanced = LightningBalancer({options})",
        "- trainer = L.Trainer(...)",
        "+ trainer = L.Trainer(..., callbacks=[balanced])",
        "- trainer.fit(model, DataLoader(dataset, ...))",
        "+ trainer.fit(model, balanced.loader(dataset, seed=0))",
    ),
    "fabric": (
        "+ from paceline.hosts.fabric import FabricPace",
        "+ pace = FabricPace(fabric, model, {options})",
        "- loader = fabric.setup_dataloaders(DataLoader(dataset, ...))",
        LOADER,
        "- fabric.backward(loss)",
        "+ pace.backward(loss)",
        *STEP,
    ),
    "accelerate": (
        "+ from paceline.hosts.accelerate import AcceleratePace",
        "+ pace = AcceleratePace(",
        "+     accelerator, model, {options}",
        "+ )",
        "- loader = accelerator.prepare(DataLoader(dataset, ...))",
        LOADER,
        "- accelerator.backward(loss)",
        "+ pace.backward(loss)",
    ),
    "transformers": (
        "+ from paceline.hosts.transformers import BalancedTrainer",
        "- trainer = Trainer(model=model, args=args, ...)",
        "+ trainer = BalancedTrainer(model=model, args=args, ...)",
    ),
    "ray_train": (
        "+ from paceline.hosts.ray_train import RayTrainPace",
        "+ pace = RayTrainPace(model, {options})",
        "- loader = ray.train.torch.prepare_data_loader(DataLoader(dataset, ...))",
        LOADER,
        "- loss.backward()",
        "+ pace.backward(loss)",
        *STEP,
    ),
}


def diff(loop: Loop, ranks: int, policy: str) -> list[str]:
    """Lines that begin with "+ ", "- " or two blanks; names as ``ddp`` and ``dataset`` stand for the script's own.

    policy: the one to take, of those that were forecast.
    """
    options = [f"global_batch={loop.batch}" if loop.sure else f"global_batch={ranks} * batch_size"]
    if policy not in DEFAULTS:
        options.append(f'policy="{policy}"')
    if loop.host:
        return [line.format(options=", ".join(options)) for line in ADAPTERS[loop.host]]
    micro = loop.micro_batch(ranks)
    rounds = micro is not None or moves_work(policy)
    if rounds:
        options.append('loop="round"')
    if micro is not None:
        options.append(f"micro_batch={micro}")
    own = loop.loader is None or loop.loader["stream"]
    body = _own(loop, rounds) if own else _loader(loop, rounds)
    return ["+ import paceline.torch", *_made(options), *body]


def moves_work(policy: str) -> bool:
    """Whether it moves work between the ranks within the round, for which a loop must run rounds in pieces."""
    plan, _ = policies.create(policy, Cluster(2, 64)).init()
    return plan.piece_plan is not None


def _made(options: list[str]) -> list[str]:
    """The line that makes the Pace, on several where it is long."""
    line = f"+ pace = paceline.torch.Pace(ddp, {', '.join(options)})"
    if len(line) <= WIDTH:
        return [line]
    return ["+ pace = paceline.torch.Pace(", "+     ddp,", *(f"+     {each}," for each in options), "+ )"]


def _loader(loop: Loop, rounds: bool) -> list[str]:
    made = ["- loader = DataLoader(dataset, sampler=DistributedSampler(dataset), ...)", LOADER]
    if not rounds:
        return [*made, "  for x, y in loader:", *_steps()]
    return [
        *made,
        f"- for x, y in loader:{_passes(loop)}",
        "+ for batch in loader:  # a whole step, run in pieces",
        "+     loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))",
        "-     optimizer.step()",
        "+     pace.step(optimizer)",
    ]


def _own(loop: Loop, rounds: bool) -> list[str]:
    drawn, sized = (
        ("next(stream)", "take(stream, size)") if loop.loader else ("get_batch()", "get_batch(size)")
    )
    if not rounds:
        return [
            "- for step in range(steps):",
            f"-     x, y = {drawn}",
            "+ for size in pace.sizes(steps):",
            f"+     x, y = {sized}  # so many samples, on this rank",
            *_steps(),
        ]
    return [
        "+ def loss_of(size):  # of one piece",
        f"+     x, y = {sized}",
        "+     return criterion(ddp(x), y)",
        f"- for step in range(steps):{_passes(loop)}",
        "+ for micro_step in pace.sizes(steps):  # a whole step, run in pieces",
        "+     loss = pace.round(micro_step, loss_of)",
        "-     optimizer.step()",
        "+     pace.step(optimizer)",
    ]


def _passes(loop: Loop) -> str:
    return f"  # {loop.backwards} backward passes a step" if loop.backwards > 1 else ""


def _steps() -> list[str]:
    return [
        "      loss = criterion(ddp(x), y)",
        "-     loss.backward()",
        "+     pace.backward(loss)",
        "-     optimizer.step()",
        "+     pace.step(optimizer)",
    ]
