"""The small networks of ``narx`` and ``recurrent``: many models evaluated and differentiated at once.

A network is a frozen configuration; its parameters are one row of an array of shape (models, P), and ``draw`` gives
the initial ones of a model. Inputs have shape (models, samples, features); outputs (models, samples).
``jacobian`` also gives d output / d parameters, shape (models, samples, P), which Levenberg-Marquardt needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from paceline.rounds import Array


def _split(parameters: Array, *shapes: tuple[int, ...]) -> list[Array]:
    """The rows of (models, P) cut into arrays of shape (models, *shape)."""
    parts, start = [], 0
    for shape in shapes:  # np.split takes as long as the network itself
        end = start + math.prod(shape)
        parts.append(parameters[..., start:end].reshape(-1, *shape))
        start = end
    return parts


@dataclass(frozen=True, slots=True)
class Perceptron:
    """One hidden layer of tanh and a linear output: w . tanh(W x + b) + c."""

    features: int
    hidden: int

    @property
    def parameters(self) -> int:
        """P, the number of parameters of one model."""
        return self.hidden * (self.features + 2) + 1

    def draw(self, rng: np.random.Generator) -> Array:
        spread = np.sqrt(3 / (self.features + self.hidden))
        first = rng.uniform(-spread, spread, self.hidden * self.features)
        second = rng.uniform(0.5, 1, self.hidden) / self.hidden
        return np.concatenate([first, np.zeros(self.hidden), second, [0.0]])

    def _run(self, parameters: Array, inputs: Array) -> tuple[Array, Array, Array]:
        """(output, hidden units (models, samples, hidden), their weights in the output)."""
        shapes = (self.hidden, self.features), (self.hidden,), (self.hidden,), (1,)
        first, bias, second, level = _split(parameters, *shapes)
        active = np.tanh(inputs @ first.swapaxes(1, 2) + bias[:, None])
        return (active @ second[..., None])[..., 0] + level, active, second

    def forward(self, parameters: Array, inputs: Array) -> Array:
        return self._run(parameters, inputs)[0]

    def jacobian(self, parameters: Array, inputs: Array) -> tuple[Array, Array]:
        output, active, second = self._run(parameters, inputs)
        slope = (1 - active**2) * second[:, None]  # d output / d (W x + b)
        weights = slope[..., None] * inputs[:, :, None]  # (models, samples, hidden, features)
        flat = weights.reshape(*output.shape, -1)
        return output, np.concatenate([flat, slope, active, np.ones((*output.shape, 1))], axis=-1)


@dataclass(frozen=True, slots=True)
class RecurrentNetwork:
    """Recurrent units that read the features one after another, starting from zeros, and a linear output.

    lstm: LSTM units (gates in the order i, f, g, o, one bias) instead of simple ones, h <- tanh(u x + U h + b).
    """

    features: int  # look-back: one number in each step, oldest first
    hidden: int
    lstm: bool = False

    @property
    def gates(self) -> int:
        return self.hidden * (4 if self.lstm else 1)

    @property
    def parameters(self) -> int:
        """P, the number of parameters of one model."""
        return self.gates * (self.hidden + 2) + self.hidden + 1

    def draw(self, rng: np.random.Generator) -> Array:
        spread = np.sqrt(1 / self.hidden)
        bias = np.zeros(self.gates)
        if self.lstm:
            bias[self.hidden : 2 * self.hidden] = 1.0  # the forget gates are open at first
        inner = rng.uniform(-spread, spread, self.gates * (self.hidden + 1))
        return np.concatenate([inner, bias, rng.uniform(-spread, spread, self.hidden), [0.0]])

    def _parts(self, parameters: Array) -> list[Array]:
        h, g = self.hidden, self.gates
        return _split(parameters, (g,), (g, h), (g,), (h,), (1,))

    def forward(self, parameters: Array, inputs: Array) -> Array:
        *_, readout, level = self._parts(parameters)
        return (self._run(parameters, inputs)[-1][0] @ readout[..., None])[..., 0] + level

    def _run(self, parameters: Array, inputs: Array) -> list[tuple[Array, Array, Array]]:
        """(h, cell, gates) after each step, beginning with the zeros before the first; each (models, samples, .)."""
        enter, repeat, bias, *_ = self._parts(parameters)
        h = cell = np.zeros((*inputs.shape[:2], self.hidden))
        steps = [(h, cell, h)]
        for k in range(self.features):
            total = inputs[..., k, None] * enter[:, None] + h @ repeat.swapaxes(1, 2) + bias[:, None]
            if self.lstm:
                i, f, g, o = _quarters(total)
                i, f, g, o = _sigmoid(i), _sigmoid(f), np.tanh(g), _sigmoid(o)
                cell = f * cell + i * g
                h = o * np.tanh(cell)
                gates = np.concatenate([i, f, g, o], axis=-1)
            else:
                h = gates = np.tanh(total)
            steps.append((h, cell, gates))
        return steps

    def jacobian(self, parameters: Array, inputs: Array) -> tuple[Array, Array]:
        _, repeat, _, readout, level = self._parts(parameters)
        steps = self._run(parameters, inputs)
        final = steps[-1][0]
        output = (final @ readout[..., None])[..., 0] + level
        models, samples = output.shape
        d_enter = np.zeros((models, samples, self.gates))
        d_repeat = np.zeros((models, samples, self.gates, self.hidden))
        d_bias = np.zeros_like(d_enter)
        d_h = np.broadcast_to(readout[:, None], final.shape)  # backpropagation through time, sample by sample
        d_cell = np.zeros_like(final)
        for k in range(self.features, 0, -1):
            (_, cell, gates), (before, cell_before, _) = steps[k], steps[k - 1]
            if self.lstm:
                i, f, g, o = _quarters(gates)
                bent = np.tanh(cell)
                d_cell = d_cell + d_h * o * (1 - bent**2)
                parts = [d_cell * g * i * (1 - i), d_cell * cell_before * f * (1 - f)]
                parts += [d_cell * i * (1 - g**2), d_h * bent * o * (1 - o)]
                d_total = np.concatenate(parts, axis=-1)
                d_cell = d_cell * f
            else:
                d_total = d_h * (1 - gates**2)
            d_enter += d_total * inputs[..., k - 1, None]
            d_repeat += d_total[..., None] * before[:, :, None]
            d_bias += d_total
            d_h = d_total @ repeat
        one = np.ones((models, samples, 1))
        blocks = [d_enter, d_repeat.reshape(models, samples, -1), d_bias, final, one]
        return output, np.concatenate(blocks, axis=-1)


Network = Perceptron | RecurrentNetwork


def _quarters(gates: Array) -> list[Array]:
    size = gates.shape[-1] // 4
    return [gates[..., k * size : (k + 1) * size] for k in range(4)]


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))
