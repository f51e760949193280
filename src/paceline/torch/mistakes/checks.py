"""The checks of one loop for mistakes of its program: which ones it needs, and when they look."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from paceline.torch import peers
from paceline.torch.gradients.reducers import Reducer
from paceline.torch.mistakes import Check, Words
from paceline.torch.mistakes.collectives import CallsWithin, GatherSizes
from paceline.torch.mistakes.comparing import Comparisons
from paceline.torch.mistakes.foreign import ForeignPasses
from paceline.torch.mistakes.moving_averages import MovingAverages
from paceline.torch.mistakes.second import SecondModels
from paceline.torch.mistakes.suspects import COMPARES, LossWatch
from paceline.torch.plan import Piece
from paceline.torch.round import RoundState
from paceline.torch.terms import Terms


class Checks:
    """Passes the events of a loop on to each ``Check``, by its methods of the same names, while it looks at losses.

    Attributes:
        looks: A check looks at the losses of this iteration, so that ``weighs`` and ``steps`` must be called.
    """

    def __init__(self, checks: Sequence[Check]) -> None:
        self._all, self._looking, self.looks = checks, list[Check](), False

    def iteration(self, step: int) -> None:
        for check in self._all:
            check.iteration(step)
        self._looking, self.looks = list(self._all), True

    def weighs(
        self, loss: torch.Tensor | None, piece: Piece, reduction: str, count: float | None, first: bool
    ) -> None:
        self._looking = [
            check for check in self._looking if check.weighs(loss, piece, reduction, count, first)
        ]
        self.looks = bool(self._looking)

    def steps(self, piece: Piece) -> None:
        for check in self._looking:
            check.steps(piece)

    def known(self, what: str) -> None:
        for check in self._all:
            check.known(what)

    def close(self) -> None:
        for check in self._all:
            check.close()
        self._all, self._looking, self.looks = (), [], False


def checks_of(
    model: torch.nn.Module,
    parameters: Sequence[torch.nn.Parameter],
    reducer: Reducer,
    terms: Terms,
    round: RoundState,
    words: Callable[[], Words],
    changes: bool,
) -> Checks:
    """The checks of a loop. parameters: the model's that are summed. words: of its host. changes: the members of the
    run may change."""
    ranks, by_hook, local = peers.ranks(), terms.weigh == "hook", terms.merge is not None
    # Whether all ranks run a round in the same number of passes.
    alike = ranks == 1 or terms.lockstep or terms.fixed_micro_steps is not None
    checks = list[Check]()
    if not local:  # there each step's loss is a mean of its own, and weighs the same without Paceline
        trained = [p for p in parameters if p.requires_grad]
        # FSDP2 gathers parameters in hooks of the outputs, so no rank may run a pass of its own.
        comparisons = None if terms.lockstep else Comparisons()
        checks.append(LossWatch(lambda: round.piece, ranks, by_hook, trained, words, comparisons))
        if terms.policy == "equal":  # divides each batch as plain DDP does, but for its remainder
            checks[-1].known(COMPARES)
        if not by_hook:  # the hook weights every pass
            inner = model if reducer.ddp is None else reducer.ddp.module
            checks.append(ForeignPasses(inner, parameters, words))
    if not (alike or changes):
        how, instead = f"loop={terms.loop!r}", "after pace.step(optimizer), or use loop='whole'"
        if local:
            how, instead = "LocalSGD", "if pace.merged"
        checks.append(CallsWithin(lambda: round.computing, how, instead))
        checks.append(SecondModels(lambda: round.unlike(terms.loop == "round"), how))
    if not (alike or local):  # with local steps each micro-step is a step
        checks.append(MovingAverages(lambda: round.unstepped))
    if ranks > 1 and not (changes or local):
        checks.append(GatherSizes(lambda: round.newest))
    return Checks(checks)
