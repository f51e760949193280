"""Which options of ``Pace`` go together."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.errors import PacelineError

LOOPS = ("whole", "round", "pieces")


def check_loop(loop: str, deterministic: bool) -> None:
    """Raises PacelineError for a form of the training loop that is none, or that cannot run pieces where it must."""
    if loop not in LOOPS:
        raise PacelineError(f"loop={loop!r}: expected one of {', '.join(map(repr, LOOPS))}")
    if deterministic and loop == "whole":
        raise PacelineError(
            "deterministic=True runs each round in many small pieces, and loop='whole' takes it in one turn; "
            "use loop='round' and pace.round(batch, function), or loop='pieces'"
        )


def check_room(most: Sequence[int], global_batch: int, loop: str) -> None:
    """Raises PacelineError where one turn of the loop on each rank cannot hold the batch.

    most: samples that each rank may take in a round.
    """
    if loop == "whole" and sum(most) < global_batch:
        raise PacelineError(
            f"micro_batch and limits leave room for {sum(most)} samples on {len(most)} ranks, and the global batch "
            f"has {global_batch}; in this loop each rank runs its part of a round at once: use loop='round' and "
            "pace.round(batch, function), which accumulates, or a smaller global_batch"
        )


def check_weigh(weigh: str, turns: int | None) -> None:
    """Raises PacelineError for a way of weighing that is none, or that a fixed number of turns rules out."""
    if weigh not in ("loss", "hook"):
        raise PacelineError(f"weigh={weigh!r}: expected 'loss' or 'hook'")
    if turns is not None and (turns < 1 or weigh == "hook"):
        raise PacelineError(f"turns={turns}, weigh={weigh!r}: expected at least one turn, and weigh='loss'")


def check_pieces(
    policy: str, moves_work: bool, *, loop: str, turns: int | None, in_step: bool, fills: bool, weigh: str
) -> None:
    """Raises PacelineError where rounds cannot be run in pieces, as the policy would have it (``moves_work``).

    in_step: every rank must run as many turns. fills: a turn with nothing to do gets samples all the same.
    """
    if moves_work and turns is None and not in_step and loop == "whole":
        raise PacelineError(
            f"policy {policy} moves work within the round, and loop='whole' takes each round in one turn; use "
            "loop='round' and pace.round(batch, function), or a policy that plans whole rounds, such as level"
        )
    if moves_work and (turns is not None or in_step):
        raise PacelineError(
            f"policy {policy} moves work within the round, so ranks take unlike numbers of turns, and "
            f"{'turns=' + str(turns) if turns is not None else 'FSDP'} needs as many on each; "
            "use a policy that plans whole rounds, such as level"
        )
    if moves_work and fills and weigh == "hook":
        raise PacelineError(
            f"policy {policy} with weigh='hook': a rank's last turn in a round may be one that counts for "
            "nothing, and the hook cannot leave its gradient out of what it claimed before; use weigh='loss'"
        )


def check_deterministic(
    policy: str, moves_work: bool, *, weigh: str, norms: bool, micro_batch: int | None, cell: int
) -> None:
    """Raises PacelineError where results cannot have the same bits whoever runs what.

    norms: the model has batch norm. cell: samples of every turn.
    """
    wrong = (
        f"policy {policy} does not move work within the round; use factoring or auto"
        if not moves_work
        else "weigh='hook' leaves the sum to DDP; use weigh='loss'"
        if weigh == "hook"
        else "the model has batch norm, whose running statistics depend on who runs what; use another norm"
        if norms
        else f"micro_batch={micro_batch} holds no cell of {cell} samples; set a smaller quantum"
        if micro_batch is not None and micro_batch < cell
        else ""
    )
    if wrong:
        raise PacelineError(f"deterministic=True: {wrong}")
