"""The trained forecasts, ``narx`` and ``recurrent``: their options, training while they predict, and fallback to EMA.

Training takes one step after each round on the window of past rounds, stops early, and starts again with each block.
A prediction takes a tenth of that time, so that it is made in time for the next round. The newest rounds are kept in
blocks: ``recent`` fills up and then moves into ``window``, so that a round copies a block and not the whole past. A
trained network can be saved in a file, from which the next run can start.
"""

from __future__ import annotations

import io
import math
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from paceline.errors import PacelineError, choice, whole
from paceline.files import open_file, write_whole
from paceline.forecast.ema import check_gain
from paceline.forecast.networks import Network, Perceptron
from paceline.forecast.networks import RecurrentNetwork as Layer
from paceline.forecast.protocol import Forecast, Reading, seen, smoothed
from paceline.rounds import Array

__all__ = ["load", "save"]

LEAST = 96  # rounds in the window before training begins
SETTLE = 20  # readings of a worker before its units are known
POOLED_SAMPLES = 4096  # at most in a training step of a pooled model
EACH_SAMPLES = 256  # at most in a training step of one model, if every worker has its own
TURN = 128  # models that train in one round, if every worker has its own; the others train in the next ones
# Training stops after CALM[1] consecutive steps in which the loss falls by less than CALM[0] (LB-BSP, section 4.2).
CALM = 1e-4, 4
BLOCK = 32  # rounds
MEMORY = 1000  # rounds over which a worker's mean and spread are taken
RECENT = 0.02  # weight of the newest squared error in the comparison of a network with EMA
SPEED, CPU, MEMORY_USE = range(3)  # channels
DECAY = 1e-4  # weight decay, in units of the (normalised) squared error
FIRM = 10.0, 0.3  # factors on the damping after a step that raised the loss, and after any other


class LearnedState(NamedTuple):
    """Arrays have shape (..., n) for workers, (...) or (..., n) for models; the channels are speed, cpu, memory."""

    rounds: Array  # rounds so far, shape ()
    number: Array  # readings of each worker
    ema: Array
    mean: Array  # (3, ..., n), running mean of each channel
    spread: Array  # (3, ..., n), running variance
    ahead: Array  # (2, ..., n): cpu and memory for the next round
    tail: Array  # (look-back, 3, ..., n): the newest rounds, newest last
    recent: Array  # (BLOCK, 4, ..., n): rounds not yet in the window; the fourth channel is 1 if present
    window: Array  # (window, 4, ..., n)
    parameters: Array  # (models..., P)
    damping: Array  # (models...)
    calm: Array  # (models...): consecutive training steps that gained little
    guesses: Array  # (2, ..., n): predictions of the network and of EMA for the next round
    wrong: Array  # (2, ..., n): running squared error of both


def remember(state: LearnedState, reading: Reading, gain: float) -> LearnedState:
    """The state after a finished round's speeds and the readings for the next round. gain: of EMA."""
    here = seen(reading.speed)
    value = np.where(here, reading.speed, np.nan)
    blank = np.full(here.shape, np.nan)
    fresh = np.stack([blank if x is None else x for x in (reading.cpu, reading.memory)])
    fresh = np.where(np.isfinite(fresh), fresh, state.ahead)
    # The first round has no reading at its start: the one at its end takes its place.
    used = np.where(np.isnan(state.ahead), fresh, state.ahead)

    error = (state.guesses - value) ** 2
    wrong = smoothed(state.wrong, error, RECENT, here & np.isfinite(error))
    ema = smoothed(state.ema, value, gain, here)
    # An absent worker's speed is filled with its mean, and is not trained on.
    row = np.concatenate([np.where(here, value, ema)[None], used])

    number = state.number + here
    weight = np.maximum(1 / np.maximum(number, 1), 1 / MEMORY)
    mean = np.where(np.isnan(state.mean), row, state.mean)
    moved = row - mean
    there = here & np.isfinite(moved)
    mean = np.where(there, mean + weight * moved, mean)
    spread = np.where(there, (1 - weight) * (state.spread + weight * moved**2), state.spread)

    place = int(state.rounds) % BLOCK
    recent = state.recent.copy()
    recent[place] = np.concatenate([row, here[None]])
    window, calm = state.window, state.calm
    if place == BLOCK - 1:
        window = np.concatenate([window[BLOCK:], recent])
        calm = np.zeros_like(calm)
    return state._replace(
        rounds=state.rounds + 1,
        number=number,
        ema=ema,
        mean=mean,
        spread=spread,
        ahead=fresh,
        tail=np.concatenate([state.tail[1:], row[None]]),
        recent=recent,
        window=window,
        calm=calm,
        wrong=wrong,
    )


def units(state: LearnedState) -> tuple[Array, Array]:
    """Mean and spread of each channel and worker, (3, ..., n), which normalise the inputs."""
    floor = np.full_like(state.mean, 0.02)  # so that noise of a nearly constant reading is not enlarged
    floor[SPEED] = np.nan_to_num(0.01 * state.mean[SPEED], nan=1.0)
    return state.mean, np.maximum(np.sqrt(state.spread), floor)


@dataclass(frozen=True, slots=True)
class Learned(Forecast[LearnedState]):
    """Options of every trained forecast, which ``Narx`` documents (LB-BSP, Alg. 1, manager, lines 4 to 6, section
    4.2).
    """

    pooled: bool = True
    warmup: int = 500
    window: int = 512
    fallback: bool = True
    gain: float = 0.2
    model: str | None = None
    seed: int = 0
    trains: ClassVar[bool] = True
    name: ClassVar[str]

    def __post_init__(self) -> None:
        check_gain(self.name, self.gain)
        whole(f"forecast {self.name!r}: warmup", self.warmup, 0)
        whole(f"forecast {self.name!r}: window", self.window, 2 * LEAST)

    @property
    def network(self) -> Network:
        """The network that is trained and predicts."""
        raise NotImplementedError

    @property
    def lags(self) -> list[tuple[int, int]]:
        """The network's inputs in order, as (rounds back, channel); 0 rounds back is the predicted round."""
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
        blank = np.full(shape, np.nan)
        length = math.ceil(self.window / BLOCK) * BLOCK
        return LearnedState(
            rounds=np.array(0),
            number=np.zeros(shape),
            ema=blank,
            mean=np.full((3, *shape), np.nan),
            spread=np.zeros((3, *shape)),
            ahead=np.full((2, *shape), np.nan),
            tail=np.full((self.lookback, 3, *shape), np.nan),
            recent=np.full((BLOCK, 4, *shape), np.nan),
            window=np.full((length, 4, *shape), np.nan),
            parameters=np.broadcast_to(start, (*models, len(start))).copy(),
            damping=np.ones(models),
            calm=np.zeros(models, dtype=np.int64),
            guesses=np.full((2, *shape), np.nan),
            wrong=np.full((2, *shape), np.nan),
        )

    def step(self, state: LearnedState, reading: Reading) -> tuple[Array, LearnedState]:
        state = remember(state, reading, self.gain)
        guesses = np.stack([_predict(self, state), state.ema])
        usable = (state.number >= SETTLE) & np.isfinite(guesses[0])
        if self.model is None:
            usable &= state.rounds >= max(self.warmup, LEAST + BLOCK)
        if self.fallback:
            usable &= state.wrong[0] < state.wrong[1]
        return np.where(usable, guesses[0], guesses[1]), state._replace(guesses=guesses)

    def train(self, state: LearnedState) -> LearnedState:
        return _train(self, state)


@dataclass(frozen=True, slots=True)
class Narx(Learned):
    """v^k = F(v^{k-1}, v^{k-2}; c^k, c^{k-1}[, c^{k-2}]; m^k, m^{k-1}[, m^{k-2}]), one hidden layer of tanh (LB-BSP,
    eq. (4)).

    Args:
        pooled: One model for all workers, each in its own units; otherwise one for each worker.
        warmup: Rounds in which an EMA predicts; 500 in the paper. A saved model (``model``) is used after 20.
        window: Past rounds that training uses.
        fallback: The EMA predicts for workers for which it has been more accurate recently (running squared error).
        gain: Weight of the newest reading in that EMA.
        model: File of a model that ``save`` wrote, to start from.
        seed: Of the first weights, and of the choice of samples if there are too many to train on all.
        inputs: 8 is the equation as printed, with d = 2; "less than 20 parameters" then allows one hidden unit (11).
            6 takes the window of two as the current reading and one before: two hidden units (17).
        hidden: Hidden units; 0 takes the number above.
    """

    inputs: Literal[6, 8] = 6
    hidden: int = 0
    needs_readings: ClassVar[bool] = True
    name: ClassVar[str] = "narx"

    def __post_init__(self) -> None:
        Learned.__post_init__(self)
        choice("forecast 'narx': inputs", self.inputs, 6, 8)
        whole("forecast 'narx': hidden", self.hidden, 0)

    @property
    def network(self) -> Perceptron:
        return Perceptron(self.inputs, self.hidden or (1 if self.inputs == 8 else 2))

    @property
    def lags(self) -> list[tuple[int, int]]:
        lags = range(3 if self.inputs == 8 else 2)
        return [(1, SPEED), (2, SPEED), *((lag, channel) for channel in (CPU, MEMORY_USE) for lag in lags)]


@dataclass(frozen=True, slots=True)
class Recurrent(Learned):
    """v^k from v^{k-look}, ..., v^{k-1}, without processor and memory readings (LB-BSP, Table 3 (SimpleRNN, LSTM)).

    It is trained online like ``Narx``, and has its other options.

    Args:
        cell: "simple" or "lstm".
        look: The look-back window in rounds, 2 in the paper.
        hidden: Hidden units; the paper does not say how many.
    """

    fallback: bool = False
    cell: Literal["simple", "lstm"] = "simple"
    look: int = 2
    hidden: int = 4
    name: ClassVar[str] = "recurrent"

    def __post_init__(self) -> None:
        Learned.__post_init__(self)
        choice("forecast 'recurrent': cell", self.cell, "simple", "lstm")
        whole("forecast 'recurrent': look", self.look)
        whole("forecast 'recurrent': hidden", self.hidden)

    @property
    def network(self) -> Layer:
        return Layer(self.look, self.hidden, self.cell == "lstm")

    @property
    def lags(self) -> list[tuple[int, int]]:
        return [(lag, SPEED) for lag in range(self.look, 0, -1)]


def _predict(config: Learned, state: LearnedState) -> Array:
    """The network's prediction for the next round, shape (..., n), in samples/s."""
    mean, spread = units(state)
    now = np.concatenate([np.full((1, *state.ema.shape), np.nan), state.ahead])
    rows = (np.concatenate([state.tail, now[None]]) - mean) / spread
    inputs = np.stack([rows[-1 - lag, channel] for lag, channel in config.lags], axis=-1)
    inputs = np.nan_to_num(inputs, nan=0.0)  # the mean for an unknown reading
    features = inputs.shape[-1]
    parameters = state.parameters.reshape(-1, config.network.parameters)
    output = config.network.forward(parameters, inputs.reshape(len(parameters), -1, features))
    speed = mean[SPEED] + spread[SPEED] * output.reshape(state.ema.shape)
    return np.clip(speed, 0.1 * state.ema, 10 * state.ema)


def _train(config: Learned, state: LearnedState) -> LearnedState:
    """One training step of the models that have not stopped; of ``TURN`` of them in turn if they are too many."""
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
    parameters[active], damping[active], gained = improve(
        config.network, parameters[active], damping[active], inputs, np.nan_to_num(targets, nan=0.0), weights
    )
    calm = calm.copy()
    calm[active] = np.where(gained < CALM[0], calm[active] + 1, 0)
    return state._replace(
        parameters=parameters.reshape(state.parameters.shape),
        damping=damping.reshape(state.damping.shape),
        calm=calm.reshape(state.calm.shape),
    )


def improve(
    network: Network, parameters: Array, damping: Array, inputs: Array, targets: Array, weights: Array
) -> tuple[Array, Array, Array]:
    """One Levenberg-Marquardt step on the weighted mean square error of each model: (parameters and damping after it,
    decrease of the loss, (models,)).

    Shapes: parameters (models, P), damping (models,), inputs (models, samples, features), targets and weights
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
    return (
        np.where(better[:, None], moved, parameters),
        np.clip(damping * np.where(better, FIRM[1], FIRM[0]), 1e-6, 1e6),
        np.where(better, gained, 0.0),
    )


def save(path: Path, network: Network, state: LearnedState) -> None:
    """Write a trained model, whole or not at all; of many, the one that is most accurate recently relative to EMA.

    Args:
        path: The file.
        network: Of the forecast whose state this is; the forecast's option ``model`` starts from the file.
        state: The forecast's state.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = state.wrong[0] / state.wrong[1]
    flat = state.parameters.reshape(-1, network.parameters)
    # The mean over the workers of each model.
    ratio = np.where(np.isnan(ratio), np.inf, ratio).reshape(len(flat), -1).mean(axis=1)
    content = io.BytesIO()
    np.savez(content, network=repr(network), parameters=flat[np.argmin(ratio)])
    write_whole(path, content.getvalue())


def load(path: Path, network: Network) -> Array:
    """Read the parameters in a file that ``save`` wrote.

    Args:
        path: The file.
        network: Of the forecast that asks; it must be that of the file.

    Returns:
        The parameters, shape (P,).

    Raises:
        PacelineError: If the file is not of ``save``, or is of another network.
    """
    try:
        with open_file(path) as opened, np.load(opened, allow_pickle=False) as file:
            stored, parameters = str(file["network"]), np.asarray(file["parameters"], float)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise PacelineError(
            f"{path} is not a saved forecast model ({error}); expected a file that save wrote"
        ) from None
    if stored != repr(network) or parameters.shape != (network.parameters,):
        raise PacelineError(f"{path} holds {stored}, but {network!r} is asked for; choose the same options")
    if not np.isfinite(parameters).all():
        raise PacelineError(f"{path} holds numbers that are not finite; expected a file that save wrote")
    return parameters
