"""What a parameter server learns in tests: the mean of fixed points."""

from __future__ import annotations

from typing import Any

import numpy as np


class Quadratic:
    """f(w; x) = |w - x|^2 / 2 over fixed points x; remembers what was computed."""

    def __init__(self, *shape: int, mean: float = 1.0) -> None:
        self.x = np.random.default_rng(0).normal(mean, 1.0, shape)
        self.used: list[Any] = []  # samples of each gradient
        self.gradients: list[tuple[int, Any]] = []  # and how many they were, with the gradient

    def start(self) -> Any:
        return np.zeros(self.x.shape[1])

    def gradient(self, values: Any, samples: Any) -> tuple[Any, float]:
        away = values - self.x[samples]
        self.used.append(samples)
        self.gradients.append((len(samples), away.mean(0)))
        return away.mean(0), float((away**2).sum(-1).mean() / 2)
