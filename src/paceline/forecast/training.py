"""Training many small networks at once: one Levenberg-Marquardt step of all of them, no loop over models."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from paceline.forecast.networks import Network
from paceline.rounds import Array

DECAY = 1e-4  # pulls weights towards 0, in units of the (normalised) squared error
FIRM = 10.0, 0.3  # damping grows by the first after a step that made things worse, else shrinks by the second


class Fit(NamedTuple):
    """Parameters (models, P) and damping (models,) after a step, and what it took off the loss (models,)."""

    parameters: Array
    damping: Array
    gained: Array


def improve(
    network: Network, parameters: Array, damping: Array, inputs: Array, targets: Array, weights: Array
) -> Fit:
    """One Levenberg-Marquardt step on the weighted mean square error of each model.

    parameters (models, P), damping (models,), inputs (models, samples, features), targets and weights
    (models, samples). A step that raises a model's loss is not taken.
    """
    weights = weights / np.maximum(weights.sum(axis=1, keepdims=True), 1e-12)

    def loss(output: Array, parameters: Array) -> Array:
        return (weights * (output - targets) ** 2).sum(axis=1) + DECAY * (parameters**2).sum(axis=1)

    output, jacobian = network.jacobian(parameters, inputs)
    weighted = jacobian * weights[..., None]
    curvature = weighted.swapaxes(1, 2) @ jacobian
    slope = (weighted.swapaxes(1, 2) @ (output - targets)[..., None])[..., 0] + DECAY * parameters
    size = parameters.shape[1]
    diagonal = np.arange(size)
    curvature[:, diagonal, diagonal] += DECAY + damping[:, None] * (curvature[:, diagonal, diagonal] + DECAY)
    moved = parameters - np.linalg.solve(curvature, slope[..., None])[..., 0]
    gained = loss(output, parameters) - loss(network.forward(moved, inputs), moved)
    better = gained > 0
    return Fit(
        np.where(better[:, None], moved, parameters),
        np.clip(damping * np.where(better, FIRM[1], FIRM[0]), 1e-6, 1e6),
        np.where(better, gained, 0.0),
    )
