"""What a trained forecast keeps of the past: the newest rounds, each worker's mean and spread, who was right.

Rounds are kept in blocks: ``recent`` fills up and then moves into ``window``, so that a round copies a block
and not the whole past.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from paceline.forecast.protocol import Reading, seen, smoothed
from paceline.rounds import Array

BLOCK = 32  # rounds
MEMORY = 1000  # rounds over which a worker's mean and spread are taken
RECENT = 0.02  # weight of the newest squared error when a network is judged against EMA
SPEED, CPU, MEMORY_USE = range(3)  # channels


class LearnedState(NamedTuple):
    """Arrays (..., n) of workers, (...) or (..., n) of models; channels are speed, cpu, memory."""

    rounds: Array  # rounds so far, shape ()
    number: Array  # readings of each worker
    ema: Array
    mean: Array  # (3, ..., n), running mean of each channel
    spread: Array  # (3, ..., n), running variance
    ahead: Array  # (2, ..., n): cpu and memory for the round to come
    tail: Array  # (look-back, 3, ..., n): the newest rounds, newest last
    recent: Array  # (BLOCK, 4, ..., n): rounds not yet in the window; the fourth channel says who was there
    window: Array  # (window, 4, ..., n)
    parameters: Array  # (models..., P)
    damping: Array  # (models...)
    calm: Array  # (models...): consecutive training steps that gained little
    guesses: Array  # (2, ..., n): what the network and EMA said of the round to come
    wrong: Array  # (2, ..., n): running squared error of both


def begin(
    shape: tuple[int, ...], models: tuple[int, ...], start: Array, length: int, lookback: int
) -> LearnedState:
    """Before the first round. shape (..., n); models: their leading shape; start: parameters of each (P,)."""
    blank = np.full(shape, np.nan)
    length = math.ceil(length / BLOCK) * BLOCK
    return LearnedState(
        rounds=np.array(0),
        number=np.zeros(shape),
        ema=blank,
        mean=np.full((3, *shape), np.nan),
        spread=np.zeros((3, *shape)),
        ahead=np.full((2, *shape), np.nan),
        tail=np.full((lookback, 3, *shape), np.nan),
        recent=np.full((BLOCK, 4, *shape), np.nan),
        window=np.full((length, 4, *shape), np.nan),
        parameters=np.broadcast_to(start, (*models, len(start))).copy(),
        damping=np.ones(models),
        calm=np.zeros(models, dtype=np.int64),
        guesses=np.full((2, *shape), np.nan),
        wrong=np.full((2, *shape), np.nan),
    )


def remember(state: LearnedState, reading: Reading, gain: float) -> LearnedState:
    """Take in who ran how fast in the round just finished, and what is offered for the next; gain: of EMA."""
    here = seen(reading.speed)
    value = np.where(here, reading.speed, np.nan)
    blank = np.full(here.shape, np.nan)
    fresh = np.stack([blank if x is None else x for x in (reading.cpu, reading.memory)])
    fresh = np.where(np.isfinite(fresh), fresh, state.ahead)
    # the very first round has no reading of its own start: the one at its end stands in
    used = np.where(np.isnan(state.ahead), fresh, state.ahead)

    error = (state.guesses - value) ** 2
    wrong = smoothed(state.wrong, error, RECENT, here & np.isfinite(error))
    ema = smoothed(state.ema, value, gain, here)
    # an absent worker's speed is filled with its mean: no surprise, and no sample to train on
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
    """Mean and spread of each channel and worker, (3, ..., n), by which inputs are normalised."""
    floor = np.full_like(state.mean, 0.02)  # a reading that hardly moves says nothing
    floor[SPEED] = np.nan_to_num(0.01 * state.mean[SPEED], nan=1.0)
    return state.mean, np.maximum(np.sqrt(state.spread), floor)
