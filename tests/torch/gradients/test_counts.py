"""Losses that are means over tokens: the gradient is that of all tokens of the round, whoever ran how many."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.errors import PacelineError
from paceline.torch import Pace
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.sharding import possible
from support.token_jobs import collectives, counts_on_some, tokens
from support.torch_jobs import UNEVEN, Samples, fresh

pytestmark = pytest.mark.processes

LOOSE = ((0, None),) * 3
CASES: dict[str, dict[str, Any]] = {
    "whole": {"policy": UNEVEN, "limits": LOOSE},
    "clipped": {"policy": UNEVEN, "limits": LOOSE, "clip": True},
    "sums": {"policy": UNEVEN, "limits": LOOSE, "reduction": "sum"},
    "by round, accumulated": {"policy": UNEVEN, "limits": LOOSE, "loop": "round", "micro_batch": 3},
    "by round, moving": {"policy": "factoring", "loop": "round"},
    "pieces, moving, clipped": {"policy": "factoring:portion=0.3", "loop": "pieces", "clip": True},
    "empty batches": {"policy": UNEVEN, "limits": LOOSE, "fill": False},
    "the same bits": {"policy": "factoring", "loop": "round", "deterministic": True, "quantum": 2},
    "prefetching": {"policy": "level", "workers": 1},
    "means of sentences": {"policy": UNEVEN, "limits": LOOSE, "by_sentence": True},
    "means of sentences, moving": {"policy": "factoring", "loop": "round", "by_sentence": True},
    "sums of sentences by hook": {
        "policy": UNEVEN,
        "limits": LOOSE,
        "weigh": "hook",
        "by_sentence": True,
        "reduction": "sum",
    },
    "hardly any": {"policy": UNEVEN, "limits": LOOSE, "rare": 30},
    "hardly any, moving": {"policy": "factoring", "loop": "round", "rare": 30},
    "by hook": {"policy": UNEVEN, "limits": LOOSE, "weigh": "hook"},
    "by hook, hardly any": {"policy": UNEVEN, "limits": LOOSE, "weigh": "hook", "rare": 30},
    "by hook, accumulated": {
        "policy": UNEVEN,
        "limits": LOOSE,
        "weigh": "hook",
        "loop": "round",
        "micro_batch": 3,
        "fill": False,
    },
    "sums by hook": {"policy": UNEVEN, "limits": LOOSE, "weigh": "hook", "reduction": "sum"},
    "sharded": {"policy": UNEVEN, "limits": LOOSE, "sharded": True, "clip": True},
    "sharded, accumulated": {
        "policy": UNEVEN,
        "limits": LOOSE,
        "sharded": True,
        "loop": "round",
        "micro_batch": 5,
        "rare": 30,
    },
}
CASES = possible(CASES)


@guarantee("With `count=`, means and sums over tokens are those of one process, also if a rank has no token.")
def test_means_over_tokens_are_those_of_one_process() -> None:
    found = run_ranks(3, tokens, list(CASES.values()))
    for number, name in enumerate(CASES):
        for parameters, losses in (rank[number] for rank in found):
            assert parameters < 1e-12, f"{name}: relative difference {parameters:.1e}"
            assert losses < 1e-12, f"{name}: losses differ by {losses:.1e}"


def test_the_total_is_summed_beside_the_gradients() -> None:
    for said in run_ranks(2, collectives):
        assert said == [("forward", True), ("backward", True)]


@guarantee("`count=` on one rank only, or for some losses under `drop=`, raises before any rank steps.")
def test_a_count_on_one_rank_only_is_told_on_all() -> None:
    for sentence in run_ranks(3, counts_on_some):
        assert sentence.startswith(
            "round 0: rank 0 gave a count with the loss, and rank 1, 2 did not; expected count="
        )


def test_counts_that_are_none() -> None:
    model = fresh(torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def run(pace: Pace, *counts: Any) -> None:
        given = iter(counts)
        for x, y, _ in pace.loader(Samples(20)):
            pace.backward(torch.nn.functional.cross_entropy(model(x), y), count=next(given))
            pace.step(optimizer)

    for count in (-1, float("nan"), "x", torch.ones(2)):
        with pytest.raises(PacelineError, match="expected what the loss is a mean over"):
            run(Pace(model, 10, "equal"), count)
    with pytest.raises(PacelineError, match="one piece was given a count"):
        run(Pace(model, 10, "equal", loop="pieces", micro_batch=5), 3, None)
    run(Pace(model, 10, "equal"), 0, 0)
    assert all(torch.isfinite(p).all() for p in model.parameters())
