"""What the trained forecasts share: their options, training while they predict, and the way back to EMA.

Training takes one step a round on the window of past rounds, stops early, and starts again with each block.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from paceline.errors import PacelineError
from paceline.forecast.ema import check_gain
from paceline.forecast.networks import Network
from paceline.forecast.protocol import Reading
from paceline.forecast.saved import load
from paceline.forecast.training import improve
from paceline.forecast.window import BLOCK, SPEED, LearnedState, begin, remember, units
from paceline.rounds import Array

LEAST = 96  # rounds in the window before training begins
SETTLE = 20  # readings of a worker before its units are known
POOLED_SAMPLES = 4096  # at most in a training step of a pooled model
EACH_SAMPLES = 256  # at most for one model, where every worker has its own
TURN = 128  # models that train in one round, where every worker has its own; the others in the next
CALM = (
    1e-4,
    4,
)  # stop when the loss falls by less than this in so many consecutive steps (LB-BSP, section 4.2)


@dataclass(frozen=True, slots=True)
class Learned:
    """Options of every trained forecast.

    pooled: one model for all workers, each in its own units; else one for each worker.
    warmup: rounds in which EMA predicts; 500 in the paper. A saved model (``model``) is used after 20.
    window: rounds that training looks back on.
    fallback: EMA predicts where it has been more accurate of late (running squared error).
    gain: of that EMA.
    model: file of a model that ``saved.save`` wrote, to start from.
    seed: of the first weights and of the samples drawn where there are too many to train on all.
    """

    pooled: bool = True
    warmup: int = 500
    window: int = 512
    fallback: bool = True
    gain: float = 0.2
    model: str | None = None
    seed: int = 0
    needs_readings: ClassVar[bool] = False
    trains: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_gain(self.name, self.gain)
        if self.warmup < 0:
            raise PacelineError(f"forecast {self.name!r}: warmup={self.warmup}: expected 0 or more rounds")
        if self.window < 2 * LEAST:
            raise PacelineError(
                f"forecast {self.name!r}: window={self.window}: expected at least {2 * LEAST} rounds"
            )

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def network(self) -> Network:
        raise NotImplementedError

    @property
    def lags(self) -> list[tuple[int, int]]:
        """The network's inputs in order: (rounds back, channel); 0 rounds back is the round to predict."""
        raise NotImplementedError

    @property
    def lookback(self) -> int:
        return max(lag for lag, _ in self.lags)

    def init(self, shape: tuple[int, ...]) -> LearnedState:
        models = shape[:-1] if self.pooled else shape
        if self.model is None:
            start = self.network.draw(np.random.default_rng(self.seed))
        else:
            start = load(Path(self.model), self.network)
        return begin(shape, models, start, self.window, self.lookback)

    def step(self, state: LearnedState, reading: Reading) -> tuple[Array, LearnedState]:
        state = _train(self, remember(state, reading, self.gain))
        guesses = np.stack([_predict(self, state), state.ema])
        usable = (state.number >= SETTLE) & np.isfinite(guesses[0])
        if self.model is None:
            usable &= state.rounds >= max(self.warmup, LEAST + BLOCK)
        if self.fallback:
            usable &= state.wrong[0] < state.wrong[1]
        return np.where(usable, guesses[0], guesses[1]), state._replace(guesses=guesses)


def _predict(config: Learned, state: LearnedState) -> Array:
    """The network's prediction for the round to come, shape (..., n), in samples/s."""
    mean, spread = units(state)
    now = np.concatenate([np.full((1, *state.ema.shape), np.nan), state.ahead])
    rows = (np.concatenate([state.tail, now[None]]) - mean) / spread
    inputs = np.stack([rows[-1 - lag, channel] for lag, channel in config.lags], axis=-1)
    inputs = np.nan_to_num(inputs, nan=0.0)  # unknown: the mean
    features = inputs.shape[-1]
    parameters = state.parameters.reshape(-1, config.network.parameters)
    output = config.network.forward(parameters, inputs.reshape(len(parameters), -1, features))
    speed = mean[SPEED] + spread[SPEED] * output.reshape(state.ema.shape)
    return np.clip(speed, 0.1 * state.ema, 10 * state.ema)


def _train(config: Learned, state: LearnedState) -> LearnedState:
    """One training step of the models that have not stopped; a turn of them where they are too many."""
    length, back = len(state.window), config.lookback
    held = min(int(state.rounds) // BLOCK * BLOCK, length)
    calm = state.calm.ravel()
    active = np.flatnonzero(calm < CALM[1])
    if held < LEAST or not len(active):
        return state
    workers = state.ema.shape[-1]
    times = np.arange(length - held + back, length)
    rng = np.random.default_rng([config.seed, int(state.rounds)])
    if config.pooled:
        time, worker = (x.ravel() for x in np.meshgrid(times, np.arange(workers), indexing="ij"))
        if len(time) > POOLED_SAMPLES:
            time, worker = rng.choice(times, POOLED_SAMPLES), rng.integers(workers, size=POOLED_SAMPLES)
        worker = active[:, None] * workers + worker  # leading axes: realizations, one model each
    else:
        time = times if len(times) <= EACH_SAMPLES else rng.choice(times, EACH_SAMPLES, replace=False)
        if len(active) > TURN:
            first = int(state.rounds) * TURN % calm.size
            active = np.roll(active, -int(np.searchsorted(active, first)))[:TURN]
        worker = np.repeat(active[:, None], len(time), axis=1)
    rows = state.window.reshape(length, 4, -1)
    mean, spread = (x.reshape(3, -1) for x in units(state))

    def normal(lag: int, channel: int) -> Array:
        return (rows[time - lag, channel, worker] - mean[channel, worker]) / spread[channel, worker]

    inputs = np.nan_to_num(np.stack([normal(lag, channel) for lag, channel in config.lags], axis=-1), nan=0.0)
    targets = normal(0, SPEED)
    weights = np.where(np.isfinite(targets), rows[time, 3, worker], 0.0)
    parameters, damping = state.parameters.reshape(calm.size, -1).copy(), state.damping.ravel().copy()
    fit = improve(
        config.network, parameters[active], damping[active], inputs, np.nan_to_num(targets, nan=0.0), weights
    )
    calm = calm.copy()
    calm[active] = np.where(fit.gained < CALM[0], calm[active] + 1, 0)
    parameters[active], damping[active] = fit.parameters, fit.damping
    return state._replace(
        parameters=parameters.reshape(state.parameters.shape),
        damping=damping.reshape(state.damping.shape),
        calm=calm.reshape(state.calm.shape),
    )
