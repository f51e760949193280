"""Every combination of options: the ranks of a run without processes agree on terms, or all get one message.

Accepted terms then divide an epoch that is stopped and resumed with another number of ranks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.torch import peers, terms
from paceline.torch.claims import Claims
from paceline.torch.counter import LocalCounter
from paceline.torch.feed.costs import Dealer, agreed_dealer
from paceline.torch.feed.pieces import Order, planned_pieces
from paceline.torch.local import Merge
from paceline.torch.options import LOCAL, LOOPS, Options
from paceline.torch.plan import Piece, RoundPlan
from paceline.torch.progress import Opened, Progress
from paceline.torch.terms import Terms
from support.guarantees import guarantee

PLAIN = torch.nn.Linear(2, 1)
NORMED = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
DEFAULT: dict[str, Any] = {
    "policy": "level", "limits": None, "micro_batch": None, "micro_steps": None, "loop": "round", "fill": None,
    "quantum": 1, "weigh": "loss", "deterministic": False, "callbacks": (), "elastic": False, "every": None,
    "merge": None, "drop": None,
}  # fmt: skip
KINDS: list[dict[str, Any]] = [
    {},
    {"loop": "whole"},
    {"loop": "round", "policy": "factoring"},
    {"loop": "pieces", "policy": "auto"},
    {"loop": "pieces", "policy": "factoring", "deterministic": True},
    {"loop": LOCAL},
]
POLICIES = ["auto", "equal", "level", "factoring", "factoring:scheme=guided", "dolbie", "lbbsp", "wlbs"]


SELDOM = st.sampled_from([False, False, False, True])


class Company:
    """The ranks of a run, which were all given the same; seen from one of them."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def gather(self, item: Any) -> list[Any]:
        return [item] * self.ranks


@contextmanager
def company(rank: int, ranks: int) -> Iterator[None]:
    peers.keep_company(Company(rank, ranks))
    try:
        yield
    finally:
        peers.keep_company(None)


@st.composite
def limits(draw: st.DrawFn, ranks: int, batch: int) -> list[tuple[int | None, int | None]]:
    """Limits that hold the batch, except once in a while."""
    least = st.one_of(st.none(), st.integers(0, draw(st.sampled_from([1, 1, 2])) * batch // ranks))
    room = st.one_of(st.none(), st.integers(0, batch), st.integers(0, draw(st.integers(1, batch))))
    found: list[tuple[int | None, int | None]] = []
    for low in draw(st.lists(least, min_size=ranks, max_size=ranks)):
        extra = draw(room)
        found.append((low, None if extra is None else max(low or 0, min(extra + (low or 0), batch))))
    return found


@st.composite
def chosen(draw: st.DrawFn, ranks: int) -> dict[str, Any]:
    """The options of one kind of run, up to four of them replaced by others."""
    quantum = draw(st.sampled_from([1, 1, 1, 2, 3, 4, 8]))
    batch = draw(st.integers(1, 40)) * draw(st.sampled_from([quantum] * 5 + [1]))
    others = {
        "policy": st.sampled_from(POLICIES),
        "limits": st.one_of(st.just("memory"), *[limits(ranks, batch)] * 3),
        "micro_batch": st.integers(1, 24),
        "micro_steps": st.integers(1, 5),
        "loop": st.sampled_from([*LOOPS, LOCAL]),
        "fill": st.booleans(),
        "weigh": st.sampled_from(["loss", "hook"]),
        "deterministic": st.booleans(),
        "elastic": st.booleans(),
        "every": st.sampled_from([1, 3, "2 s", "auto"]),
        "merge": st.sampled_from([Merge(), Merge(delay=1)]),
        "drop": st.sampled_from([None, 0.5, "auto"]),
    }
    names = draw(st.lists(st.sampled_from(list(others)), max_size=4, unique=True))
    given = DEFAULT | draw(st.sampled_from(KINDS)) | {"global_batch": batch, "quantum": quantum}
    given |= {name: draw(others[name]) for name in names}
    # What no handle takes together.
    if given["loop"] == LOCAL:
        given |= {"every": given["every"] or "auto", "merge": given["merge"] or Merge()}
    else:
        given |= {"every": None, "merge": None}
    return given | ({"weigh": "loss", "micro_steps": None, "drop": None} if given["elastic"] else {})


def agreed(model: torch.nn.Module, options: dict[str, Any], ranks: int, lockstep: bool) -> list[Terms] | str:
    """The terms on each rank, or the message with which all of them refuse the options."""
    found: list[Any] = []
    for rank in range(ranks):
        with company(rank, ranks):
            given = Options(**options)
            try:
                given.check_kinds(model)
                if given.elastic:
                    given.check_elastic()
                found.append(terms.agree(model, given, lockstep))
            except PacelineError as error:
                found.append(str(error))
    if isinstance(found[0], str):
        assert found == found[:1] * ranks
        return str(found[0])
    return found


def one_sentence(message: str) -> None:
    assert message[0].isalpha()
    assert "\n" not in message
    assert len(message) <= 400


@settings(max_examples=150)
@given(st.data(), st.integers(1, 5), st.booleans(), SELDOM)
def test_every_combination_is_agreed_on_or_refused_in_one_message(
    data: st.DataObject, ranks: int, norms: bool, lockstep: bool
) -> None:
    options = data.draw(chosen(ranks))
    found = agreed(NORMED if norms else PLAIN, options, ranks, lockstep)
    if isinstance(found, str):
        event("refused")
        one_sentence(found)
        return
    event("agreed")
    for own in found[1:]:
        for name in (
            "batch",
            "policy",
            "moves_work",
            "min_samples",
            "unit",
            "quantum",
            "chunk",
            "fixed_micro_steps",
        ):
            assert getattr(own, name) == getattr(found[0], name)
        assert own.balancer.digest == found[0].balancer.digest


class Ranks:
    """The ranks of one start of a run over ``samples`` samples of the given costs, or of equal cost."""

    def __init__(self, each: list[Terms], order: Order, costs: Any, rng: np.random.Generator) -> None:
        self.terms, self.order, self.rng, n = each, order, rng, len(each)
        self.progress = [Progress(own.batch, own.min_samples, own.every.size) for own in each]
        self.dealers: list[Dealer | None] = []
        self.claims: list[Claims | None] = []
        shared = LocalCounter()
        for rank, own in enumerate(each):
            with company(rank, n):
                self.dealers.append(agreed_dealer(own, range(order.samples), list, costs, 0))
                chunk = own.chunk or (own.merge is not None and own.micro_batch) or 0
                largest = None if chunk else own.micro_batch
                most = int(own.most[rank])
                made = Claims(torch.device("cpu"), own.unit, largest, most, chunk, shared)
                self.claims.append(made if own.moves_work else None)

    def resume(self, state: dict[str, Any]) -> None:
        for own, progress in zip(self.terms, self.progress, strict=True):
            progress.load(state)
            own.balancer.load_state_dict(state["balancer"], progress.rounds)

    def open(self) -> None:
        for progress in self.progress:
            progress.open(Opened(0, self.order.samples, self.order.seed, self.order.shuffle))
        epoch = self.order.epoch(self.progress[0].epoch)
        self.indices = [epoch.copy() for _ in self.terms]

    def state(self) -> dict[str, Any]:
        balancer = json.loads(json.dumps(self.terms[0].balancer.state_dict()))
        return self.progress[0].state() | {"policy": "", "balancer": balancer}

    def round(self, first: int, size: int) -> list[list[int]]:
        """Runs a round; returns the samples that each rank ran."""
        step, plans = self.progress[0].rounds, list[RoundPlan]()
        for own, dealer, indices in zip(self.terms, self.dealers, self.indices, strict=True):
            if dealer is None:
                plans.append(own.divided(step, own.balancer.loads(step, size), first))
            else:
                plans.append(dealer.divided(step, indices, first, size))
        for plan, indices in zip(plans, self.indices, strict=True):
            assert plan.loads.tolist() == plans[0].loads.tolist()
            assert plan.batch == size
            assert indices.tolist() == self.indices[0].tolist()
            assert (plan.division is None) == (plans[0].division is None)
        ran = [self.planned(rank, plan, first) for rank, plan in enumerate(plans)]
        if plans[0].division is not None:
            self.claimed(plans, ran)
        self.within_limits(plans[0], [len(each) for each in ran])
        seconds = self.rng.uniform(0.1, 1, len(ran)) * self.rng.choice([1, 4], len(ran))
        for own in self.terms:
            loads = np.array([len(each) for each in ran])
            parts = None if plans[0].deal is None or plans[0].division is not None else plans[0].deal.parts
            if own.balancer.learner is None or parts is not None:
                own.balancer.report(step, loads, seconds, parts=parts)
        for progress in self.progress:
            progress.rounds += 1
            progress.samples_done += size
        return ran

    def planned(self, rank: int, plan: RoundPlan, first: int) -> list[int]:
        own, ran, sizes = self.terms[rank], list[int](), list[int]()
        for samples, piece in planned_pieces(own, rank, plan, first, self.indices[rank], own.filled):
            assert piece.samples in (0, len(samples))
            assert piece.first == (not sizes)
            ran += samples[: piece.samples].tolist()
            sizes.append(piece.samples)
            claims = self.claims[rank]
            if claims is not None and plan.division is not None:
                if piece.first:
                    claims.open(0.0)
                if not (piece.last and plan.division.kept[rank]):  # which runs after the claims
                    claims.done(piece)
        assert piece.last
        fixed = own.micro_steps(plan.loads) if plan.deal is None else own.fixed_micro_steps
        if fixed is not None:
            assert len(sizes) == fixed
        if own.lockstep and plan.deal is not None:
            assert len(sizes) == max(len(plan.deal.sizes[0]), 1)
        largest = int(own.largest[rank])
        assert max(sizes) <= largest + (own.min_samples > 1) * own.min_samples or own.merge is not None
        assert (
            own.min_samples == 1
            or not {*range(1, own.min_samples)} & {*sizes}
            or plan.batch < own.min_samples
        )
        return ran

    def claimed(self, plans: list[RoundPlan], ran: list[list[int]]) -> None:
        """The ranks claim what is left, in any order, until nobody finds more."""
        division, at_work = plans[0].division, list(range(len(plans)))
        assert division is not None
        while at_work:
            rank = int(self.rng.choice(at_work))
            with company(rank, len(plans)):
                claims, own = self.claims[rank], plans[rank].division
                assert claims is not None
                assert own is not None
                claim = claims.take(own)
            if claim is None:
                at_work.remove(rank)
                continue
            at = claim.start
            for size, parts in zip(claim.sizes, claim.parts, strict=True):
                ran[rank] += self.indices[rank][at : at + size].tolist()
                at += size
                claims.done(claimed_piece(plans[rank], size, parts, at - size))

    def within_limits(self, plan: RoundPlan, loads: list[int]) -> None:
        own = self.terms[0]
        cluster = own.balancer.policy.cluster
        assert sum(loads) == plan.batch
        assert (np.array(loads) <= np.maximum(own.most, 0) + own.min_samples - 1).all()
        least = np.ceil(cluster.least / own.quantum) * own.quantum
        if plan.deal is None and plan.division is None and own.min_samples == 1 and least.sum() <= plan.batch:
            assert (plan.loads >= cluster.least).all()
        if plan.division is None and own.min_samples == 1 and own.quantum > 1:
            assert (plan.loads % own.quantum > 0).sum() == (plan.batch % own.quantum > 0)


def claimed_piece(plan: RoundPlan, size: int, parts: Any, start: int) -> Piece:
    return Piece(plan, size, False, False, True, parts, start)


@guarantee("Under any options, each sample of an epoch counts once, also if other ranks resume it.")
@settings(max_examples=80)
@given(st.data(), st.integers(1, 5), st.integers(1, 5), SELDOM, st.integers(0, 2**32 - 1))
def test_each_sample_of_an_epoch_counts_once_under_all_options(
    data: st.DataObject, ranks: int, later: int, norms: bool, seed: int
) -> None:
    model, lockstep, rng = NORMED if norms else PLAIN, data.draw(SELDOM), np.random.default_rng(seed)
    options = data.draw(chosen(ranks))
    before = agreed(model, options, ranks, lockstep)
    if isinstance(before, str):
        event("refused")
        return
    if isinstance(options["limits"], list):
        options["limits"] = data.draw(limits(later, options["global_batch"]))
    after = agreed(model, options, later, lockstep)
    size = before[0].every.size(0)
    samples = data.draw(st.integers(1 + norms, 3 * min(size, 60)))
    lengths = rng.integers(1, 20, samples).astype(float)
    costs = data.draw(
        st.sampled_from([(None, None, None)] * 2 + [(lengths, False, None), (lengths, True, None)])
    )
    budget = data.draw(st.sampled_from([None, 3 * lengths.max()]))
    costs = costs if costs[0] is None else (*costs[:2], budget)
    if samples % size % options["quantum"]:
        return  # which a loader refuses
    order = Order(samples, seed % 1000)
    try:
        run = Ranks(before, order, costs, rng)
        run.open()
        counted = list[int]()
        stop = data.draw(st.integers(0, 3), label="rounds before the checkpoint")
        for first, many in run.progress[0].remaining():
            if not stop and not isinstance(after, str):
                kept = run.state()
                run = Ranks(after, order, costs, rng)
                run.resume(kept)
                run.open()
                assert run.progress[0].samples_done == first
                event("resumed")
                break
            stop -= 1
            counted += list(chain.from_iterable(run.round(first, many)))
        if len(counted) < samples:
            for first, many in run.progress[0].remaining():
                counted += list(chain.from_iterable(run.round(first, many)))
    except PacelineError as error:
        event("refused by the loader")
        one_sentence(str(error))
        return
    event("in pieces" if before[0].moves_work else "as planned")
    assert sorted(counted) == list(range(samples))


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        (
            2,
            {"global_batch": 2**27 + 1},
            "a round may have 134217729 samples, and claims are counted up to 134217728",
        ),
        (
            2,
            {"loop": LOCAL, "every": 2**20, "merge": Merge(), "global_batch": 256},
            "may have 268435456 samples",
        ),
        (2048, {"global_batch": 4096}, "2048 ranks take part, and claims are counted for 2047"),
    ],
)
def test_rounds_with_more_claims_than_are_counted_raise(
    ranks: int, options: dict[str, Any], words: str
) -> None:
    """The counter of claims would begin again, and samples would count twice; whole rounds need no counter."""
    factoring = DEFAULT | {"policy": "factoring"} | options
    with company(0, ranks):
        with pytest.raises(PacelineError, match=f"policy factoring moves work within the round: .*{words}"):
            terms.agree(PLAIN, Options(**factoring), False)
        assert not terms.agree(PLAIN, Options(**factoring | {"policy": "level"}), False).moves_work


@pytest.mark.parametrize(("ranks", "batch"), [(2, 2**27), (2047, 4096)])
def test_rounds_with_as_many_claims_as_are_counted_move_work(ranks: int, batch: int) -> None:
    with company(0, ranks):
        found = terms.agree(PLAIN, Options(**DEFAULT | {"policy": "factoring", "global_batch": batch}), False)
    assert found.moves_work
