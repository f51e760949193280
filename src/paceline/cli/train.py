"""``paceline train``: train a model on uneven workers, under one policy or under several, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typer import Option

from paceline.cli import startup
from paceline.cli.options import fields, options_of
from paceline.cli.output import outlive_reader
from paceline.errors import PacelineError
from paceline.train.config import CHECKPOINTS, LOST, TrainConfig, dashed

# Options that may change when a run is resumed.
CHANGED = ("steps", "patience", "elastic", "max_restarts", "dead_after")


def more_help() -> str:
    """The policies, one line each, for the end of the help."""
    from paceline import policies

    real = [name for name in policies.names() if not policies.POLICIES[name].needs_upcoming]
    lines = [f"{name}: {policies.describe(name).rstrip('.')}." for name in real]
    return "\n\n".join(["The policies:", *lines])


@options_of(TrainConfig)
def command(
    *,
    compare: str | None = Option(
        None, help="Train once under each of these policies.", metavar="NAME,NAME,..."
    ),
    out: str | None = Option(None, help="A new directory for the run; default runs/NAME.", metavar="DIR"),
    resume: str | None = Option(None, help="Go on with this run from its last checkpoint.", metavar="DIR"),
    json_: str | None = Option(
        None,
        "--json",
        help="Write all figures; - for standard output.",
        metavar="FILE|-",
        rich_help_panel=CHECKPOINTS,
    ),
    port: int = Option(
        0,
        help="Port of the local workers' rendezvous; 0 takes any free one.",
        metavar="N",
        rich_help_panel=LOST,
    ),
    **given: Any,
) -> None:
    """Train a model on uneven workers, at the pace of all of them.

    For example: paceline train --slowdown 1,1,1,4 --compare equal,level
    """
    outlive_reader()
    if resume is not None and (compare is not None or out is not None):
        raise PacelineError(
            "--resume continues with one run in its own directory; leave out --compare and --out"
        )
    if resume is not None and (kept := next((name for name in given if name not in CHANGED), None)):
        raise PacelineError(f"--resume continues with the run's own options; leave out --{dashed(kept)}")
    if compare is not None and "policy" in given:
        raise PacelineError(
            f"--policy {given['policy']} and --compare {compare}: expected one of the two; name every policy in "
            "--compare"
        )
    for name in ("max_restarts", "dead_after"):
        if name not in given or given.get("engine") == "ray":  # which refuses them
            continue
        if given.setdefault("elastic", True) is False:  # these options imply --elastic
            raise PacelineError(
                f"--{dashed(name)} is for runs that continue without lost workers; leave it out, or --no-elastic"
            )
    if given.get("engine") == "ray":
        given.setdefault("policy", "level")
    config = TrainConfig(**given)
    chosen = fields(compare) if compare is not None else [config.policy]
    place = Path(resume) if resume is not None else startup.place(out, config.data, config.model, chosen)
    with startup.loading("Loading PyTorch ..."):
        from paceline.cli.training import Session

    # The other ranks under torchrun have nothing to write: they end at once, even while they wait for others.
    with startup.interruptible(startup.leads()) as interrupted:
        session = Session(json_, interrupted)
        if resume is not None:
            session.resume(place, port, {name: given[name] for name in CHANGED if name in given})
        else:
            session.train(config, chosen, place, port, listed=compare is not None)
