"""Trainers of trl and sentence-transformers, if they are installed, against one process with the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support import hosts
from support.guarantees import guarantee
from support.later import later, skip_without
from support.ranks import run_ranks

skip_without("trl")
skip_without("sentence_transformers")
jobs = later("support.trl_jobs", needs="transformers")

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hosts")]


@guarantee(
    "Accelerate, Fabric, Lightning, the Trainer, TRL, sentence-transformers and Ray Train train the model of "
    "one process."
)
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "CosineSimilarityLoss"])
def test_equals_one_process(kind: str, accumulate: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected, losses = jobs.trained(kind, str(tmp_path / "one"), 1, 1, None)
    for parameters, logged, warned in run_ranks(3, jobs.balanced, str(tmp_path), kind, accumulate):
        # They compute in float32; a key's bias, on which attention does not depend, is nothing but its rounding.
        both = zip(map(torch.tensor, parameters), map(torch.tensor, expected), strict=True)
        counted = [(ours, theirs) for ours, theirs in both if theirs.abs().max() > 1e-9]
        assert len(counted) > 0.8 * len(expected)
        assert hosts.difference(*zip(*counted, strict=True)) < 1e-6
        assert logged == pytest.approx(losses, abs=1e-6)
        assert not [words for words in warned if "compares the samples" in words]


@guarantee(
    "A loss of sentence-transformers or pytorch-metric-learning that compares samples causes one warning "
    "with its name."
)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("MultipleNegativesRankingLoss", "MultipleNegativesRankingLoss"),
        ("kto", "the loss of KTOTrainer"),
        ("dpo, aot", "the loss 'aot' of DPOTrainer"),
        ("kto, unpaired", ""),
    ],
)
def test_a_loss_that_compares_samples_is_warned_of(
    kind: str, name: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    if kind.endswith("Loss"):
        jobs.embedder(str(tmp_path / "one"))
    found = run_ranks(3, jobs.balanced, str(tmp_path), kind, 1)
    told = [words for words in found[0][2] if "compares the samples" in words]
    assert len(told) == bool(name)
    assert not name or told[0].startswith(name)
