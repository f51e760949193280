"""Going back to equal shares where what is believed of them is far from what was seen with them.

Where seconds hardly depend on the load, as in steps of a few milliseconds or on a GPU that is not full, noise takes
samples away from a worker little by little. Its seconds stay, so it looks ever slower, until it has one sample left
and another worker has all the others. A worker that becomes slow little by little looks the same. What tells the two
apart is a round with equal shares. So one is run where they would take much longer by now, as is believed, than when
they were last seen. If a worker is as slow as believed, the round says so, and the plan is used as before. If it is
not, the belief has failed. Then shares stay equal until the workers' mean seconds with them promise more than a
little.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paceline.few import Numbers, total
from paceline.rounds import Array

ALIKE = 0.25  # relative difference of loads, or one sample, up to which shares pass for equal
UNLIKE = 2.0  # times as long as seen, or more, and a belief is tried
MEMORY = 0.9  # weight of the mean seconds before, each round, once there are many
FIRST_DOUBT, LARGEST_DOUBT = 0.25, 1.0  # by what portion a plan must be quicker after a belief has failed
KEPT = 0.998  # of the doubt, each round
FIRST_WAIT, LARGEST_WAIT = (
    8.0,
    4096.0,
)  # rounds without equal shares before a trial; doubled where it was in vain

SETTLED = 8.0  # rounds with equal shares after a belief has failed, before means of theirs tell anything
OTHERS = 6  # numbers beside the workers' mean seconds: see ``start``


def start(shape: tuple[int, ...]) -> Array:
    """Nothing is known yet; shape is (..., n), and that of the state (..., n + 6).

    It holds: each worker's mean seconds with equal shares, NaN before; how many rounds these are of; which worker is
    believed to be the slowest with equal shares, and how long it would take, in the round that is to show it, else
    NaN; the doubt, the portion by which a plan must be quicker to be used; rounds since shares were equal; rounds to
    wait before a trial.
    """
    state = np.full((*shape[:-1], shape[-1] + OTHERS), np.nan)
    state[..., -OTHERS:] = 0.0, 0.0, np.nan, 0.0, 0.0, FIRST_WAIT
    return state


def alike(loads: Array, each: Array | float) -> NDArray[np.bool_]:
    """Whether all of a run pass for equal, (...,); each: what is equal, (..., 1)."""
    return np.asarray((np.abs(loads - each) <= np.maximum(ALIKE * each, 1.0)).all(-1))


def decide(
    state: Array, were: NDArray[np.bool_], seconds: Array, even: Array
) -> tuple[NDArray[np.bool_], Array]:
    """(whether the next round is to have equal shares, the state after a round).

    were: whether the round had equal shares, and tells something, (...,); seconds: that its workers took, and even:
    that they are expected to take with equal shares, both (..., n).
    """
    means, others = state[..., :-OTHERS], np.moveaxis(state[..., -OTHERS:], -1, 0)
    count, who, believed, doubt, age, wait = others
    with np.errstate(invalid="ignore", divide="ignore"):
        tried = were & ~np.isnan(believed)
        count = np.where(tried, 1.0, count + were)
        gain = np.where(were, np.maximum(1 / np.maximum(count, 1.0), 1 - MEMORY), 0.0)[..., None]
        shown = np.where(tried[..., None], np.minimum(seconds, believed[..., None]), seconds)
        means = np.where(gain == 1, shown, np.where(gain > 0, means + gain * (seconds - means), means))
        slowest = means.max(-1)
        it = np.take_along_axis(seconds, who[..., None].astype(int), -1)[..., 0]
        failed = tried & (it * UNLIKE < believed)
        doubted = np.minimum(np.maximum(2 * doubt, FIRST_DOUBT), LARGEST_DOUBT)
        doubt = np.where(tried, np.where(failed, doubted, 0.0), doubt * KEPT)
        wait = np.where(tried, np.where(failed, FIRST_WAIT, np.minimum(2 * wait, LARGEST_WAIT)), wait)
        age = np.where(were, 0.0, age + 1)
        asked = ~were & (age >= wait) & (even.max(-1) > UNLIKE * slowest)
        together = means.shape[-1] / (1 / means).sum(-1)
        stays = were & (doubt > 0) & ((count < SETTLED) | (slowest < (1 + doubt) * together))
    who = np.where(asked, even.argmax(-1), 0.0)
    believed = np.where(asked, even.max(-1), np.nan)
    others = np.stack([count, who, believed, doubt, age, wait], axis=-1)
    return asked | stays, np.concatenate([means, others], axis=-1)


def decide_few(state: Numbers, were: bool, seconds: Numbers, even: Numbers) -> tuple[bool, Numbers]:
    """The same of one run in plain numbers."""
    means, (count, who, believed, doubt, age, wait) = state[:-OTHERS], state[-OTHERS:]
    if not were:
        age, most = age + 1, max(even)
        asked = age >= wait and most > UNLIKE * max(means)
        who, believed = (float(even.index(most)), most) if asked else (0.0, math.nan)
        return asked, [*means, count, who, believed, doubt * KEPT, age, wait]
    if believed == believed:  # it was tried
        count, means = 1.0, [min(one, believed) for one in seconds]
        if seconds[int(who)] * UNLIKE < believed:
            doubt, wait = min(max(2 * doubt, FIRST_DOUBT), LARGEST_DOUBT), FIRST_WAIT
        else:
            doubt, wait = 0.0, min(2 * wait, LARGEST_WAIT)
    else:
        count, doubt = count + 1, doubt * KEPT
        gain = max(1 / count, 1 - MEMORY)
        means = seconds if gain == 1 else [m + gain * (s - m) for m, s in zip(means, seconds, strict=True)]
    stays = doubt > 0 and (
        count < SETTLED or max(means) < (1 + doubt) * (len(means) / total([1 / m for m in means]))
    )
    return stays, [*means, count, 0.0, math.nan, doubt, 0.0, wait]
