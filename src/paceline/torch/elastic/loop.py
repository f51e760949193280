"""The micro-steps of a loop whose ranks may be lost or join: a round ends when all of it is in its gradient.

The gradients are summed beside DistributedDataParallel, not by it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.torch.counter import Count, count_of, packed
from paceline.torch.elastic.buckets import Buckets, ExactBuckets
from paceline.torch.elastic.commit import ElasticMeter
from paceline.torch.elastic.link import Link
from paceline.torch.elastic.member import Member, Mended
from paceline.torch.elastic.recovery import MicroStep, Missing, Span
from paceline.torch.elastic.rendezvous import Handover
from paceline.torch.gradients.parallel import Alone
from paceline.torch.loop import Loop
from paceline.torch.measuring.open_rounds import OnNan, RoundResult
from paceline.torch.plan import Piece, RoundPlan, Source
from paceline.torch.terms import Terms


class Indexed(Source, Protocol):
    """A source that can give any samples of its epoch."""

    def divided(self, step: int, first: int, size: int, among: NDArray[np.bool_]) -> RoundPlan:
        """Round ``step`` of ``size`` samples from ``first`` of the epoch's order on; among: places, (places,)."""
        ...

    def pieces(self, plan: RoundPlan, first: int, among: NDArray[np.bool_]) -> list[MicroStep]:
        """This rank's micro-steps of a round as planned, whose samples begin at ``first``; among: as for
        ``divided``."""
        ...

    def parts(self, plan: RoundPlan, first: int, missing: Missing) -> list[MicroStep]:
        """What is missing of a round whose samples begin at ``first``, as micro-steps: the same on all members."""
        ...

    def load(self, span: Span | None) -> Any:
        """A batch of these samples of the epoch's order; for None one that counts for nothing."""
        ...


class StoreCounter:
    """The counter behind claims within a round: on the launcher's store, a key for each round. ``open`` for each
    round; then ``add`` from any thread, see ``counter.Counter``.

    What a lost rank has claimed is not given back: it is missing when the round's sums fail, and found then."""

    keeper = "the launcher"
    quick = False

    def __init__(self, link: Link) -> None:
        self._link = link
        self._key = self._before = ""

    def open(self, key: str, first: bool) -> None:
        """A round begins. key: of it and these members; first: whether this rank is the first of the members."""
        if first and self._before:  # all have left that round: its sums, and those of the next, are there
            self._link.forget(self._before)
        self._before, self._key = self._key, f"pool/{key}"

    def add(self, step: int, samples: int = 0, told: int = 0, speed: int = 0) -> Count:
        """Add to the counts of the round that is open."""
        return count_of(self._link.add(self._key, packed(samples, told, speed)), samples)

    def close(self) -> None:
        """The link stays."""


class Elastic(Alone):
    """A plain module, or one in a DistributedDataParallel of one rank, which sums nothing.

    begins: called before each backward pass, with whether it is a round's last planned one; set it first.
    """

    counts = True

    def __init__(self, ddp: DistributedDataParallel | None) -> None:
        self._ddp = ddp
        self.begins: Callable[[bool], None] = lambda last: None
        if ddp is not None:
            ddp.require_backward_grad_sync = False

    def no_sync(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def check_sync(self, last: bool) -> None:
        self.begins(last)

    def release(self) -> None:
        if self._ddp is not None:
            self._ddp.reducer = None  # type: ignore[assignment]


def elastic(model: nn.Module) -> Elastic:
    """How ``model`` is summed. Raises PacelineError for what cannot go on without a rank."""
    modules = list(model.modules())
    wrapped = [module for module in modules if isinstance(module, DistributedDataParallel)]
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    wrong = (
        "its gradients are summed by gloo, on processors; the model is on " + str(device)
        if device.type != "cpu"
        else "the model was given to fully_shard, and a rank's part of it would be lost with the rank"
        if any(hasattr(module, "set_requires_gradient_sync") for module in modules)
        else "the DistributedDataParallel module is in a group of several ranks, which one lost rank ends: start the "
        "script with python -m paceline.torch.launcher, where each is in a group of its own"
        if any(module.process_group.size() > 1 for module in wrapped)
        else "an embedding has sparse gradients, which are not summed yet; use sparse=False"
        if any(getattr(module, "sparse", False) is True for module in modules)
        else ""
    )
    if wrong:
        raise PacelineError(f"elastic=True: {wrong}")
    return Elastic(wrapped[0] if wrapped else None)


class ElasticLoop(Loop):
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
        meter = ElasticMeter(terms.balancer.needs_readings, terms.moves_work)
        self._counter = StoreCounter(link)
        super().__init__(model, parallel, terms, listeners, on_nan, meter, self._counter)
        meter.claims = self._claims
        self._joined = self._closed = False
        self._given = Handover(model, self._stands, super().load_state_dict)
        parameters = [p for p in model.parameters() if p.requires_grad]
        sums = ExactBuckets(parameters) if terms.cell else Buckets(parameters)
        self.member = Member(link, parameters, sums, terms, meter, self._given, told)
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
        """One iteration over ``source``, micro-step by micro-step. Raises Left, a SystemExit, after ``leave``."""
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
                    self._counter.open(member.key, member.chief)
                cut = partial(source.parts, plan, coming[0])
                planned = [] if member.mending else source.pieces(plan, coming[0], member.among)
                for span, piece in member.micro_steps(plan, self._with_claims(planned), cut):
                    batch = source.load(span)
                    self._begin(piece, batch)
                    yield self.host.place(batch)
                    self.end_micro_step(running)
            self.close_epoch()
        finally:
            source.end()
            self._leave(running)

    def _with_claims(self, planned: Iterable[MicroStep]) -> Iterator[MicroStep]:
        """This rank's micro-steps of a round as planned, and between them those that it claims."""
        for span, piece in planned:
            while (claimed := self._claim(piece)) is not None:
                at, left = claimed.start, len(claimed.sizes)
                for size, parts in zip(claimed.sizes, claimed.parts, strict=True):
                    left -= 1
                    micro_step = piece._replace(samples=size, parts=parts, last=False, claims=not left)
                    yield (at, size), micro_step
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

    def _piece_over(self, piece: Piece) -> None:
        """Nothing: ``Member`` has told of the piece when its backward pass was through."""
