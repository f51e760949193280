"""The change to the script that balances it, as a diff: for the form of loop that the doctor saw."""

from __future__ import annotations

from paceline.doctor.spent import Loop

DEFAULTS = ("level", "auto")  # the default is auto, which plans as level does where that is as good
ADAPTERS = {
    "lightning": (
        "+ from paceline.hosts.lightning import Balanced",
        "+ balanced = Balanced({options})",
        "- trainer = L.Trainer(...)",
        "+ trainer = L.Trainer(..., callbacks=[balanced])",
        "- trainer.fit(model, DataLoader(dataset, ...))",
        "+ trainer.fit(model, balanced.loader(dataset, seed=0))",
    ),
    "fabric": (
        "+ from paceline.hosts.fabric import Balanced",
        "+ pace = Balanced(fabric, model, {options})",
        "- loader = fabric.setup_dataloaders(DataLoader(dataset, ...))",
        "+ loader = pace.loader(dataset, seed=0)",
        "- fabric.backward(loss)",
        "+ pace.backward(loss)",
        "- optimizer.step()",
        "+ pace.step(optimizer)",
    ),
    "accelerate": (
        "+ from paceline.hosts.accelerate import Balanced",
        "+ pace = Balanced(accelerator, model, {options})",
        "- loader = accelerator.prepare(DataLoader(dataset, ...))",
        "+ loader = pace.loader(dataset, seed=0)",
        "- accelerator.backward(loss)",
        "+ pace.backward(loss)",
    ),
    "transformers": (
        "+ from paceline.hosts.transformers import BalancedTrainer",
        "- trainer = Trainer(model=model, args=args, ...)",
        "+ trainer = BalancedTrainer(model=model, args=args, ...)",
    ),
    "ray_train": (
        "+ from paceline.hosts.ray_train import Balanced",
        "+ pace = Balanced(model, {options})",
        "- loader = ray.train.torch.prepare_data_loader(DataLoader(dataset, ...))",
        "+ loader = pace.loader(dataset, seed=0)",
        "- loss.backward()",
        "+ pace.backward(loss)",
        "- optimizer.step()",
        "+ pace.step(optimizer)",
    ),
}


def diff(loop: Loop, ranks: int, policy: str) -> list[str]:
    """Lines that begin with "+ ", "- " or two blanks; names as ``ddp`` and ``dataset`` stand for the script's own."""
    options = [f"global_batch={loop.batch}"]
    if policy not in DEFAULTS:
        options.append(f'policy="{policy}"')
    if loop.host:
        return [line.format(options=", ".join(options)) for line in ADAPTERS[loop.host]]
    micro = loop.micro_batch(ranks)
    own = loop.loader is None or loop.loader["stream"]
    if micro is not None and not own:
        options.append('loop="round"')
    if micro is not None:
        options.append(f"micro_batch={micro}")
    return ["+ import paceline.torch", *_made(options), *_loop(loop, own, micro is not None)]


def _made(options: list[str]) -> list[str]:
    """The line that makes the Pace, on several where it is long."""
    line = f"+ pace = paceline.torch.Pace(ddp, {', '.join(options)})"
    if len(line) <= 72:
        return [line]
    return ["+ pace = paceline.torch.Pace(", f"+     ddp, {', '.join(options)}", "+ )"]


def _loop(loop: Loop, own: bool, accumulates: bool) -> list[str]:
    if own:
        draws = "next(stream)" if loop.loader else "get_batch()"
        sized = "take(stream, size)" if loop.loader else "get_batch(size)"
        return [
            "- for step in range(steps):",
            f"-     x, y = {draws}",
            "+ for size in pace.sizes(steps):",
            f"+     x, y = {sized}  # so many samples, on this rank",
            *_steps(),
        ]
    loader = [
        "- loader = DataLoader(dataset, sampler=DistributedSampler(dataset), ...)",
        "+ loader = pace.loader(dataset, seed=0)",
    ]
    if accumulates:
        return [
            *loader,
            f"- for x, y in loader:  # {loop.backwards} backward passes, then optimizer.step()",
            "+ for batch in loader:  # a whole step, run in pieces of micro_batch",
            "+     loss = pace.round(batch, lambda x, y: criterion(ddp(x), y))",
            "+     pace.step(optimizer)",
        ]
    return [*loader, "  for x, y in loader:", *_steps()]


def _steps() -> list[str]:
    return [
        "      loss = criterion(ddp(x), y)",
        "-     loss.backward()",
        "+     pace.backward(loss)",
        "-     optimizer.step()",
        "+     pace.step(optimizer)",
    ]
