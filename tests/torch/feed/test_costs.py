"""Rounds that are divided by what their samples cost: the model is that of one process, every sample is used once."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch.feed.costs import pads, read
from paceline.torch.feed.pieces import Order
from support.cost_jobs import BATCH, COUNT, SEED, Texts, divided_by_cost, filled, lengths_of, refused
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.sharding import possible
from support.torch_jobs import UNEVEN

pytestmark = pytest.mark.processes

LOOSE = {"policy": UNEVEN, "limits": ((0, None),) * 3}
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


@guarantee(
    "With `loader(cost=...)`, each round has the samples that it has without costs, and the model is that of "
    "one process."
)
def test_the_model_is_that_of_one_process_and_every_sample_is_used_once() -> None:
    found = run_ranks(3, divided_by_cost, list(CASES.values()))
    for number, name in enumerate(CASES):
        results = [rank[number] for rank in found]
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


def test_pieces_hold_as_much_cost_as_they_should() -> None:
    """What the ranks tell of a round in pieces adds up to its samples, and the longest of them went first."""
    loading = {"cost": lengths_of(), "padded": False}
    case = {"policy": "factoring:scheme=self,piece=2", "loop": "round", "loading": loading}
    found = run_ranks(2, divided_by_cost, [case])
    order, lengths_here, mean = Order(COUNT, SEED).epoch(0), lengths_of(), lengths_of().mean()
    for number in range(COUNT // BATCH):
        of_round = lengths_here[order[number * BATCH : (number + 1) * BATCH]]
        assert sum(parts[0] for parts in found[0][0]["parts"][number]) == of_round.sum()
    used, start = [rank[0]["used"][0] for rank in found], [0, 0]
    for number in range(COUNT // BATCH):
        for rank, pieces in enumerate(found[0][0]["pieces"][number]):
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
def test_parts_are_of_equal_cost_where_ranks_are_equal() -> None:
    cost = {"cost": lengths_of(), "padded": False}
    case = {"policy": "equal", "limits": ((0, None),) * 3, "loading": cost}
    rounds = run_ranks(3, divided_by_cost, [case])[0][0]
    first = np.array(rounds["costs"][0])  # of a round that was divided by the costs as they were given
    lengths_of_round = lengths_of()[Order(COUNT, SEED).epoch(0)[:BATCH]]
    assert first.max() < 1.05 * first.mean()
    assert first.sum() == pytest.approx(lengths_of_round.sum() / lengths_of().mean())  # in mean samples
    slices = np.array([part.sum() for part in np.array_split(lengths_of_round, 3)])
    assert slices.max() > 1.2 * slices.mean(), "equal counts would have done as well"


@guarantee(
    "Costs that are not positive and finite, too few, or different between ranks raise one error on every "
    "rank."
)
def test_what_is_refused_is_refused_on_every_rank_in_a_sentence() -> None:
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
        ({}, right, "nothing was wrong"),
    ]
    for sentences in run_ranks(2, refused, [(options, loading) for options, loading, _ in cases]):
        for sentence, (_, _, expected) in zip(sentences, cases, strict=True):
            assert expected in sentence


@guarantee(
    "Padding by a collate function is found from the shortest and "
    "the longest sample, unless an option says it."
)
def test_padding_is_found_by_trying() -> None:
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
