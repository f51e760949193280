"""``paceline train``: train a model on uneven workers, under one policy or several in turn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli import beginning, interrupts
from paceline.cli.options import fields, limits, numbers
from paceline.cli.output import outlive_reader
from paceline.errors import PacelineError

DATA, BALANCING, SLOWNESS = "Data and training", "Balancing", "Played slowness"
CHECKPOINTS, RAY = "Run directory and checkpoints", "With --engine ray"
LOST = "Workers that are lost or join"


def command(
    data: Annotated[
        str, typer.Option(help="digits, a .npz file, or a directory of IDX files.", rich_help_panel=DATA)
    ] = "digits",
    model: Annotated[
        str, typer.Option(help="mlp, cnn, lenet5, resnet18 or vgg16.", rich_help_panel=DATA)
    ] = "mlp",
    workers: Annotated[int, typer.Option(help="Local worker processes (under torchrun: its own).")] = 4,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Who does how much: NAME or NAME:key=value,...; default auto, with ray level.",
            rich_help_panel=BALANCING,
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Train once under each of these policies: a,b,...",
            rich_help_panel=BALANCING,
        ),
    ] = None,
    global_batch: Annotated[
        int, typer.Option(help="Samples per optimizer step, over all workers.", rich_help_panel=DATA)
    ] = 256,
    epochs: Annotated[int, typer.Option(help="Times through the training set.", rich_help_panel=DATA)] = 2,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps, instead of --epochs.", rich_help_panel=DATA)
    ] = None,
    slowdown: Annotated[
        str | None, typer.Option(help="Slow workers down by these factors: 1,1,1,4", rich_help_panel=SLOWNESS)
    ] = None,
    slowdown_ms: Annotated[
        str | None,
        typer.Option(help="Sleep these milliseconds for each sample: 1,1,4", rich_help_panel=SLOWNESS),
    ] = None,
    slowdown_trace: Annotated[
        str | None,
        typer.Option(
            help="Play speeds from a CSV file: round,worker,seconds_per_sample,overhead_seconds",
            rich_help_panel=SLOWNESS,
        ),
    ] = None,
    limits_: Annotated[
        str | None,
        typer.Option(
            "--limits",
            help="Least and most samples of each worker: 1:64,1:64,:",
            rich_help_panel=BALANCING,
        ),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Samples that fit into a worker's memory.", rich_help_panel=BALANCING)
    ] = None,
    quantum: Annotated[
        int, typer.Option(help="Loads are multiples of this many samples.", rich_help_panel=BALANCING)
    ] = 1,
    weigh: Annotated[
        str,
        typer.Option(help="Weight gradients through the loss, or in DDP's hook.", rich_help_panel=BALANCING),
    ] = "loss",
    loader_workers: Annotated[
        int, typer.Option(help="Prefetching processes of each worker.", rich_help_panel=DATA)
    ] = 0,
    lr: Annotated[float, typer.Option(help="Learning rate.", rich_help_panel=DATA)] = 0.1,
    momentum: Annotated[float, typer.Option(help="Momentum.", rich_help_panel=DATA)] = 0.9,
    seed: Annotated[
        int, typer.Option(help="For the weights and the order of the samples.", rich_help_panel=DATA)
    ] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(help="Steps between checkpoints.", rich_help_panel=CHECKPOINTS)
    ] = 100,
    out: Annotated[
        str | None, typer.Option(help="Run directory; default runs/NAME.", rich_help_panel=CHECKPOINTS)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(help="Go on with this run from its last checkpoint.", rich_help_panel=CHECKPOINTS),
    ] = None,
    json_: Annotated[
        str | None, typer.Option("--json", help="Write the figures to this file, - for stdout.")
    ] = None,
    port: Annotated[int, typer.Option(help="Where local workers meet; 0 takes any free port.")] = 0,
    tensorboard: Annotated[bool, typer.Option(help="Also write TensorBoard scalars.")] = False,
    patience: Annotated[
        float,
        typer.Option(
            help="Seconds without a sign of life from a worker after which the run is ended, where it is not elastic "
            "or has not begun."
        ),
    ] = 30.0,
    elastic: Annotated[
        bool | None,
        typer.Option(
            "--elastic/--no-elastic",
            help="Go on when a worker is killed, freezes, leaves (SIGTERM) or joins, and lose no sample; "
            "default: wherever the run can.",
            rich_help_panel=LOST,
        ),
    ] = None,
    max_restarts: Annotated[
        int | None,
        typer.Option(help="Workers started in place of lost ones; default 3.", rich_help_panel=LOST),
    ] = None,
    dead_after: Annotated[
        float | None,
        typer.Option(
            help="Seconds without a sign of life until a worker counts as lost, ten times as many for one "
            "that has work (Linux); default 1.",
            rich_help_panel=LOST,
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help="torch (DDP), or ray (a parameter server).", rich_help_panel=RAY)
    ] = "torch",
    sync: Annotated[
        str,
        typer.Option(help="With ray, when parameters move: bsp, asp, ssp:10, lsp:3:5.", rich_help_panel=RAY),
    ] = "bsp",
    backup: Annotated[
        str,
        typer.Option(
            help="With ray, how many gradients to wait for: everyone, static:3, dbw, ...", rich_help_panel=RAY
        ),
    ] = "everyone",
    mode: Annotated[
        str, typer.Option(help="With ray: push-wait, push-interrupt or pull.", rich_help_panel=RAY)
    ] = "push-wait",
    rate: Annotated[
        str,
        typer.Option(
            help="With ray, the learning rate for k gradients: fixed, proportional, adascale.",
            rich_help_panel=RAY,
        ),
    ] = "fixed",
    address: Annotated[
        str | None, typer.Option(help="With ray: HOST:PORT of a standing cluster.", rich_help_panel=RAY)
    ] = None,
) -> None:
    """Train a model on uneven workers, at the pace of them all.

    For example: paceline train --slowdown 1,1,1,4 --compare equal,level
    """
    outlive_reader()
    if resume is not None and (compare is not None or out is not None):
        raise PacelineError(
            "--resume goes on with one run in its own directory; leave out --compare and --out"
        )
    if max_restarts is not None or dead_after is not None:
        if elastic is False:
            option = "--max-restarts" if max_restarts is not None else "--dead-after"
            raise PacelineError(
                f"{option} says how a run goes on without lost workers; leave it out, or --no-elastic"
            )
        elastic = True  # who says how wants it
    if policy is None:
        policy = "level" if engine == "ray" else "auto"
    chosen = fields(compare) if compare is not None else [policy]
    place = Path(resume) if resume is not None else beginning.place(out, data, model, chosen)
    with beginning.loading("Loading PyTorch ..."):
        try:
            from paceline.train.config import TrainConfig
        except ModuleNotFoundError as error:
            raise PacelineError(f"{error.name} is not installed; install paceline[torch]") from error
        from paceline.cli.training import Session, launched_ranks

    given = {"elastic": elastic, "max_restarts": max_restarts, "dead_after": dead_after}
    asked = {name: value for name, value in given.items() if value is not None}
    ranks = launched_ranks()
    config = TrainConfig(
        data=data,
        model=model,
        workers=workers if ranks is None else ranks,
        policy=policy,
        global_batch=global_batch,
        epochs=epochs,
        steps=steps,
        lr=lr,
        momentum=momentum,
        seed=seed,
        slowdown=numbers(slowdown, "--slowdown"),
        slowdown_ms=numbers(slowdown_ms, "--slowdown-ms"),
        slowdown_trace=slowdown_trace,
        limits=limits(limits_),
        micro_batch=micro_batch,
        quantum=quantum,
        weigh=weigh,
        loader_workers=loader_workers,
        checkpoint_every=checkpoint_every,
        tensorboard=tensorboard,
        engine=engine,
        sync=sync,
        backup=backup,
        mode=mode,
        rate=rate,
        address=address,
        patience=patience,
        **asked,  # type: ignore[arg-type]
    )
    # The other ranks under torchrun have nothing to write: they end at once, even where they wait for others.
    with interrupts.heard(beginning.leads()) as interrupted:
        session = Session(json_, tensorboard, interrupted)
        if resume is not None:
            session.resume(place, port, steps, asked)
            return
        results: list[dict[str, Any]] = session.train(config, chosen, place, port)
        if json_ is not None:
            session.write_json(results if compare is not None else results[0])
