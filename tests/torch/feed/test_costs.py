"""Rounds that are divided by what their samples cost: the model is that of one process, every sample is used once."""

from __future__ import annotations

import io
import random
import re
import time
from contextlib import nullcontext
from functools import cache, partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from paceline.errors import PacelineError
from paceline.hosts.accumulating import HostedPace
from paceline.torch import RoundResult
from paceline.torch.callbacks import OnRound
from paceline.torch.feed.costs import pads, read
from paceline.torch.feed.pieces import Order
from support.guarantees import guarantee
from support.ranks import run_cases, run_ranks
from support.sentences import IGNORED, WORDS, loss_of, means_of_sentences, model
from support.sharding import possible, sharded_over, whole
from support.small_net import UNEVEN, difference

pytestmark = pytest.mark.processes

LOOSE = {"policy": UNEVEN, "limits": ((0, None),) * 3}

COUNT, BATCH, SEED = 86, 32, 5


def lengths_of(count: int = COUNT) -> np.ndarray[Any, Any]:
    """Whole numbers, lognormal between 1 and 60."""
    drawn = np.random.default_rng(2).lognormal(2.0, 1.0, count)
    return np.clip(drawn, 1, 60).astype(int)


CASES: dict[str, dict[str, Any]] = {
    "by the name of an attribute": LOOSE,
    "an array, unpadded": LOOSE | {"loading": {"cost": lengths_of(), "padded": False}},
    "a function": LOOSE | {"loading": {"cost": lengths_of().__getitem__}},
    "the length of a field": LOOSE | {"loading": {"cost": "words"}},
    "means of sentences": LOOSE | {"by_sentence": True},
    "by the hook": LOOSE | {"weigh": "hook"},
    "by round, few at once": LOOSE | {"loop": "round", "micro_batch": 4},
    "by round, a budget": LOOSE | {"loop": "round", "loading": {"cost": "tokens", "micro_batch_cost": 90}},
    "pieces, a budget, unpadded": LOOSE
    | {"loop": "pieces", "loading": {"cost": "tokens", "micro_batch_cost": 70, "padded": False}},
    "equal micro-steps": LOOSE | {"micro_steps": 3, "loop": "pieces"},
    "sharded, in equal micro-steps": LOOSE
    | {"sharded": True, "loop": "round", "loading": {"cost": "tokens", "micro_batch_cost": 120}},
    "prefetching": LOOSE | {"workers": 1},
    "left and taken up": LOOSE | {"stop": 3},
    "by speed": {"policy": "level"},
    "auto, by round": {"policy": "auto", "loop": "round"},
}
HALF = {"policy": "factoring:portion=0.5", "loop": "round"}
IN_PIECES: dict[str, dict[str, Any]] = {
    "half is claimed": HALF,
    "unpadded, a budget": HALF | {"loading": {"cost": "tokens", "micro_batch_cost": 90, "padded": False}},
    "padded, a budget and few at once": HALF
    | {"loop": "pieces", "micro_batch": 4, "loading": {"cost": "tokens", "micro_batch_cost": 90}},
    "all is claimed": HALF | {"policy": "factoring:scheme=self,piece=2"},
    "a rank with little room": HALF | {"limits": ((None, None), (None, None), (None, 7))},
    "means of sentences": HALF | {"by_sentence": True},
    "prefetching": HALF | {"workers": 1},
    "left and taken up": HALF | {"stop": 3},
}
CASES |= {f"in pieces: {name}": case for name, case in IN_PIECES.items()}
CASES = possible(CASES)


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Sentences of unlike lengths; the first word of each has no label, so that some have none at all."""

    def __init__(self, count: int = COUNT) -> None:
        self.tokens = lengths_of(count).tolist()
        draw = torch.Generator().manual_seed(9)
        self.words = [torch.randint(WORDS, (length,), generator=draw) for length in self.tokens]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"words": self.words[index], "index": index}


def filled(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words, labels and indices; filled up to the longest."""
    longest = max(len(sample["words"]) for sample in samples)
    words = torch.zeros(len(samples), longest, dtype=torch.int64)
    labels = torch.full((len(samples), longest), IGNORED)
    for row, sample in enumerate(samples):
        words[row, : len(sample["words"])] = sample["words"]
        labels[row, 1 : len(sample["words"])] = sample["words"][1:].flip(0)
    return words, labels, torch.tensor([sample["index"] for sample in samples])


@cache
def one_process(epochs: int, by_sentence: bool = False) -> list[torch.Tensor]:
    """The parameters of one process that takes each whole batch itself."""
    net, data = model(), Texts()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    for epoch in range(epochs):
        order = Order(COUNT, SEED).epoch(epoch)
        for first in range(0, COUNT, BATCH):
            words, labels, _ = filled([data[index] for index in order[first : first + BATCH]])
            optimizer.zero_grad()
            out = net(words)
            (
                means_of_sentences(out, labels).mean() if by_sentence else loss_of(out, labels, "mean")
            ).backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()]


def divided_by_cost(
    rank: int,
    ranks: int,
    loop: str = "whole",
    by_sentence: bool = False,
    sharded: bool = False,
    workers: int = 0,
    stop: int | None = None,
    loading: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """How far from one process, the samples used in each epoch, and each round's loads and costs."""
    parts = {"rank": rank, "ranks": ranks, "loop": loop, "by_sentence": by_sentence, "sharded": sharded}
    parts |= {"workers": workers, "loading": {"cost": "tokens"} if loading is None else loading}
    net, used, rounds = model(), [[], []], []
    if stop is None:
        _train(net, used, rounds, None, None, **parts, **options)
    else:  # left in the middle of the first epoch, and taken up by another Pace
        saved = _train(net, used, rounds, None, stop, **parts, **options)
        net = model()
        _train(net, used, rounds, saved, None, **parts, **options)
    found = [whole(p) for p in net.parameters()]
    far = difference(found, one_process(2, by_sentence))
    loads = [round.loads.tolist() for round in rounds]
    costs = [None if round.costs is None else round.costs.tolist() for round in rounds]
    within = [None if round.within is None else round.within.pieces for round in rounds]
    parts = [None if round.parts is None else round.parts.tolist() for round in rounds]
    return {"far": far, "used": used, "loads": loads, "costs": costs, "pieces": within, "parts": parts}


def _train(
    net: nn.Sequential,
    used: list[list[int]],
    rounds: list[RoundResult],
    saved: bytes | None,
    until: int | None,
    *,
    rank: int,
    ranks: int,
    loop: str,
    by_sentence: bool,
    sharded: bool,
    workers: int,
    loading: dict[str, Any],
    **options: Any,
) -> bytes:
    state = None if saved is None else torch.load(io.BytesIO(saved), weights_only=True)
    if state is not None:
        net.load_state_dict(state["model"])
    ddp: nn.Module = sharded_over(net, ranks) if sharded else DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
    pace, stalls = (
        HostedPace(ddp, BATCH, loop=loop, callbacks=[OnRound(rounds.append)], **options),
        random.Random(rank),
    )
    loader = pace.loader(Texts(), seed=SEED, collate_fn=filled, **loading, num_workers=workers)
    if state is not None:
        pace.load_state_dict(state["pace"])

    def function(words: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, Any]:
        time.sleep(2e-4 * stalls.expovariate(1.0))
        if pace.counts:
            used[pace.epoch] += index.tolist()
        if by_sentence:
            return means_of_sentences(ddp(words), labels).mean(), None
        return loss_of(ddp(words), labels, "mean"), labels.ne(IGNORED).sum()

    while pace.epoch < 2 and pace.rounds != until:
        for batch in loader:
            if loop == "round":
                pace.round(batch, function)
            else:
                loss, count = function(*batch)
                pace.backward(loss, count=count)
            if pace.step(optimizer) and pace.rounds == until:
                break
    pace.host.flush()
    buffer = io.BytesIO()
    if until is not None:
        both = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "pace": pace.state_dict()}
        torch.save(both, buffer)
    pace.host.detach()
    return buffer.getvalue()


@guarantee(
    "With `loader(cost=...)`, each round has the samples that it has without costs, and the model is that of "
    "one process."
)
def test_rounds_divided_by_cost_train_the_model_of_one_process() -> None:
    for name, results in run_cases(3, divided_by_cost, CASES).items():
        for result in results:
            assert result["far"] < 1e-12, f"{name}: relative difference {result['far']:.1e}"
        for epoch in range(2):
            used = sorted(chain.from_iterable(result["used"][epoch] for result in results))
            assert used == list(range(COUNT)), f"{name}: epoch {epoch}"
        assert len(results[0]["loads"]) == 2 * -(-COUNT // BATCH), name
        assert all(sum(loads) in (BATCH, COUNT % BATCH) for loads in results[0]["loads"]), name
        if name.startswith("in pieces"):
            pieces = results[0]["pieces"]
            assert max(len(own) for each in pieces for own in each) > 2, f"{name}: nothing was claimed"
            assert [[sum(own) for own in each] for each in pieces] == results[0]["loads"], name


def test_claimed_pieces_hold_their_share_of_cost() -> None:
    """What the ranks tell of a round in pieces adds up to its samples, and the longest of them went first."""
    loading = {"cost": lengths_of(), "padded": False}
    case = {"policy": "factoring:scheme=self,piece=2", "loop": "round", "loading": loading}
    first, second = run_ranks(2, partial(divided_by_cost, **case))
    order, lengths_here, mean = Order(COUNT, SEED).epoch(0), lengths_of(), lengths_of().mean()
    for number in range(COUNT // BATCH):
        of_round = lengths_here[order[number * BATCH : (number + 1) * BATCH]]
        assert sum(parts[0] for parts in first["parts"][number]) == of_round.sum()
    used, start = [first["used"][0], second["used"][0]], [0, 0]
    for number in range(COUNT // BATCH):
        for rank, pieces in enumerate(first["pieces"][number]):
            costs, longest = [], []
            for size in pieces:
                mine = lengths_here[used[rank][start[rank] : start[rank] + size]]
                start[rank] += size
                costs.append(mine.sum() / mean)
                longest.append(mine.max(initial=0) / mean)
            claims = costs[:-1]  # then comes what it had kept for its end
            assert all(a >= b for a, b in pairwise(longest))
            # The round's last piece is what was left.
            for cost, one in zip(claims[:-1], longest, strict=False):
                assert cost <= max(one, 2 + one / 2) + 1e-9


@guarantee("Ranks receive parts by their speed: parts of equal cost if they are equally fast.")
def test_equal_ranks_receive_parts_of_equal_cost() -> None:
    cost = {"cost": lengths_of(), "padded": False}
    case = {"policy": "equal", "limits": ((0, None),) * 3, "loading": cost}
    rounds = run_ranks(3, partial(divided_by_cost, **case))[0]
    first = np.array(rounds["costs"][0])  # of a round that was divided by the costs as they were given
    lengths_of_round = lengths_of()[Order(COUNT, SEED).epoch(0)[:BATCH]]
    assert first.max() < 1.05 * first.mean()
    assert first.sum() == pytest.approx(lengths_of_round.sum() / lengths_of().mean())  # in mean samples
    slices = np.array([part.sum() for part in np.array_split(lengths_of_round, 3)])
    assert slices.max() > 1.2 * slices.mean(), "equal counts would have done as well"


def refused(rank: int, ranks: int, cases: list[tuple[dict[str, Any], dict[str, Any], str]]) -> None:
    """For each case of options of Pace and of its loader, these words are raised."""
    own = {"of my own": np.arange(COUNT) + 1 + rank, "broken here": np.arange(COUNT) + min(rank, 1)}
    for options, loading, words in cases:
        if isinstance(loading.get("cost"), str):
            loading = loading | {"cost": own.get(loading["cost"], loading["cost"])}
        pace = HostedPace(DistributedDataParallel(model()), BATCH, **options)
        with pytest.raises(PacelineError, match=re.escape(words)) if words else nullcontext():
            pace.loader(Texts(), collate_fn=filled, **loading)
        pace.host.detach()


@guarantee(
    "Costs that are not positive and finite, too few, or different between ranks raise one error on every "
    "rank."
)
def test_invalid_costs_raise_on_every_rank() -> None:
    right = {"cost": "tokens"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"cost": "of my own"}, "rank 1 was given cost="),
        ({}, {"cost": "broken here"}, "sample 0 has 0"),
        ({}, {"cost": np.ones(7)}, f"got 7 numbers for the data set's {COUNT} samples"),
        ({}, {"cost": "atoms"}, "has no field of that name"),
        ({}, {"cost": 3}, "expected one number for each sample"),
        ({}, {"padded": True}, "expected cost=, too"),
        ({"quantum": 4}, right, "leave one of them out"),
        ({}, right | {"micro_batch_cost": 100}, "use loop='round'"),
        ({"loop": "round"}, right | {"micro_batch_cost": 3}, "the cost of the longest sample"),
        ({"loop": "round", "policy": "factoring", "deterministic": True}, right, "leave one of them out"),
        ({}, right, ""),
    ]
    run_ranks(2, refused, cases)


@guarantee(
    "Padding by a collate function is found from the shortest and "
    "the longest sample, unless an option says it."
)
def test_padding_is_found_from_two_samples() -> None:
    texts = Texts()
    costs = read("tokens", texts)
    assert pads(texts, filled, costs)
    assert not pads(texts, torch.utils.data.default_collate, costs)  # which cannot take two lengths together

    def packed(samples: list[dict[str, Any]]) -> torch.Tensor:
        return torch.cat([sample["words"] for sample in samples])

    def cut(samples: list[dict[str, Any]]) -> torch.Tensor:
        return torch.stack([sample["words"][:1] for sample in samples])

    assert not pads(texts, packed, costs)
    assert not pads(texts, cut, costs)
    assert not pads(texts, filled, read(np.ones(COUNT), texts))


def test_costs_are_read_from_columns_tensors_and_fields() -> None:
    class Table:
        column_names = ("text", "length", "input_ids")

        def __len__(self) -> int:
            return 3

        def __getitem__(self, key: Any) -> Any:
            return {"length": [2, 3, 5], "input_ids": [[1, 1], [1] * 3, [1] * 5], "text": "abc"}[key]

    expected = [2.0, 3.0, 5.0]
    for cost in ("length", "input_ids", torch.tensor([2, 3, 5]), [2, 3, 5], lambda index: [2, 3, 5][index]):
        assert read(cost, Table()).lengths.tolist() == expected
    with pytest.raises(PacelineError, match="the columns text, length, input_ids"):
        read("tokens", Table())
    with pytest.raises(PacelineError, match="sample 0 has nan"):
        read("text", Table())
    for one in (3, np.float64(3), torch.tensor(3)):
        with pytest.raises(PacelineError, match=r"cost=3: expected one number for each sample; leave it out"):
            read(one, Table())
