"""A model's gradients: weighed, gathered piece by piece, and reduced once a round.

DDP averages over n ranks, so a micro-batch of m samples with a mean loss is weighed by n m / B (LB-BSP, weighted
aggregation: g = (1/X) sum_i |B_i| g_i). Under the hook it is DDP's sum that is weighed instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch

from paceline.torch import peers
from paceline.torch.gradients.counts import Counts
from paceline.torch.gradients.exactsum import ExactSum
from paceline.torch.gradients.parallel import Alone
from paceline.torch.gradients.put_aside import Gradients
from paceline.torch.plan import Piece


class Weighing:
    """For each turn ``begin``, then ``weigh`` before its backward pass and ``done`` after it (under the hook
    ``gather`` and ``gathered``); ``used`` when a round is over, ``drop`` where it is left unfinished.

    by_hook: DDP's communication hook weighs the gradients, not a loss. exact: they are summed without rounding.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        device: torch.device,
        parallel: Alone,
        *,
        by_hook: bool,
        exact: bool,
    ) -> None:
        self._parallel, self._ranks, self._by_hook = parallel, peers.ranks(), by_hook
        self._sum = ExactSum(parameters) if exact else None
        self._gradients, self._counts = Gradients(parameters), Counts(device)
        self._no_sync = ExitStack()
        self._weighed = 0  # samples of which the gathered gradients are a mean, under the hook
        self._scale = 1.0  # of the gradients gathered so far, before the coming piece's are added

    def begin(self, piece: Piece) -> None:
        """A turn begins; gradients are only reduced over the ranks in a round's last."""
        self.release()
        if not piece.last or self._sum is not None:
            self._no_sync.enter_context(self._parallel.no_sync())
        if self._by_hook and not piece.first and piece.samples:
            # With mean losses g_1, g_2 over m_1, m_2 samples the round needs (m_1 g_1 + m_2 g_2) / B. Gathered as
            # g_1 (m_1 / m_2) + g_2, the hook's m_2 / B gives just that.
            self._scale *= self._weighed / piece.samples
        self._weighed = piece.samples or (0 if piece.first else self._weighed)
        if piece.first:
            self._scale = 1.0
            self._counts.begin()

    def check_sync(self, piece: Piece) -> None:
        """Raises PacelineError where the coming backward pass would not reduce just when it should."""
        self._parallel.check_sync(piece.last and self._sum is None)

    def weigh(self, piece: Piece, count: float | None) -> None:
        """The first backward pass of a turn begins, whose loss is over ``count`` where that is not its samples."""
        self._gradients.begin(piece.step)
        self._counts.add(piece.step, count, piece.last)

    def weight(self, piece: Piece, part: float) -> float:
        """What a loss counts whose part of the round is ``part`` samples."""
        averaged = self._ranks if self._sum is None else 1  # DDP divides by them
        return averaged * part / piece.batch

    def done(self, piece: Piece) -> None:
        """The turn's backward pass is through. Collective after a round's last."""
        if self._sum is not None:
            self._sum.add()
            if piece.last:
                self._sum.finish()
        if piece.last:
            factor = self._counts.factor(piece.batch)
            if factor is not None:
                self._gradients.scale(factor)
            self._gradients.ready()
        elif self._sum is None and not self._by_hook:
            self._gradients.put_aside()

    def share(self, piece: Piece) -> float:
        """What the hook multiplies this rank's gathered gradients by."""
        return self._weighed / piece.batch

    def gather(self, piece: Piece) -> None:
        """Under the hook, a turn's backward pass begins."""
        self._gradients.begin(piece.step, self._scale)
        self._scale = 1.0

    def gathered(self, piece: Piece) -> None:
        """Under the hook, a turn's backward pass is through."""
        if not piece.last:
            self._gradients.put_aside()

    def check_there(self, step: int, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Raises PacelineError where all gradients that an optimizer is to use have gone since they were complete."""
        self._gradients.check_there(step, optimizers)

    def finite(self) -> bool:
        """True when no gradient holds an infinity or NaN."""
        return self._gradients.finite()

    def used(self) -> None:
        """The round's step was taken, or left out on purpose."""
        self._gradients.used()

    def drop(self) -> None:
        """The running round is left unfinished: nothing of it counts."""
        self._gradients.drop()

    def release(self) -> None:
        """The model reduces its gradients again as it did."""
        self._no_sync.close()
