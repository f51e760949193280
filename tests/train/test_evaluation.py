"""The workers evaluate the model together; what a lost one had claimed is evaluated by the first of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import datasets
from paceline.data.datasets import Data, load
from paceline.learners import models
from paceline.train import evaluation


class Told:
    """What all workers have told. claimed: so many parts by others. lost_after: looks until one is missed."""

    def __init__(self, claimed: int = 0, lost_after: int | None = None) -> None:
        self.words: dict[str, Any] = {}
        self._claimed, self._left = claimed, lost_after
        self.first = True

    @property
    def changed(self) -> bool:
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0

    def post(self, key: str, words: Any = 1) -> None:
        self.words[key] = words

    def posted(self, key: str) -> bool:
        return key in self.words

    def read(self, key: str) -> Any:
        return self.words[key]

    def claim(self, key: str) -> int:
        self._claimed += 1
        return self._claimed - 1


def untrained() -> tuple[Data, torch.nn.Module]:
    """A test set, and a model that was never trained."""
    data = load("digits")
    return data, models.create("mlp", data.x_train.shape[1:], data.classes)


@pytest.mark.parametrize("claimed", [0, 1, 3])
def test_what_a_lost_worker_had_claimed_is_evaluated_all_the_same(
    claimed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluation, "TEST_CHUNK", 64)
    monkeypatch.setattr(evaluation, "LOOK", 0.001)
    data, model = untrained()
    with torch.no_grad():
        whole = model(torch.from_numpy(datasets.floats(data.x_test))).argmax(1).numpy()
    link, kept, taken = Told(claimed, lost_after=3), list[int](), list[int]()
    found = evaluation.claimed(link, model, data, lambda: kept.append(1), lambda: taken.append(1))  # type: ignore[arg-type]
    assert found == np.mean(whole == data.y_test)
    assert (kept, taken) == ([1], [])
    assert not link.posted(evaluation.DONE)


def test_one_that_is_not_first_evaluates_the_kept_model_and_stays_until_all_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(evaluation, "LOOK", 0.001)
    data, model = untrained()
    link, taken = Told(), list[int]()
    link.first = False
    link.post(evaluation.KEPT)
    after = evaluation.chunks(data)

    def claim(key: str) -> int:
        nonlocal after
        number = evaluation.chunks(data) - after
        after -= 1
        if after < -3:
            evaluation.release(link)  # type: ignore[arg-type]
        return number

    link.claim = claim  # type: ignore[method-assign]
    assert evaluation.claimed(link, model, data, lambda: None, lambda: taken.append(1)) is None  # type: ignore[arg-type]
    assert taken == [1]
    assert sum(
        link.posted(f"right/{number}") for number in range(evaluation.chunks(data))
    ) == evaluation.chunks(data)
