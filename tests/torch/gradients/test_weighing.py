"""The forms that a loss may have: already normalised over all ranks, or a function of a statistic of the batch."""

from __future__ import annotations

from typing import Any

import pytest

from support.form_jobs import counted_by_hook, forms, forward_method, refused
from support.guarantees import guarantee
from support.ranks import run_ranks
from support.sharding import possible
from support.torch_jobs import UNEVEN

pytestmark = pytest.mark.processes

LOOSE = {"policy": UNEVEN, "limits": ((0, None),) * 3}
CASES: dict[str, dict[str, Any]] = {
    **{form: {"form": form, **LOOSE} for form in ("divided", "differentiable", "in place", "center")},
    "by hook": {"form": "divided", **LOOSE, "weigh": "hook"},
    "a differentiable sum by hook": {"form": "differentiable", **LOOSE, "weigh": "hook"},
    "weighted by hook": {"form": "divided", **LOOSE, "weigh": "hook", "weighted": True},
    "empty batches": {"form": "divided", **LOOSE, "fill": False},
    "scaled": {"form": "divided", **LOOSE, "scaled": True},
    "by round, accumulated": {"form": "known", **LOOSE, "loop": "round", "micro_batch": 3},
    "by round, moving": {"form": "known", "policy": "factoring", "loop": "round"},
    "by round, scaled": {"form": "known", **LOOSE, "loop": "round", "micro_batch": 3, "scaled": True},
    "pieces, moving": {"form": "known", "policy": "factoring:portion=0.3", "loop": "pieces"},
    "the same bits": {
        "form": "known", "policy": "factoring", "loop": "round", "deterministic": True, "quantum": 2,
    },
    "by hook, accumulated": {
        "form": "known", **LOOSE, "weigh": "hook", "loop": "round", "micro_batch": 3, "fill": False,
    },
    "sharded": {"form": "divided", **LOOSE, "sharded": True},
    "sharded, accumulated": {
        "form": "known", **LOOSE, "sharded": True, "loop": "round", "micro_batch": 5,
    },
}  # fmt: skip
CASES = possible(CASES)


@guarantee(
    'Losses over the samples of all ranks (`reduction="global"`, gathered keys) train the model of one '
    "process."
)
def test_losses_over_all_ranks_are_those_of_one_process() -> None:
    found = run_ranks(3, forms, list(CASES.values()))
    for number, name in enumerate(CASES):
        for parameters, losses in (rank[number] for rank in found):
            assert parameters < 1e-12, f"{name}: relative difference {parameters:.1e}"
            assert losses < 1e-12, f"{name}: losses differ by {losses:.1e}"


@guarantee(
    'Forms of a loss that the chosen options cannot weight (`"global"` with `drop=`, `weighted` with '
    "`count=` under the hook) raise before the step."
)
@pytest.mark.parametrize(
    ("given", "idle", "options", "words"),
    [
        ({"count": 3}, None, {}, "it is already normalised, so leave count= out"),
        ({}, 2, {}, "a filler sample counts for nothing, and would count in a sum over ranks"),
        ({}, None, {"local": True}, "with LocalSGD each rank steps "),
        (
            {},
            None,
            {"loop": "round", "micro_batch": 2, "drop": 9.0},
            "drop= leaves out samples that the loss was normalised with",
        ),
    ],
)
def test_a_loss_over_all_ranks_where_it_cannot_be_one_raises(
    given: dict[str, Any], idle: int | None, options: dict[str, Any], words: str
) -> None:
    said = run_ranks(3, _refused, given, idle, options)
    for rank, sentence in enumerate(said):
        assert words in sentence or (idle is not None and rank != idle)


def _refused(rank: int, ranks: int, given: dict[str, Any], idle: int | None, options: Any) -> str:
    return refused(rank, ranks, given, idle, **options)


@guarantee(
    'Forms of a loss that the chosen options cannot weight (`"global"` with `drop=`, `weighted` with '
    "`count=` under the hook) raise before the step."
)
@pytest.mark.parametrize("how", ["own", "pace"])
def test_a_weighted_loss_with_a_count_under_the_hook_raises_before_a_step(how: str) -> None:
    for sentence in run_ranks(3, counted_by_hook, how):
        assert "is not divided by the count of all ranks; call pace.backward(loss, count=...)" in sentence


@guarantee(
    "Ranks with different numbers of samples train the model of one process, under DDP, FSDP2, "
    "`ElasticPace` and in every form of loop."
)
def test_the_forward_method_of_ddp_is_its_forward_pass() -> None:
    for through in ("call", "forward"):
        for sentence, far in run_ranks(3, forward_method, through):
            assert sentence == ""
            assert far < 1e-12


@pytest.mark.parametrize("through", ["module", "module.forward"])
def test_a_forward_pass_that_ddp_does_not_run_raises(through: str) -> None:
    for sentence, _ in run_ranks(3, forward_method, through):
        assert "expected one of its own forward pass" in sentence
