"""The change to the script that balances it: as a diff of its own lines if they are recognized, else as lines for the
form of loop that the doctor saw, in which ``ddp``, ``dataset`` and the like stand for the script's own names.
"""

from __future__ import annotations

from paceline import policies
from paceline.doctor.patch import patched
from paceline.doctor.spent import Loop
from paceline.rounds import Cluster

DEFAULTS = (
    "level",
    "auto",
)  # auto is the default, and plans as level does where a micro-step is a whole round
WIDTH = 76  # of a line
ADAPTERS = {  # of each framework: what balances it, and how that is made; docs/hosts.md has the other lines
    "lightning": ("LightningBalancer", "balanced = LightningBalancer({options})"),
    "fabric": ("FabricPace", "pace = FabricPace(fabric, model, {options})"),
    "accelerate": ("AcceleratePace", "pace = AcceleratePace(accelerator, model, {options})"),
    "transformers": ("BalancedTrainer", "trainer = BalancedTrainer(model=model, args=args, ...)"),
    "ray_train": ("RayTrainPace", "pace = RayTrainPace(model, {options})"),
}
OWN_LOOP = ("", "fabric", "accelerate", "ray_train")  # those that leave the loop to the script


def diff(loop: Loop, ranks: int, policy: str) -> list[str]:
    """A unified diff, which begins with "---"; or lines that begin with "+ ", "- " or two blanks.

    policy: the one to take, of those that were forecast.
    """
    options = [f"global_batch={loop.batch}" if loop.sure else f"global_batch={ranks} * batch_size"]
    if policy not in DEFAULTS:
        options.append(f'policy="{policy}"')
    micro = loop.micro_batch(ranks)
    rounds = micro is not None or moves_work(policy)
    own = loop.loader is None or loop.loader["stream"]
    kind = ADAPTERS[loop.host][0] if loop.host else ""
    if loop.host in OWN_LOOP and loop.sure and not (own or micro or loop.others):
        whole = f"paceline.hosts.{loop.host}.{kind}" if kind else "paceline.torch.Pace"
        if lines := patched(loop, whole, ", ".join(options)):
            return lines
    if loop.host:
        made = ADAPTERS[loop.host][1].format(options=", ".join(options))
        return [f"+ from paceline.hosts.{loop.host} import {kind}", *_broken(made)]
    if rounds:
        options.append('loop="round"')
    if micro is not None:
        options.append(f"micro_batch={micro}")
    body = _own(loop, rounds) if own else _loader(loop, rounds)
    return [
        "+ import paceline.torch",
        *_broken(f"pace = paceline.torch.Pace(ddp, {', '.join(options)})"),
        *body,
    ]


def moves_work(policy: str) -> bool:
    """Whether it moves work between the ranks within the round, for which a loop must run rounds in pieces."""
    plan, _ = policies.create(policy, Cluster(2, 64)).init()
    return plan.piece_plan is not None


def _broken(call: str) -> list[str]:
    """A line that makes a Pace, on several where it is long."""
    if len(call) <= WIDTH - 2:
        return [f"+ {call}"]
    first, rest = call.split("(", 1)
    return [f"+ {first}(", *(f"+     {each}," for each in rest.removesuffix(")").split(", ")), "+ )"]


def _loader(loop: Loop, rounds: bool) -> list[str]:
    made = [
        "- loader = DataLoader(dataset, sampler=DistributedSampler(dataset), ...)",
        "+ loader = pace.loader(dataset, seed=0)",
    ]
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
