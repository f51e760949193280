"""The turns of a loop whose ranks may be lost or join: a round ends when all of it is in its gradient."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.errors import PacelineError
from paceline.torch.claiming.claims import Claims
from paceline.torch.claiming.counter import Counter
from paceline.torch.elastic.buckets import Buckets
from paceline.torch.elastic.exact import ExactBuckets
from paceline.torch.elastic.handover import Handover
from paceline.torch.elastic.leftover import Turn
from paceline.torch.elastic.link import Link
from paceline.torch.elastic.member import Member, Mended
from paceline.torch.elastic.meter import ElasticMeter
from paceline.torch.elastic.orphans import Span
from paceline.torch.elastic.parallel import Elastic
from paceline.torch.elastic.pool import Pool
from paceline.torch.elastic.running import Missing
from paceline.torch.gradients.parallel import Alone
from paceline.torch.measuring.meter import Meter
from paceline.torch.measuring.open_rounds import OnNan, RoundResult
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.terms import Terms
from paceline.torch.turns import Source, Turns


class Indexed(Source, Protocol):
    """A source that can give any samples of its epoch."""

    def divided(self, step: int, first: int, size: int, among: NDArray[np.bool_]) -> RoundPlan:
        """Round ``step`` of ``size`` samples from ``first`` of the epoch's order on; among: places, (places,)."""
        ...

    def pieces(self, plan: RoundPlan, first: int, among: NDArray[np.bool_]) -> list[Turn]:
        """This rank's turns of a round as planned, whose samples begin at ``first``; among: as for ``divided``."""
        ...

    def parts(self, plan: RoundPlan, first: int, missing: Missing) -> list[Turn]:
        """What is missing of a round whose samples begin at ``first``, as turns: the same on all members."""
        ...

    def load(self, span: Span | None) -> Any:
        """A batch of these samples of the epoch's order; for None one that counts for nothing."""
        ...


class ElasticTurns(Turns):
    """``join`` before the first iteration. told: called with each change of members."""

    def __init__(
        self,
        model: torch.nn.Module,
        parallel: Elastic,
        terms: Terms,
        listeners: list[Callable[[RoundResult], None]],
        on_nan: OnNan,
        link: Link,
        told: Callable[[Mended], None],
    ) -> None:
        self._carried, self._pool = ElasticMeter(terms.balancer.needs_readings, terms.moves_work), Pool(link)
        super().__init__(model, parallel, terms, listeners, on_nan)
        self._carried.claims = self._claims
        self._joined = self._failed = self._closed = False
        self._given = Handover(model, self._stands, super().load_state_dict)
        parameters = [p for p in model.parameters() if p.requires_grad]
        sums = ExactBuckets(parameters) if terms.cell else Buckets(parameters)
        self.member = Member(link, parameters, sums, terms, self._carried, self._given, told)
        parallel.begins = self.member.backward_begins
        self.passes.summed = self.member.ended

    def join(self, *things: Any) -> None:
        """Take part, with these states to hand over; returns when this rank has all that the others have."""
        if self._joined:
            raise PacelineError("pace.register() was called twice; expected once, with all that has a state")
        self._given.register(things)
        self._joined = True
        self.member.join()

    def over(self, source: Source) -> Generator[Any]:
        """One iteration over ``source``, turn by turn. Raises Left, a SystemExit, after ``leave``."""
        if not self._joined:
            raise PacelineError(
                "elastic=True: the loop began before pace.register(optimizer, ...), which says what a rank that "
                "joins is handed over; call it just before the loop"
            )
        return self._rounds_of(source)  # type: ignore[arg-type]  # its loader gives nothing else

    def _rounds_of(self, source: Indexed) -> Generator[Any]:
        running, progress = self._open(source), self.progress
        try:
            while (coming := next(progress.remaining(), None)) is not None:
                self.settle()
                step, member = progress.rounds, self.member
                member.begin(step, *coming)
                plan = source.divided(step, *coming, member.among)
                self._round_begins()
                if self._claims is not None:
                    self._claims.workers = int(member.among.sum())
                    self._pool.open(member.key, member.chief)
                cut = partial(source.parts, plan, coming[0])
                planned = [] if member.mending else source.pieces(plan, coming[0], member.among)
                for span, piece in member.turns(plan, self._with_claims(planned), cut):
                    batch = source.load(span)
                    self._begin(piece)
                    yield self.host.place(batch)
                    self.end_turn(running)
            self.close_epoch()
        finally:
            source.end()
            self._leave(running)

    def _with_claims(self, planned: Iterable[Turn]) -> Iterator[Turn]:
        """This rank's turns of a round as planned, and between them those that it claims."""
        for span, piece in planned:
            while (claimed := self._claim(piece)) is not None:
                at, left = claimed.start, len(claimed.sizes)
                for size, parts in zip(claimed.sizes, claimed.parts, strict=True):
                    left -= 1
                    turn = piece._replace(samples=size, parts=parts, last=False, claims=not left)
                    yield (at, size), turn
                    at += size
            yield span, piece

    def step(self, optimizers: list[Any], scaler: Any) -> bool:
        if not (self.passes.complete and self.member.behind):
            return super().step(optimizers, scaler)
        self._steps.check_ours(optimizers)
        self._steps.taken.extend(optimizers)
        self.stepped(0.0)  # it was handed over
        return True

    def flush(self) -> None:
        super().flush()
        self.member.together()

    def abandon(self) -> None:
        super().abandon()
        self.member.drop()

    def failed(self, error: BaseException) -> None:
        """The launcher sees the end of this process."""
        self._failed = True

    def close(self) -> None:
        if not (self._failed or self._closed):
            self.member.together()
        self._closed = True
        super().close()
        self.member.close()

    def _stands(self) -> dict[str, Any]:
        """Where the run stands at the beginning of the running round, or of the next."""
        terms = self.terms
        return {**self.progress.state(), "policy": terms.policy, "balancer": terms.balancer.state_dict()}

    def _measuring(self, device: torch.device, parallel: Alone) -> Meter:
        return self._carried

    def _claiming(self, device: torch.device, shared: Counter | None = None) -> Claims:
        return super()._claiming(device, self._pool)

    def _piece_over(self, piece: Piece) -> None:
        """Nothing: ``Member`` has told of the piece when its backward pass was through."""

    def _ready(self, piece: Piece) -> None:
        """Nothing: a round is complete when its gradients are summed, and ``Member`` says when."""
