"""Losses that are means over tokens: some samples have many, some have none that count."""

from __future__ import annotations

import torch
from torch import nn

COUNT, BATCH, LENGTH, WORDS = 90, 24, 12, 7
IGNORED = -100


def model() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Embedding(WORDS, 5), nn.Tanh(), nn.Linear(5, WORDS)).double()


def loss_of(out: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
    return nn.functional.cross_entropy(
        out.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def means_of_sentences(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of each sentence the mean loss of its tokens that count, 0 where it has none."""
    each = nn.functional.cross_entropy(
        out.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
    )
    return each.view(labels.shape).sum(1) / labels.ne(IGNORED).sum(1).clamp(min=1)
