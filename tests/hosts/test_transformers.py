"""Balanced batches under the real Hugging Face Trainer: exact, resumable, and clear about what it can't do."""

from __future__ import annotations

from typing import Any

import pytest

from support import hosts
from support.guarantees import guarantee
from support.later import later
from support.ranks import run_ranks

jobs = later("support.trainer_jobs", needs="transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]


def test_as_one_process(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["plain"][0] < 1e-12
        assert rank["reported"] == (8, 2.0, 8)
    hosts.every_sample_once([rank["plain"][1] for rank in found])


def test_two_ranks_also_resume_after_three(found: list[dict[str, Any]], folder: str) -> None:
    both = run_ranks(2, jobs.cases, folder)
    for rank in both:
        assert rank["plain"][0] < 1e-12
        assert rank["fewer"][0] < 1e-12
    hosts.every_sample_once([rank["plain"][1] for rank in both])
    second = [i for rank in found for i in rank["resumed"][1][1]] + [
        i for rank in both for i in rank["fewer"][1][1]
    ]
    assert sorted(second) == list(range(hosts.COUNT))


def test_accumulates_and_clips_with_a_custom_loss(found: list[dict[str, Any]]) -> None:
    assert max(rank["clipped"] for rank in found) < 1e-12


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("loop", ["whole", "round"])
def test_accumulates_in_as_many_turns_on_every_rank_or_as_each_needs(
    found: list[dict[str, Any]], loop: str
) -> None:
    for off, _, ran in (rank[f"accumulated, {loop}"] for rank in found):
        assert off < 1e-12
        assert ran == {"whole": "whole", "round": "pieces"}[loop]
    hosts.every_sample_once([rank[f"accumulated, {loop}"][1] for rank in found])


def test_a_short_last_batch_is_left_out_if_the_trainer_is_asked_to(found: list[dict[str, Any]]) -> None:
    full = hosts.COUNT // 36
    assert all(rank["dropped"][0] == full * hosts.EPOCHS for rank in found)
    assert [sum(each) for each in zip(*(rank["dropped"][1] for rank in found), strict=True)] == [
        36 * full
    ] * 2


def test_work_may_move_within_the_round(found: list[dict[str, Any]]) -> None:
    assert max(rank["moved"][0] for rank in found) < 1e-12
    hosts.every_sample_once([rank["moved"][1] for rank in found])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_mean_over_tokens(found: list[dict[str, Any]], accumulation: int) -> None:
    for off, loss_off, tokens in (rank[f"tokens, {accumulation}"] for rank in found):
        assert off < 1e-6  # the model's loss is float32
        assert abs(loss_off) < 1e-6
        assert tokens == 2 * 8 * hosts.COUNT


@guarantee("`train_sampling_strategy` divides rounds by length, with the gradient and loss of one process.")
@pytest.mark.parametrize("strategy", ["group_by_length", "batch_rebalance"])
def test_sampling_by_length_is_balancing_by_length(found: list[dict[str, Any]], strategy: str) -> None:
    for off, loss_off, lengths_are_known in (rank[f"by length, {strategy}"] for rank in found):
        assert off < 1e-6  # the model's loss is float32
        assert abs(loss_off) < 1e-6
        assert lengths_are_known


@pytest.mark.parametrize("how", ["resumed", "restored"])
def test_resumes_where_it_was_saved(found: list[dict[str, Any]], how: str) -> None:
    cases = [rank[how] for rank in found]
    for off, _, _, epoch in cases:
        assert off < 1e-12
        assert epoch == 2.0
    hosts.every_sample_once(
        [
            [first + second for first, second in zip(before, after, strict=True)]
            for _, before, after, _ in cases
        ]
    )


def test_bf16(found: list[dict[str, Any]]) -> None:
    for off, dtypes in (rank["bf16"] for rank in found):
        assert dtypes == "{torch.bfloat16}"
        assert off < 0.02


@guarantee("Evaluation within a balanced run gives the framework's own results.")
def test_evaluates_as_a_plain_trainer_does(found: list[dict[str, Any]]) -> None:
    for pairs in (rank["evaluated"] for rank in found):
        assert len(pairs) == (1 + 4 + 1) + (1 + 2 + 1) + (1 + 4 + 1)
        assert all(ours == theirs for ours, theirs in pairs), pairs


@guarantee("Learning rates and `len(loader)` under Accelerate are those of the program without Paceline.")
def test_a_script_of_accelerates_own_ends_with_the_same_model(found: list[dict[str, Any]]) -> None:
    for apart, moved in (rank["ported"] for rank in found):
        assert apart < 1e-5  # it computes in float32
        assert moved > 1e-3


@guarantee("A Trainer with its own sampler raises with the sampler's name.")
def test_mistakes_raise(found: list[dict[str, Any]]) -> None:
    for says in (rank["refused"] for rank in found):
        assert "expected 'whole' or 'round'" in says["looped"]
        assert "auto_find_batch_size=True" in says["searched"]
        assert "get_train_dataloader() was overridden" in says["loader"]
        assert "drawn by a WeightedRandomSampler" in says["sampler"]
        assert "the data set is a list_iterator" in says["streamed"]


def test_of_a_slice_that_a_loss_gathers_no_more_than_that_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("paceline.hosts.transformers")
    sent: list[Any] = []
    monkeypatch.setattr(transformers.peers, "gather", lambda item: [sent.append(item), item][1:])
    whole = torch.arange(8000.0).reshape(1000, 8)
    assert torch.equal(transformers._gather_unlike(whole[5:7]), whole[5:7])
    assert sent[0].untyped_storage().nbytes() == 2 * 8 * 4
