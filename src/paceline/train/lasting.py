"""Whether a run goes on when a worker is lost: asked for, refused, or decided by what else the run asks for."""

from __future__ import annotations

from paceline import policies
from paceline.errors import PacelineError
from paceline.rounds import Cluster
from paceline.train.config import TrainConfig

LEAST_SECONDS = 0.2  # of --dead-after: workers give a sign of life every tenth


def goes_on(config: TrainConfig, joined: bool = False) -> bool:
    """Whether the run goes on without a lost worker. joined: another launcher has started the workers.

    Without a word of the user's it does where it can, and where there is another worker to go on. Raises
    PacelineError where it was asked for and cannot.
    """
    wrong = hindrance(config, joined)
    if not wrong and not config.dead_after >= LEAST_SECONDS:
        raise PacelineError(
            f"--dead-after {config.dead_after:g}: expected --dead-after of at least {LEAST_SECONDS:g} seconds"
        )
    if config.elastic and wrong:
        raise PacelineError(f"--elastic is not possible here: {wrong}")
    if config.elastic is None:
        return not wrong and config.workers > 1
    return config.elastic


def warning(config: TrainConfig, joined: bool = False) -> str:
    """What a user who has said nothing of it is told where a lost worker ends the run; empty where there is nothing
    to tell."""
    if config.elastic is not None or config.workers == 1 or config.engine != "torch":
        return ""
    wrong = hindrance(config, joined)
    return f"A worker that is lost ends this run: {wrong}." if wrong else ""


def hindrance(config: TrainConfig, joined: bool = False) -> str:
    """Why the run cannot go on without a lost worker; empty where it can."""
    if config.engine != "torch":
        return "with --engine ray, a run goes on without lost workers by itself"
    if joined:
        return "torchrun has started its workers, and not the command itself"
    if config.weigh != "loss":
        return f"--weigh {config.weigh} leaves the sum to DDP, which needs every worker"
    if policies.create(config.policy, Cluster(config.workers, config.global_batch)).trains:
        return f"{config.policy} trains beside the rounds, and what it has learned cannot be handed over"
    return ""
